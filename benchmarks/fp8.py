"""What FP8 products would save a Llama-3-8B layer, and what they would cost its head.

    python -m benchmarks.fp8 [--tokens 8192] [--rounds 5] [--name NAME]
    python -m benchmarks.fp8 --head                       the head's noise alone, on any device

A product is x·W, dY·Wᵀ or xᵀ·dY of a layer's seven projections. Operands are scaled by the largest number of their
array (current scaling), forward ones to e4m3 and gradients to e5m2; products accumulate in float32. The step is one
layer's loss and all its gradients: norms, rotation, attention and gated unit are this package's, and the projections
are bfloat16 or FP8. The first row's feed-forward is `gated_mlp`, as in a model's unrolled layers. Figures are medians
over rounds in which every program has its turn, on random normal data.

The head's table: hidden states and head of random normal numbers, scaled so that the logits have the spread of its
first column. The noise is the root mean square of (FP8 logit − float32 logit); the bias is the mean difference of the
log-sum-exp.
"""

import argparse
import concurrent.futures
import functools

import jax
import jax.numpy as jnp

from benchmarks._measure import heading, in_rounds, save, table
from liger_jax.ops import apply_rope, causal_attention, gated_mlp, rms_norm, swiglu

WIDTH, INNER, HEADS, KEY_HEADS, HEAD = 4096, 14336, 32, 8, 128
SHAPES = dict(
    q=(WIDTH, HEADS * HEAD), k=(WIDTH, KEY_HEADS * HEAD), v=(WIDTH, KEY_HEADS * HEAD), o=(HEADS * HEAD, WIDTH),
    gate=(WIDTH, INNER), up=(WIDTH, INNER), down=(INNER, WIDTH),
)  # fmt: skip
FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2


# --- products ---------------------------------------------------------------------------------------------------------


def scaled(x, dtype):
    """x as FP8 numbers and the scale that makes them x again."""
    scale = jnp.max(jnp.abs(x)).astype(jnp.float32) / jnp.finfo(dtype).max.astype(jnp.float32)
    return (x.astype(jnp.float32) / scale).astype(dtype), scale


def product(a, b, contracting):
    """a·b of (FP8 numbers, scale) each, in bfloat16."""
    dimensions = (contracting, ((), ()))
    out = jax.lax.dot_general(a[0], b[0], dimensions, preferred_element_type=jnp.float32)
    return (out * (a[1] * b[1])).astype(jnp.bfloat16)


def scaled_product(a, b, contracting):
    """The same, in the pattern that XLA's pass over products turns into one FP8 product with scales."""
    wide = lambda x: x[0].astype(jnp.bfloat16) * x[1].astype(jnp.bfloat16)
    return jax.lax.dot_general(wide(a), wide(b), (contracting, ((), ())), preferred_element_type=jnp.bfloat16)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fp8_dot(multiply, x, w):
    """x (N, D), w (D, F) → (N, F); forward and both gradients are FP8 products."""
    return multiply(scaled(x, FORWARD), scaled(w, FORWARD), ((1,), (0,)))


def _fp8_dot_forward(multiply, x, w):
    x, w = scaled(x, FORWARD), scaled(w, FORWARD)
    return multiply(x, w, ((1,), (0,))), (x, w)


def _fp8_dot_backward(multiply, residuals, dy):
    x, w = residuals
    dy = scaled(dy, BACKWARD)
    return multiply(dy, w, ((1,), (1,))), multiply(x, dy, ((0,), (0,)))


fp8_dot.defvjp(_fp8_dot_forward, _fp8_dot_backward)


def bfloat16_dot(x, w):
    return x @ w


DOTS = {
    "bfloat16, gated_mlp": None,
    "bfloat16": bfloat16_dot,
    "FP8": functools.partial(fp8_dot, product),
    "FP8, XLA's pattern": functools.partial(fp8_dot, scaled_product),
}


# --- a layer ----------------------------------------------------------------------------------------------------------


def layer(dot, weights, x, cos, sin):
    """A decoder layer on x (B, T, D)."""
    batch, length = x.shape[:2]
    fused, dot = dot is None, dot or bfloat16_dot
    project = lambda name, x: dot(x.reshape(-1, x.shape[-1]), weights[name]).reshape(batch, length, -1)
    heads = lambda x: x.reshape(batch, length, -1, HEAD)
    h = rms_norm(x, weights["norm_attention"])
    q, k = apply_rope(heads(project("q", h)), heads(project("k", h)), cos, sin)
    attended = causal_attention(q, k, heads(project("v", h))).reshape(batch, length, -1)
    x = x + project("o", attended)
    h = rms_norm(x, weights["norm_feed_forward"])
    if fused:
        return x + gated_mlp(h, weights["gate"], weights["up"], weights["down"])
    return x + project("down", swiglu(project("gate", h), project("up", h)))


def layer_step(dot, tokens):
    """A program that runs a layer's loss and gradients on rows of 2,048 tokens."""
    rows, length = tokens // 2048, 2048
    keys = iter(jax.random.split(jax.random.key(0), 16))
    draw = lambda *shape: jax.random.normal(next(keys), shape, jnp.bfloat16)
    weights = {name: shape[0] ** -0.5 * draw(*shape) for name, shape in SHAPES.items()}
    weights |= dict(norm_attention=jnp.ones(WIDTH, jnp.bfloat16), norm_feed_forward=jnp.ones(WIDTH, jnp.bfloat16))
    x, target = draw(rows, length, WIDTH), draw(rows, length, WIDTH)
    angles = jnp.arange(length)[:, None] * 5e5 ** (-jnp.arange(0, HEAD, 2) / HEAD)
    angles = jnp.broadcast_to(jnp.concatenate([angles, angles], axis=-1), (rows, length, HEAD))
    cos, sin = jnp.cos(angles).astype(jnp.bfloat16), jnp.sin(angles).astype(jnp.bfloat16)

    def loss(weights, x):
        return jnp.sum((layer(dot, weights, x, cos, sin) * target).astype(jnp.float32))

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(weights, x).compile()
    return functools.partial(compiled, weights, x), "f8e5m2" in (compiled.as_text() or "")


def product_ms(tokens, shape, rounds):
    """Milliseconds of x·W in bfloat16, in FP8 from bfloat16 operands, and in FP8 from operands that are FP8."""
    x = jax.random.normal(jax.random.key(0), (tokens, shape[0]), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)
    ready = jax.jit(lambda x, w: (scaled(x, FORWARD), scaled(w.T, FORWARD)))(x, w)
    programs = {
        "bfloat16": functools.partial(jax.jit(bfloat16_dot), x, w),
        "FP8": functools.partial(jax.jit(DOTS["FP8"]), x, w),
        "FP8 operands": functools.partial(jax.jit(lambda x, w: product(x, w, ((1,), (1,)))), *ready),
    }
    return in_rounds(programs, rounds=rounds, seconds=0.1)


# --- the head ---------------------------------------------------------------------------------------------------------


def head_noise(spread, tokens=256, width=4096, vocab=32768):
    """The noise of FP8 logits, and the bias of their log-sum-exp, for logits of a standard deviation."""
    x = jax.random.normal(jax.random.key(2), (tokens, width))
    w = spread * width**-0.5 * jax.random.normal(jax.random.key(3), (vocab, width))

    def wide(x):
        numbers, scale = scaled(x, FORWARD)
        return numbers.astype(jnp.float32) * scale

    logits = jnp.matmul(x, w.T, precision="highest")
    rounded = jnp.matmul(wide(x), wide(w).T, precision="highest")
    lse = jax.nn.logsumexp
    return jnp.sqrt(jnp.mean((rounded - logits) ** 2)), jnp.mean(lse(rounded, axis=1) - lse(logits, axis=1))


# --- the command ------------------------------------------------------------------------------------------------------


def head_table() -> str:
    rows = [[f"{spread}", *(f"{float(x):.4f}" for x in head_noise(spread))] for spread in (1, 2, 4, 8)]
    return table(["logits' standard deviation", "noise of an FP8 logit", "bias of log-sum-exp"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fp8")
    parser.add_argument("--tokens", type=int, default=8192, help="in rows of 2,048")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each program")
    parser.add_argument("--head", action="store_true", help="the head's table alone")
    parser.add_argument("--name", default="fp8", help="of the table's file, without its ending")
    options = parser.parse_args()
    if options.head:
        print(head_table())
        return
    with concurrent.futures.ThreadPoolExecutor() as pool:
        steps = dict(zip(DOTS, pool.map(lambda dot: layer_step(dot, options.tokens), DOTS.values()), strict=True))
    ms = in_rounds({name: run for name, (run, _) in steps.items()}, rounds=options.rounds)
    rows = [
        [name, "yes" if steps[name][1] else "no", f"{time:.2f}", f"{ms['bfloat16, gated_mlp'] / time:.2f}"]
        for name, time in ms.items()
    ]
    print({name: round(time, 3) for name, time in ms.items()}, flush=True)
    step = table(["projections", "FP8 products in the program", "a layer's step, ms", "×"], rows)
    rows = []
    for name in ("q", "gate", "down"):
        times = product_ms(options.tokens, SHAPES[name], options.rounds)
        first = times["bfloat16"]
        rows.append([name, *(f"{time:.3f} ({first / time:.2f} ×)" for time in times.values())])
    products = table(["x·W", "bfloat16, ms", "FP8 from bfloat16, ms", "FP8 from FP8, ms"], rows)
    command = f"python -m benchmarks.fp8 --tokens {options.tokens}"
    save(options.name, "\n\n".join([heading(command), step, products, head_table()]))


if __name__ == "__main__":
    main()
