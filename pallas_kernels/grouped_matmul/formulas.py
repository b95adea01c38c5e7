"""Which rows of which tile belong to which group: what every backend of the grouped product walks over.

Rows are sorted by group, and tiles have a fixed number of rows, so that a tile may hold the end of one group and the
beginnings of others. A *visit* is a tile and one group that has rows in it. There are at most M / rows + E − 1 visits,
whatever the sizes of the groups.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels.tiles import cdiv


class Visits(NamedTuple):
    """Visits in the order of rows, int32. After the last one come the last tile and group again, without rows."""

    tile: jax.Array  # (visits,), the number of the tile
    group: jax.Array  # (visits,)
    begin: jax.Array  # (visits,), the group's first row
    end: jax.Array  # (visits,), the row after the group's last
    total: jax.Array  # (), how many visits there are


def most_visits(m: int, num_groups: int, rows: int) -> int:
    """The most visits that m rows in groups of any sizes can take, also if empty groups take one."""
    return cdiv(m, rows) + num_groups - 1


def visits(group_sizes: jax.Array, m: int, rows: int, *, every_group: bool = False) -> Visits:
    """The visits to tiles of `rows` rows, for group_sizes (E,) int32 of a sum of at most m.

    With `every_group` an empty group has a visit, too, which has no rows.
    """
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    begins = ends - group_sizes
    first_tiles = begins // rows
    num_tiles = jnp.where(group_sizes > 0, (ends - 1) // rows - first_tiles + 1, int(every_group))
    visits_so_far = jnp.cumsum(num_tiles, dtype=jnp.int32)
    total = visits_so_far[-1]
    number = jnp.arange(most_visits(m, group_sizes.shape[0], rows), dtype=jnp.int32)
    group = jnp.searchsorted(visits_so_far, number, side="right", method="compare_all").astype(jnp.int32)
    group = jnp.minimum(group, group_sizes.shape[0] - 1)
    tile = first_tiles[group] + number - (visits_so_far - num_tiles)[group]
    is_one = number < total
    # The last group may be empty and follow the last tile.
    tile = jnp.where(is_one, jnp.minimum(tile, cdiv(m, rows) - 1), cdiv(m, rows) - 1)
    begin, end = (jnp.where(is_one, x[group], 0) for x in (begins, ends))
    return Visits(tile, group, begin, end, total)


class GroupTiles(NamedTuple):
    """Tiles that begin where their group does, in the order of rows; tile i's first row is offset[i] + i · rows."""

    offset: jax.Array  # (tiles,). The first row may be one of the group before.
    begin: jax.Array  # (tiles,), the group's first row
    end: jax.Array  # (tiles,), the row after the group's last
    group: jax.Array  # (tiles,)
    # (E,), how many tiles there are up to each group's end. Entries after the last one mean nothing.
    so_far: jax.Array
    ends: jax.Array  # (E,), the row after each group's last


def prefix_sums(x: jax.Array) -> jax.Array:
    """x (E,) int32 → the sums of its first numbers (E,): E² additions in one pass, where XLA's cumsum takes several."""
    number = jnp.arange(x.shape[0], dtype=jnp.int32)
    return jnp.sum(jnp.where(number[None] <= number[:, None], x[None], 0), axis=1, dtype=jnp.int32)


def tiles(group_sizes: jax.Array, m: int, rows: int, multiple: int) -> GroupTiles:
    """The tiles of `rows` rows that cover groups of sizes (E,); a group's first one begins at a multiple.

    For few hundred numbers only the number of XLA's passes counts: one finds each tile's group among all of them.
    """
    ends = prefix_sums(group_sizes)
    begins = ends - group_sizes
    starts = jax.lax.div(begins, multiple) * multiple
    num_tiles = jnp.where(group_sizes > 0, jax.lax.div(ends - starts + rows - 1, rows), 0)
    so_far = prefix_sums(num_tiles)
    firsts = so_far - num_tiles
    # A group of s rows has at most (s + multiple − 1 + rows − 1) / rows tiles.
    most = max(1, (m + group_sizes.shape[0] * (rows + multiple - 2)) // rows)
    number = jnp.arange(most, dtype=jnp.int32)[:, None]
    is_of = (number >= firsts[None]) & (number < so_far[None])  # (tiles, E)

    def of_tile(values):
        return jnp.sum(jnp.where(is_of, values[None], 0), axis=1, dtype=jnp.int32)

    groups = jnp.arange(group_sizes.shape[0], dtype=jnp.int32)
    offset, begin, end, group = map(of_tile, (starts - firsts * rows, begins, ends, groups))
    return GroupTiles(offset, begin, end, group, so_far, ends)


def largest_first(group_sizes: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Groups by falling size, int32: their numbers, first rows, rows after the last (E,); how many have rows ()."""
    ends, numbers = prefix_sums(group_sizes), jnp.arange(group_sizes.shape[0], dtype=jnp.int32)
    is_before = (group_sizes[None] > group_sizes[:, None]) | (
        (group_sizes[None] == group_sizes[:, None]) & (numbers[None] < numbers[:, None])
    )
    rank = jnp.sum(is_before, axis=1, dtype=jnp.int32)
    is_of = rank[None] == numbers[:, None]  # (place, group)
    group, begin, end = (
        jnp.sum(jnp.where(is_of, x[None], 0), axis=1, dtype=jnp.int32) for x in (numbers, ends - group_sizes, ends)
    )
    return group, begin, end, jnp.sum(group_sizes > 0, dtype=jnp.int32)


def group_of_rows(group_sizes: jax.Array, m: int) -> jax.Array:
    """(m,) int32: each row's group, and E after the last group."""
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    rows = jnp.arange(m, dtype=jnp.int32)
    return jnp.searchsorted(ends, rows, side="right", method="scan_unrolled").astype(jnp.int32)
