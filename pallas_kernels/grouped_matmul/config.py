"""Tile sizes of the grouped product."""

from liger_jax.pallas_kernels._tiles import previous_power_of_2

_LEAST_ROWS, _MOST_ROWS = 8, 256


def xla_rows(m: int, num_groups: int) -> int:
    """Rows of a tile: half of an average group, so that the ends of groups waste half of the products at most."""
    return min(m, max(_LEAST_ROWS, min(_MOST_ROWS, previous_power_of_2(m // (2 * num_groups)))))
