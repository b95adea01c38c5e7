"""Tile sizes of an adapted projection's products, and the sizes at which Hopper's kernel is used."""

from liger_jax.pallas_kernels._hopper_tiles import ROWS, Tiles
from liger_jax.pallas_kernels.tiles import cdiv

TILES = Tiles(columns=256)
LEAST_TILES = 264  # two for each core


def is_large(n: int, f: int) -> bool:
    """Whether a product (n, f) has so many tiles that the idle cores of the last round do not matter."""
    return cdiv(n, ROWS) * cdiv(f, TILES.columns) >= LEAST_TILES

# Of the pass that makes two gradients of an adapter.
PAIR_ROWS = 1024  # of a block
PAIR_COLUMNS = 512
PAIR_TILE_ROWS = 32
PAIR_WARPS = 8
