"""The fused loss on Hopper by the tiles of its products over the width D: the evidence behind config.mosaic_gpu_tiles.

    python -m benchmarks.tiles [--shapes llama-3-8b-head qwen2-0.5b-head]

The forward alone and whole steps are timed in rounds with XLA's plain product of hidden and weight, whose time is the
unit.
"""

import argparse
import dataclasses

import jax

from benchmarks._measure import heading, in_rounds, save, table
from benchmarks._shapes import SHAPES
from benchmarks.fused_linear_cross_entropy import make_inputs
from liger_jax import fused_linear_cross_entropy
from liger_jax.pallas_kernels._hopper_tiles import Tiles
from liger_jax.pallas_kernels.fused_linear_cross_entropy import config

SHARED, IN_TURN = Tiles(), Tiles(columns=128, in_turn=True, stages=5)
TILES = {
    "shared, 128 × 256": SHARED,
    "shared, 128 × 256, snake 8 wide": dataclasses.replace(SHARED, snake_width=8),
    "shared, 128 × 192": dataclasses.replace(SHARED, columns=192),
    "in turn, 128 × 128": IN_TURN,
    "in turn, 128 × 128, snake 32 wide": dataclasses.replace(IN_TURN, snake_width=32),
}


def programs(shape: tuple[int, int, int]):
    """(tiles, what) → a compiled program, ready to run."""
    hidden, weight, labels = make_inputs(shape, "random", "bfloat16")
    compiled = lambda f: jax.jit(f).lower(hidden, weight).compile()
    steps = {("", "product"): compiled(lambda h, w: h @ w.T)}
    loss = lambda mode: lambda h, w: fused_linear_cross_entropy(h, w, labels, mode=mode, implementation="mosaic_gpu")
    default = config.mosaic_gpu_logit_tiles
    for name, tiles in TILES.items():
        config.mosaic_gpu_logit_tiles = lambda *_, tiles=tiles: tiles
        jax.clear_caches()  # a traced kernel keeps the tiles it was traced with
        steps[name, "forward"] = compiled(loss("fast"))
        for mode in ("fast", "lean"):
            steps[name, mode] = compiled(jax.value_and_grad(loss(mode), (0, 1)))
    config.mosaic_gpu_logit_tiles = default
    return {key: lambda program=program: program(hidden, weight) for key, program in steps.items()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--shapes", nargs="+", choices=tuple(SHAPES), default=["llama-3-8b-head", "gemma-2-2b-head", "qwen2-0.5b-head"]
    )
    shapes = parser.parse_args().shapes
    lines = []
    for shape in shapes:
        times = in_rounds(programs(SHAPES[shape]))
        product = times["", "product"]
        for tiles in TILES:
            forward, fast, lean = (times[tiles, what] / product for what in ("forward", "fast", "lean"))
            lines.append([f"{SHAPES[shape]}", tiles, f"{forward:.3f}", f"{fast / 3:.3f}", f"{lean / 3:.3f}"])
        header = ["(N, D, V), bf16", "tiles", "forward, × one product", "fast, × three", "lean, × three"]
        save("tiles", heading("python -m benchmarks.tiles --shapes " + " ".join(shapes)) + "\n" + table(header, lines))


if __name__ == "__main__":
    main()
