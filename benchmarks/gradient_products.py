"""The products of the fused loss's gradients, XLA's and ours: the evidence behind who computes which.

    python -m benchmarks.gradient_products [--shapes llama-3-8b-head] [--tokens 2048 3072]

The products of one chunk's du (tokens, V) are dX = du · W and dW = duᵀ · X. dW is written in bfloat16 or float32, or
added to a sum over chunks in three bytes. They are timed in rounds with XLA's plain product of hidden and weight, whose
time is the unit.
"""

import argparse
import concurrent.futures

import jax
import jax.numpy as jnp

from benchmarks._measure import heading, in_rounds, save, table
from benchmarks._shapes import HEADS, SHAPES
from liger_jax.pallas_kernels import _hopper
from liger_jax.pallas_kernels.cross_entropy.config import LogitOptions
from liger_jax.pallas_kernels.fused_linear_cross_entropy import formulas
from liger_jax.pallas_kernels.fused_linear_cross_entropy import mosaic_gpu_gradients as kernels
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import Inputs, LinearOptions

OPTIONS = LinearOptions(LogitOptions(), "vd", precision=None, mode="fast", chunk_size=0)
BF16, F32 = jnp.bfloat16, jnp.float32


def products(tokens: int, d: int, v: int):
    """Name → a function of (hidden, weight, du)."""
    start = jnp.zeros(1, jnp.int32)

    def ours_added_to_dx(hidden, weight, du):
        inputs = Inputs(hidden, weight, jnp.zeros(tokens, jnp.int32), None, None)
        return kernels.add_product(jnp.zeros((tokens, d), F32), du, inputs, start, OPTIONS)

    def ours_written_to_dw(dtype):
        return lambda hidden, weight, du: kernels.put_product(
            _hopper.empty(hidden, (v, d), dtype), du, hidden, start, OPTIONS
        )

    def ours_added_to_dw(hidden, weight, du):
        sums = jnp.zeros((v, d), BF16), jnp.full((v, d), 128, jnp.uint8)
        return kernels.add_to_sum(*sums, du, hidden, start, OPTIONS)

    return {
        "plain product": lambda hidden, weight, du: hidden @ weight.T,
        "dX, XLA": lambda hidden, weight, du: formulas.product(du, weight, 1, 0, OPTIONS, BF16),
        "dX, ours, added to float32": ours_added_to_dx,
        "dW in bfloat16, XLA": lambda hidden, weight, du: formulas.weight_gradient(du, hidden, OPTIONS, BF16),
        "dW in bfloat16, ours": ours_written_to_dw(BF16),
        "dW in float32, XLA": lambda hidden, weight, du: formulas.weight_gradient(du, hidden, OPTIONS, F32),
        "dW in float32, ours": ours_written_to_dw(F32),
        "dW added in three bytes, ours (and setting them)": ours_added_to_dw,
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=list(HEADS))
    parser.add_argument("--tokens", nargs="+", type=int, help="of a chunk; the shape's if none")
    arguments = parser.parse_args()
    lines = []
    for shape in arguments.shapes:
        n, d, v = SHAPES[shape]
        for tokens in arguments.tokens or [n]:
            keys = jax.random.split(jax.random.key(0), 3)
            sizes = (tokens, d), (v, d), (tokens, v)
            operands = [jax.random.normal(key, size, BF16) for key, size in zip(keys, sizes, strict=True)]
            lowered = {name: jax.jit(f).lower(*operands) for name, f in products(tokens, d, v).items()}
            with concurrent.futures.ThreadPoolExecutor() as pool:
                compiled = pool.map(lambda program: program.compile(), lowered.values())
                programs = dict(zip(lowered, compiled, strict=True))
            times = in_rounds({name: lambda f=f, x=operands: f(*x) for name, f in programs.items()})
            unit = times["plain product"]
            lines += [[f"{(tokens, d, v)}", name, f"{ms:.2f}", f"{ms / unit:.3f}"] for name, ms in times.items()]
    command = f"python -m benchmarks.gradient_products --shapes {' '.join(arguments.shapes)}"
    command += f" --tokens {' '.join(map(str, arguments.tokens))}" if arguments.tokens else ""
    header = ["(tokens, D, V), bf16", "product", "ms", "× plain"]
    save("gradient_products", heading(command) + "\n" + table(header, lines))


if __name__ == "__main__":
    main()
