"""Each op's kernels against each other on one GPU: the evidence behind the defaults.

    python -m benchmarks.implementations

Times are kernel times; "backward" runs the gradient alone, from a given cotangent.
"""

import jax
import jax.numpy as jnp

from benchmarks._measure import extra_mib, heading, kernel_ms, save, table
from benchmarks._shapes import SHAPES
from liger_jax import apply_rope, cross_entropy, fused_linear_cross_entropy, geglu, rms_norm, swiglu

BF16 = jnp.bfloat16
ROWS = 16384


def normal(seed, *shape, dtype=BF16):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def elementwise_cases():
    for width in (896, 2048, 4096, 8192):
        yield f"rms_norm {ROWS}×{width}", rms_norm, (normal(0, ROWS, width), normal(1, width))
    for width in (4864, 14336):
        yield f"swiglu {ROWS}×{width}", swiglu, (normal(0, ROWS, width), normal(1, ROWS, width))
        yield f"geglu {ROWS}×{width}", geglu, (normal(0, ROWS, width), normal(1, ROWS, width))
    for q_heads, k_heads, width in ((14, 2, 64), (32, 8, 64), (32, 8, 128)):
        angles = normal(2, 1, 2048, width, dtype=jnp.float32)
        tables = jnp.cos(angles), jnp.sin(angles)
        rope = lambda q, k, tables=tables, **options: apply_rope(q, k, *tables, **options)
        heads = normal(0, 8, 2048, q_heads, width), normal(1, 8, 2048, k_heads, width)
        yield f"apply_rope 8×2048, {q_heads}/{k_heads}×{width}", rope, heads
    logits = normal(0, 4096, 128256)
    labels = jax.random.randint(jax.random.key(3), (4096,), 0, 128256)
    ce = lambda logits, **options: cross_entropy(logits, labels, **options)
    yield "cross_entropy 4096×128256", ce, (logits,)


def elementwise_rows():
    for name, op, args in elementwise_cases():
        for implementation in ("xla", "triton"):
            f = lambda *args: op(*args, implementation=implementation)  # noqa: B023 (called at once)
            out = jax.eval_shape(f, *args)
            leaves, tree = jax.tree.flatten(out)
            dy = jax.tree.unflatten(tree, [normal(9 + i, *o.shape, dtype=o.dtype) for i, o in enumerate(leaves)])
            backward = lambda dy, *args: jax.vjp(f, *args)[1](dy)  # noqa: B023 (called at once)
            size = lambda xs: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(xs))
            forward_ms, backward_ms = kernel_ms(f, *args), kernel_ms(backward, dy, *args)
            forward_tbs = (size(args) + size(out)) / forward_ms / 1e9
            backward_tbs = (2 * size(args) + size(out)) / backward_ms / 1e9
            yield [
                name,
                implementation,
                f"{1e3 * forward_ms:.1f}",
                f"{forward_tbs:.2f}",
                f"{1e3 * backward_ms:.1f}",
                f"{backward_tbs:.2f}",
            ]


def linear_rows():
    for name in ("llama-3-8b-head", "qwen2-0.5b-head", "small"):
        n, d, v = SHAPES[name]
        hidden, weight = normal(0, n, d), normal(1, v, d) * d**-0.5
        labels = jax.random.randint(jax.random.key(3), (n,), 0, v)
        product_ms = kernel_ms(lambda h, w: h @ w.T, hidden, weight)

        def plain(h, w, labels=labels):
            logits = (h @ w.T).astype(jnp.float32)
            target = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
            return jnp.mean(jax.nn.logsumexp(logits, axis=1) - target)

        cases = {"full logits, plain JAX": plain}
        for implementation, mode in (("xla", "fast"), ("xla", "lean"), ("triton", "lean")):
            cases[f"{implementation}, {mode}"] = lambda h, w, labels=labels, mode=mode, i=implementation: (
                fused_linear_cross_entropy(h, w, labels, mode=mode, implementation=i)
            )
        for case, loss in cases.items():
            both = jax.value_and_grad(loss, (0, 1))
            forward_ms, both_ms = kernel_ms(loss, hidden, weight), kernel_ms(both, hidden, weight)
            yield [
                f"{name} ({n}, {d}, {v})",
                case,
                f"{forward_ms:.2f}",
                f"{both_ms:.2f}",
                f"{both_ms / (3 * product_ms):.2f}",
                f"{extra_mib(both, hidden, weight):.0f}",
            ]


def main():
    text = heading("python -m benchmarks.implementations") + "\n"
    header = ["op, bf16", "implementation", "forward µs", "TB/s", "backward µs", "TB/s"]
    text += table(header, list(elementwise_rows())) + "\n"
    header = [
        "fused_linear_cross_entropy (N, D, V), bf16",
        "implementation",
        "forward ms",
        "forward + backward ms",
        "× three products",
        "extra MiB",
    ]
    text += table(header, list(linear_rows()))
    save("implementations", text)


if __name__ == "__main__":
    main()
