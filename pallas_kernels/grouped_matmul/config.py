"""Tile sizes of the grouped product."""

from liger_jax.pallas_kernels._hopper_tiles import Tiles
from liger_jax.pallas_kernels._tiles import previous_power_of_2

_LEAST_ROWS, _MOST_ROWS = 8, 256


def xla_rows(m: int, num_groups: int) -> int:
    """Rows of a tile: half of an average group, so that the ends of groups waste half of the products at most."""
    return min(m, max(_LEAST_ROWS, min(_MOST_ROWS, previous_power_of_2(m // (2 * num_groups)))))


# Two warpgroups share a tile of 128 rows: shared memory holds 4 · (128 + 256) · 64 · 2 bytes of operands, 16 KiB of
# staged pieces and 16 KiB of staged rows, 224 of 227 KiB.
HOPPER_TILES = Tiles(columns=256, stages=4)
