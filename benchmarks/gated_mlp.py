"""The gated feed-forward's products with what lies between them, by kernel: the evidence behind `ops.gated_mlp`.

    python -m benchmarks.gated_mlp [--shapes 16384,2048,8192]

"up" makes up by a product, and then the gated product. "gradients" makes the gated product's gradient by a product, and
then the gradients of gate and up and the gated product once more. All is SwiGLU in bfloat16. The programs of a shape
take turns in rounds; the unit is XLA's plain product of the same size.
"""

import argparse
import functools

import jax
import jax.numpy as jnp

from benchmarks._measure import heading, in_rounds, save, table
from liger_jax.pallas_kernels.gated_mlp import formulas, mosaic_gpu, triton, xla

OF_MODELS = (16384, 2048, 8192), (16384, 896, 4864), (8192, 2304, 9216), (8192, 4096, 14336)
SHAPES = (*OF_MODELS, (4096, 2048, 8192), (2048, 2048, 8192))  # and of few tokens
OPTIONS = {"activation": "silu", "precision": None}
KERNELS = {
    "xla": (xla, OPTIONS),
    "triton": (triton, {**OPTIONS, "interpret": False}),
    "mosaic_gpu": (mosaic_gpu, OPTIONS),
}


def programs(n: int, d: int, f: int):
    """(what, kernel) → a compiled program, ready to run."""
    shapes = [(n, d), (d, f), (f, d), (n, f), (n, f)]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    x, up_kernel, down_kernel, gate, up = (
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    )
    cases = {
        "up": ("up_and_product", (x, up_kernel * d**-0.5, gate)),
        "gradients": ("gradients_and_product", (x, down_kernel * d**-0.5, gate, up)),
    }
    steps = {}
    for what, (name, arrays) in cases.items():
        product = formulas.down_gradient if what == "gradients" else jnp.matmul
        runs = {"product alone": functools.partial(product, precision=None)}
        runs |= {kernel: functools.partial(getattr(module, name), **o) for kernel, (module, o) in KERNELS.items()}
        for kernel, run in runs.items():
            arguments = arrays[:2] if kernel == "product alone" else arrays
            compiled = jax.jit(run).lower(*arguments).compile()
            steps[what, kernel] = functools.partial(compiled, *arguments)
    return steps


def main():
    parser = argparse.ArgumentParser()
    shape = lambda text: tuple(map(int, text.split(",")))
    parser.add_argument("--shapes", nargs="+", type=shape, default=SHAPES)
    shapes = parser.parse_args().shapes
    lines = []
    for n, d, f in shapes:
        times = in_rounds(programs(n, d, f), rounds=3, seconds=0.15)
        for what in ("up", "gradients"):
            unit = times[what, "product alone"]
            own = [times[what, kernel] for kernel in KERNELS]
            lines.append(
                [f"({n}, {d}, {f})", what, f"{1e3 * unit:.0f}", *(f"{1e3 * x:.0f} ({x / unit:.2f})" for x in own)]
            )
        header = ["(N, D, F), bf16", "what", "product alone, µs", *(f"{kernel}, µs (× product)" for kernel in KERNELS)]
        command = "python -m benchmarks.gated_mlp --shapes " + " ".join(f"{n},{d},{f}" for n, d, f in shapes)
        save("gated_mlp", heading(command) + "\n" + table(header, lines))


if __name__ == "__main__":
    main()
