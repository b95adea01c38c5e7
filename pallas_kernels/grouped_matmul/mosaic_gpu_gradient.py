"""Hopper's gradient of the weights: for each group, a product whose contracted axis are the group's rows.

A step is 64 rows. A group's first and last step also hold rows of other groups. These must be zero in both factors, so
that NaN does not pass. Such a step is put together from blocks of 8, 8, 16 and 32 rows. A block may be all the group's,
or all others'. The two blocks in which the group begins and ends hold both; XLA has made copies of these with zeros for
others' rows. (To set rows to zero in shared memory took a sixth of the kernel's time.)

A group's sum is made in registers, and written once. Large groups come first, so that blocks end together.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _mosaic_gpu as plgpu
from liger_jax.pallas_kernels import hopper
from liger_jax.pallas_kernels._hopper_product import Factors, Ring
from liger_jax.pallas_kernels._hopper_tiles import NUM_CONSUMERS, ROWS, Tile, staging, store_tile
from liger_jax.pallas_kernels.grouped_matmul import config, formulas
from liger_jax.pallas_kernels.grouped_matmul.mosaic_gpu_block import Block, Item, num_blocks
from liger_jax.pallas_kernels.grouped_matmul.mosaic_gpu_product import whole_rows
from liger_jax.pallas_kernels.tiles import cdiv, out_like, split

_PIECE, _LONGEST = config.HOPPER_EDGES  # the first is what the copy engine moves at least
_BLOCKS = ((0, 8), (8, 8), (16, 16), (32, 32))  # of a step that is not wholly the group's: first row and rows
_STEP = 64
_TILES = config.HOPPER_GRADIENT


class _Items(NamedTuple):
    """The kernel's items: tiles of the groups' sums, those of the largest group first."""

    groups: Any  # (E,) the groups' numbers
    begins: Any  # (E,) each group's first row
    ends: Any  # (E,) the row after its last one
    row_tiles: int  # tiles of a sum above one another
    column_tiles: int  # tiles of a sum side by side

    def rows(self, number: Any) -> tuple[Any, Any, Any, Any]:
        """An item's group's place and rows, and where its first step begins."""
        place = jax.lax.div(number, self.row_tiles * self.column_tiles)
        begin, end = self.begins[place], self.ends[place]
        return place, begin, end, pl.multiple_of(jax.lax.div(begin, _PIECE) * _PIECE, _PIECE)

    def steps(self, number: Any) -> Any:
        """The steps that cover the rows of an item's group."""
        _, begin, end, start = self.rows(number)
        return jnp.where(end > begin, jax.lax.div(end - start + _TILES.depth - 1, _TILES.depth), 0)

    def tile(self, number: Any) -> tuple[Any, Any]:
        """The first row and column of an item's tile."""
        tile = jax.lax.rem(number, self.row_tiles * self.column_tiles)
        return jax.lax.div(tile, self.column_tiles) * ROWS, jax.lax.rem(tile, self.column_tiles) * _TILES.columns


class _Work(NamedTuple):
    """What a block does with an item."""

    block: Block  # the block's way over the items
    items: _Items  # the items
    sources: Any  # both factors, (M, A) and (M, B)
    edges: Any  # copies of the rows at the ends of groups, (E + 1, 8 + 32, A) and (E + 1, 8 + 32, B)
    edge_filled: Any  # barriers of the steps that are put together from blocks
    fill: Any  # (1,) float32, added to every sum
    stage: Any  # shared memory in which tiles are written before they leave
    out: Any  # (E, A, B), the sums

    def copy(self, item: Item) -> None:
        """Copies the rows of all steps, one column of tiles of each factor."""
        place, begin, end, start = self.items.rows(item.number)
        firsts = self.items.tile(item.number)
        columns = [pl.ds(first, size) for first, size in zip(firsts, (ROWS, _TILES.columns), strict=True)]

        def copy_step(step, slot):
            first = start + step * _TILES.depth
            is_edge = _is_edge(first, begin, end)

            @pl.when(jnp.logical_not(is_edge))
            def _():
                depth = pl.ds(pl.multiple_of(first, _PIECE), _TILES.depth)
                inner = [x.at[depth, own] for x, own in zip(self.sources, columns, strict=True)]
                self.block.copy_tiles(item, step, slot, inner)

            @pl.when(is_edge)
            def _():
                filled = self.block.barrier(self.edge_filled, item, step)
                for offset, count in _BLOCKS:
                    self._copy_block(first, (place, begin, end), (offset, count), (slot, columns, filled))

        self.block.copy_steps(item, self.items.steps(item.number), copy_step)

    def _copy_block(self, first: Any, group: tuple[Any, ...], block: tuple[int, int], to: tuple[Any, ...]) -> None:
        """Copies a block of a step from row `first` on: from the factors if it is all the group's, or from an edge."""
        (place, begin, end), (offset, count), (slot, columns, filled) = group, block, to
        row = pl.multiple_of(first + offset, _PIECE)
        is_whole = (row >= begin) & (row + count <= end)
        edge = jnp.where(row < end, place, self.edges[0].shape[0] - 1)
        edge_row = pl.multiple_of(jnp.where(row < begin, 0, _PIECE), _PIECE)

        def copy(x, x_row):
            for ref, stage, own in zip(x, (self.block.ring.a, self.block.ring.b), columns, strict=True):
                there = stage.at[slot, pl.ds(offset, count)]
                plgpu.copy_gmem_to_smem(ref.at[pl.ds(x_row, count), own], there, filled)

        pl.when(is_whole)(functools.partial(copy, self.sources, row))
        edges = [ref.at[edge] for ref in self.edges]
        pl.when(jnp.logical_not(is_whole))(functools.partial(copy, edges, edge_row))

    def finish(self, item: Item, warpgroup: Any) -> None:
        """Sums the products of an item's steps, and writes the sum."""
        place, begin, end, start = self.items.rows(item.number)
        row, column = self.items.tile(item.number)
        above = 0 if _TILES.in_turn else warpgroup * _TILES.rows

        def wait(step):
            is_edge = _is_edge(start + step * _TILES.depth, begin, end)
            pl.when(is_edge)(lambda: plgpu.barrier_wait(self.block.barrier(self.edge_filled, item, step)))
            pl.when(jnp.logical_not(is_edge))(lambda: self.block.wait(item, step))

        def factors(slot):
            ring = self.block.ring
            return ring.a.at[slot, :, pl.ds(above, _TILES.rows)].transpose((1, 0)), ring.b.at[slot]

        values = self.block.multiply(item, self.items.steps(item.number), _TILES.rows, factors, wait)
        values = values + self.fill[0]
        tile = Tile(values, row + above, column, 0, warpgroup)
        out = self.out.at[self.items.groups[place]]
        store_tile(tile, values, self.stage, out, row + above, column)


def weight_gradient(
    a: jax.Array, b: jax.Array, group_sizes: jax.Array, fill: jax.Array, *, dtype: Any, precision: Any
) -> jax.Array:
    """a (M, A), b (M, B) → aᵀ · b over the rows of each group, (E, A, B) in dtype; `fill` () for empty groups."""
    del precision  # products of 16-bit numbers are exact, and their sums float32
    num_groups, height, width = group_sizes.shape[0], a.shape[1], b.shape[1]
    a, b = whole_rows(a, b)
    row_tiles, column_tiles = cdiv(height, ROWS), cdiv(width, _TILES.columns)
    total = num_groups * row_tiles * column_tiles
    blocks = num_blocks(total)
    groups, begins, ends, busy = formulas.largest_first(group_sizes)
    edges = [_edges(x, begins, ends) for x in (a, b)]
    num_barriers = _TILES.stages * (NUM_CONSUMERS if _TILES.in_turn else 1)
    edge_filled = plgpu.Barrier(num_arrivals=2 * len(_BLOCKS), num_barriers=num_barriers)
    scratch = [*Ring.scratch(_TILES, Factors(a, b, (0, 0))), edge_filled, staging(dtype, config.STAGED_PIECES)]

    def body(*refs):
        sources, edge_refs, (fill_ref, *numbers), (out_ref,), ring, (edge_filled, stage) = split(refs, (2, 2, 5, 1, 4))
        group_ref, begin_ref, end_ref, busy_ref = numbers
        items = _Items(group_ref, begin_ref, end_ref, row_tiles, column_tiles)
        block = Block(total, busy_ref[0] * row_tiles * column_tiles, blocks, Ring(*ring), _TILES)
        work = _Work(block, items, sources, edge_refs, edge_filled, fill_ref, stage, out_ref)
        block.run(items.steps, work.copy, work.finish)

    (gradient,) = hopper.launch(
        body, a, b, *edges, fill[None], groups, begins, ends, busy[None],
        num_blocks=blocks,
        out_types=[out_like(a, (num_groups, height, width), dtype)],
        scratch=scratch,
        name="grouped_matmul_weight_gradient",
    )  # fmt: skip
    return gradient


def _is_edge(first: Any, begin: Any, end: Any) -> Any:
    """Whether a step from row `first` on holds rows that are not of the group from `begin` to `end`."""
    return (first < begin) | (first + _TILES.depth > end)


def _edges(x: jax.Array, begins: jax.Array, ends: jax.Array) -> jax.Array:
    """x (M, C) → (E + 1, 8 + 32, C): the 8 rows in which each group begins, and the block in which it ends.

    Others' rows in them are zero, and so is all of the last entry.
    """
    begins, ends = (jnp.concatenate([rows, jnp.zeros_like(rows[:1])]) for rows in (begins, ends))
    starts = begins // _PIECE * _PIECE
    last_steps = starts + jnp.maximum(ends - starts - 1, 0) // _STEP * _STEP
    last_blocks = last_steps
    for offset, _ in _BLOCKS:
        last_blocks = jnp.where(ends > last_steps + offset, last_steps + offset, last_blocks)
    heads = starts[:, None] + jnp.arange(_PIECE, dtype=jnp.int32)[None]
    tails = last_blocks[:, None] + jnp.arange(_LONGEST, dtype=jnp.int32)[None]
    rows = jnp.concatenate([heads, tails], axis=1)
    inside = (rows >= begins[:, None]) & (rows < ends[:, None])
    return jnp.where(inside[..., None], x.at[rows].get(mode="clip"), jnp.zeros((), x.dtype))
