"""Which rows of which tile belong to which group: what every backend of the grouped product walks over.

Rows are sorted by group, and tiles have a fixed number of rows, so that a tile may hold the end of one group and the
beginnings of others. A *visit* is a tile and one group that has rows in it. There are at most M / rows + E − 1 visits,
whatever the sizes of the groups.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels._tiles import cdiv


class Visits(NamedTuple):
    """Visits in the order of rows, int32. Behind the last one the entries have no rows.

    Attributes:
        tile: (visits,), the number of the tile.
        group: (visits,).
        begin: (visits,), the group's first row.
        end: (visits,), the row behind the group's last.
        count: (), how many visits there are.
    """

    tile: jax.Array
    group: jax.Array
    begin: jax.Array
    end: jax.Array
    count: jax.Array


def most_visits(m: int, num_groups: int, rows: int) -> int:
    """The most visits that m rows in groups of any sizes can take."""
    return cdiv(m, rows) + num_groups - 1


def visits(group_sizes: jax.Array, m: int, rows: int) -> Visits:
    """The visits to tiles of `rows` rows, for group_sizes (E,) int32 of a sum of at most m."""
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    begins = ends - group_sizes
    first_tiles = begins // rows
    num_tiles = jnp.where(group_sizes > 0, (ends - 1) // rows - first_tiles + 1, 0)
    visits_so_far = jnp.cumsum(num_tiles, dtype=jnp.int32)
    count = visits_so_far[-1]
    number = jnp.arange(most_visits(m, group_sizes.shape[0], rows), dtype=jnp.int32)
    group = jnp.searchsorted(visits_so_far, number, side="right", method="compare_all").astype(jnp.int32)
    group = jnp.minimum(group, group_sizes.shape[0] - 1)
    tile = first_tiles[group] + number - (visits_so_far - num_tiles)[group]
    is_one = number < count
    return Visits(*(jnp.where(is_one, x, 0) for x in (tile, group, begins[group], ends[group])), count)


def group_of_rows(group_sizes: jax.Array, m: int) -> jax.Array:
    """(m,) int32: each row's group, and E behind the last group."""
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    rows = jnp.arange(m, dtype=jnp.int32)
    return jnp.searchsorted(ends, rows, side="right", method="scan_unrolled").astype(jnp.int32)
