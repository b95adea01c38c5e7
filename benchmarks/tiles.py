"""Times of the fused loss's Hopper kernels by the shape of their tiles, on one GPU: the evidence behind the defaults.

    python -m benchmarks.tiles [--shapes A C]

Each line is one kernel on one shape; "× matmul" is against XLA's own product of the same size, timed in turn with it.
"""

import argparse
import contextlib
import dataclasses

import jax
import jax.numpy as jnp

from benchmarks._measure import heading, kernel_ms, save, table
from benchmarks.fused_linear_cross_entropy import SHAPES, make_inputs
from liger_jax.pallas_kernels._hopper import Tiles
from liger_jax.pallas_kernels.cross_entropy.config import LogitOptions
from liger_jax.pallas_kernels.cross_entropy.xla import Cotangents
from liger_jax.pallas_kernels.fused_linear_cross_entropy import config, mosaic_gpu, xla
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import Inputs, LinearOptions

SHARED, IN_TURN = Tiles(), Tiles(columns=128, in_turn=True, stages=5)
TILES = {
    "shared 128×256": SHARED,
    "shared 128×256, snake 8": dataclasses.replace(SHARED, snake_width=8),
    "shared 128×256, snake 32": dataclasses.replace(SHARED, snake_width=32),
    "shared 128×192": dataclasses.replace(SHARED, columns=192, stages=5),
    "in turn 128×128": IN_TURN,
    "in turn 128×128, snake 8": dataclasses.replace(IN_TURN, snake_width=8),
}
SLICE, CHUNK = 4096, 2048
OPTIONS = LinearOptions(LogitOptions(), "vd", None, "lean", SLICE)


@contextlib.contextmanager
def tiles_of(tiles: Tiles):
    default = config.mosaic_gpu_tiles
    config.mosaic_gpu_tiles = lambda *_: tiles
    try:
        yield
    finally:
        config.mosaic_gpu_tiles = default


def kernels(inputs: Inputs):
    """Name → (kernel, XLA's product of the same size, arguments of both)."""
    hidden, weight, labels, *_ = inputs
    n = len(hidden)
    lse, g = jnp.full(n, 10.0), Cotangents(jnp.full(n, 1 / n), jnp.full(n, -1 / n), None)
    start = jnp.zeros(1, jnp.int32)
    du = jax.random.normal(jax.random.key(4), (n, SLICE), jnp.bfloat16)
    chunk_du = jax.random.normal(jax.random.key(5), (CHUNK, len(weight)), jnp.bfloat16)
    part = weight[:SLICE]
    logits = lambda h, w: h @ w.T
    yield (
        "statistics",
        lambda h, w: mosaic_gpu.statistics(inputs._replace(hidden=h, weight=w), options=OPTIONS),
        (logits),
        (hidden, weight),
    )
    yield (
        "statistics, E kept",
        lambda h, w: mosaic_gpu._partial_statistics(inputs._replace(hidden=h, weight=w), OPTIONS, keep=True),
        logits,
        (hidden, weight),
    )
    yield (
        f"du of {SLICE}",
        lambda h, w: mosaic_gpu._logit_gradients(inputs._replace(hidden=h, weight=w), lse, g, start, SLICE, OPTIONS),
        lambda h, w: h @ w[:SLICE].T,
        (hidden, weight),
    )
    yield (
        f"dX += du · W, {SLICE}",
        lambda du, w: mosaic_gpu._add_product(
            jnp.zeros(hidden.shape, jnp.float32), du, inputs._replace(weight=w), start, OPTIONS
        ),
        lambda du, _: xla.product(du, part, 1, 0, OPTIONS),
        (du, weight),
    )
    yield (
        f"dW = duᵀ · X, {SLICE}",
        lambda du, h: mosaic_gpu._put_product(jnp.zeros(part.shape, jnp.bfloat16), du, h, start, OPTIONS),
        lambda du, h: xla.product(du, h, 0, 0, OPTIONS).astype(jnp.bfloat16),
        (du, hidden),
    )
    zeros = lambda: jnp.zeros(weight.shape, jnp.bfloat16)
    yield (
        f"dW halves += duᵀ · X, {CHUNK} tokens",
        lambda du, h: mosaic_gpu._add_to_halves(zeros(), zeros(), du, h, OPTIONS),
        lambda du, h: xla.product(du, h, 0, 0, OPTIONS).astype(jnp.bfloat16),
        (chunk_du, hidden[:CHUNK]),
    )


def rows(shape):
    hidden, weight, labels = make_inputs(shape, "random", "bfloat16")
    for name, kernel, plain, arguments in kernels(Inputs(hidden, weight, labels, None, None)):
        for tiles_name, tiles in TILES.items():
            with tiles_of(tiles):
                try:
                    ms = kernel_ms(lambda *a, kernel=kernel: kernel(*a), *arguments, iterations=8)
                except ValueError as error:
                    yield [f"{shape}", name, tiles_name, f"{error}"[:80], ""]
                    continue
            plain_ms = kernel_ms(plain, *arguments, iterations=8)
            yield [f"{shape}", name, tiles_name, f"{ms:.3f}", f"{ms / plain_ms:.3f}"]
            print(*([f"{shape}", name, tiles_name, f"{ms:.3f}", f"{ms / plain_ms:.3f}"]), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=["A", "C"])
    shapes = parser.parse_args().shapes
    lines = [line for name in shapes for line in rows(SHAPES[name])]
    header = ["(N, D, V), bf16", "kernel", "tiles", "ms", "× matmul"]
    save("tiles", heading("python -m benchmarks.tiles --shapes " + " ".join(shapes)) + "\n" + table(header, lines))


if __name__ == "__main__":
    main()
