"""Time and memory of the fused loss's modes against their chunk size on one GPU: the evidence behind the defaults.

python -m benchmarks.token_chunks
"""

import jax
import jax.numpy as jnp

from benchmarks._measure import extra_mib, heading, kernel_ms, save, table
from benchmarks._shapes import SHAPES
from liger_jax import fused_linear_cross_entropy

MEASURED = {name: SHAPES[name] for name in ("llama-3-8b-head", "qwen2-0.5b-head", "small")}
MEASURED["100m-example-head"] = (32768, 768, 32000)
TOKEN_CHUNKS = (256, 512, 1024, 2048, 4096)
VOCAB_SLICES = (1024, 2048, 4096, 8192)


def rows():
    for name, (n, d, v) in MEASURED.items():
        normal = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
        hidden, weight = normal(0, n, d), normal(1, v, d) * d**-0.5
        labels = jax.random.randint(jax.random.key(3), (n,), 0, v)
        product_ms = kernel_ms(lambda h, w: h @ w.T, hidden, weight)
        for mode, implementation, sizes in (
            ("fast", "xla", TOKEN_CHUNKS),
            ("lean", "xla", VOCAB_SLICES),
            ("lean", "triton", VOCAB_SLICES),
        ):
            for size in sizes:

                def loss(h, w, labels=labels, mode=mode, size=size, implementation=implementation):
                    return fused_linear_cross_entropy(
                        h, w, labels, mode=mode, chunk_size=size, implementation=implementation
                    )

                both = jax.value_and_grad(loss, (0, 1))
                ms, mib = kernel_ms(both, hidden, weight, iterations=6), extra_mib(both, hidden, weight)
                shape = f"{name} ({n}, {d}, {v})"
                yield [shape, mode, implementation, f"{size}", f"{ms:.2f}", f"{ms / product_ms / 3:.2f}", f"{mib:.0f}"]


def main():
    header = ["(N, D, V), bf16", "mode", "kernel", "chunk", "forward + backward ms", "× three products", "extra MiB"]
    save("token_chunks", heading("python -m benchmarks.token_chunks") + "\n" + table(header, list(rows())))


if __name__ == "__main__":
    main()
