"""Tile sizes of the grouped product."""

from liger_jax.pallas_kernels._hopper_tiles import Tiles
from liger_jax.pallas_kernels._tiles import previous_power_of_2

_LEAST_ROWS, _MOST_ROWS = 8, 256


def xla_rows(m: int, num_groups: int) -> int:
    """Rows of a tile: half of an average group, so that the ends of groups waste half of the products at most."""
    return min(m, max(_LEAST_ROWS, min(_MOST_ROWS, previous_power_of_2(m // (2 * num_groups)))))


# Shared memory, at most 227 KiB: 5 · (128 + 128) · 64 · 2 bytes of operands in the ring, 32 KiB of staged pieces and
# 16 KiB of staged rows.
HOPPER_PRODUCT = HOPPER_GRADIENT = Tiles(columns=128, in_turn=True, stages=5)
STAGED_PIECES = 4  # of 64 rows by 32 columns, for each warpgroup
STAGED_COLUMNS = 64  # of 64 rows that leave one by one, for each warpgroup
