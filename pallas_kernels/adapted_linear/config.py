"""Tile sizes of an adapted projection's products, and the sizes at which Hopper's kernel is used."""

from liger_jax.pallas_kernels._hopper_tiles import ROWS, Tiles
from liger_jax.pallas_kernels.tiles import cdiv

# Of a layer of Llama-3-8B, 4 × 2,048 tokens, on an H200 tiles in turn take 13.69 ms, and shared ones of 256 columns
# 13.90 (benchmarks/results/lora.md).
TILES = Tiles(columns=128, in_turn=True, stages=5, snake_width=8)
LEAST_TILES = 264  # two for each core


def is_large(n: int, f: int) -> bool:
    """Whether a product (n, f) has so many tiles that the idle cores of the last round do not matter."""
    return cdiv(n, ROWS) * cdiv(f, TILES.columns) >= LEAST_TILES
