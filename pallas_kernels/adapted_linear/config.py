"""Tile sizes of an adapted projection's products, and the sizes at which Hopper's kernel is used."""

from liger_jax.pallas_kernels._hopper_tiles import ROWS, Tiles
from liger_jax.pallas_kernels.tiles import cdiv

# Of a layer of Llama-3-8B, 4 × 2,048 tokens, on an H200 tiles in turn take 13.69 ms, and shared ones of 256 columns
# 13.90 (benchmarks/results/lora.md).
TILES = Tiles(columns=128, in_turn=True, stages=5, snake_width=8)
LEAST_TILES = 264  # two for each core
# Eleven kernels more are lowered at each start, which takes 9 seconds on an H200's host, where a step of four layers of
# Llama-3-8B takes 0.95 of its time. By these figures all 32 layers gain the wait back in 260 steps of 4 × 2,048 tokens,
# and Llama-3.2-1B, 2,048 wide, in 1,600.
LEAST_WIDTH = 3072


def is_large(n: int, d: int, f: int) -> bool:
    """Whether products (n, d) · (d, f), and those of x's gradient, are worth kernels of their own.

    They have so many tiles that the idle cores of the last round do not matter, and gain back what a start waits.
    """
    tiles = cdiv(n, ROWS) * cdiv(min(d, f), TILES.columns)
    return tiles >= LEAST_TILES and min(d, f) >= LEAST_WIDTH
