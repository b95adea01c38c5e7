"""Hopper's gradient of the weights: for each group, a product whose contracted axis are the group's rows.

A step is 64 rows. A group's first and last step also hold rows of other groups. These must be zero in both factors, so
that NaN does not pass. Such a step is put together from blocks of 8, 8, 16 and 32 rows. A block may be all the group's,
or all others'. The two blocks in which the group begins and ends hold both; XLA has made copies of these with zeros for
others' rows. (To set rows to zero in shared memory took a sixth of the kernel's time.)

A group's sum is made in registers, and written once. Large groups come first, so that blocks end together.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _hopper
from liger_jax.pallas_kernels import _mosaic_gpu as plgpu
from liger_jax.pallas_kernels._hopper_product import Factors, Ring
from liger_jax.pallas_kernels._hopper_tiles import NUM_CONSUMERS, ROWS, Tile, staging, store_tile
from liger_jax.pallas_kernels._tiles import cdiv, out_like, split
from liger_jax.pallas_kernels.grouped_matmul import config, formulas
from liger_jax.pallas_kernels.grouped_matmul.mosaic_gpu_block import Block, num_blocks
from liger_jax.pallas_kernels.grouped_matmul.mosaic_gpu_product import whole_rows

_PIECE, _LONGEST = config.HOPPER_EDGES  # the first is what the copy engine moves at least
_BLOCKS = ((0, 8), (8, 8), (16, 16), (32, 32))  # of a step that is not wholly the group's: first row and rows
_STEP = 64


def weight_gradient(
    a: jax.Array, b: jax.Array, group_sizes: jax.Array, fill: jax.Array, *, dtype: Any, precision: Any
) -> jax.Array:
    """a (M, A), b (M, B) → aᵀ · b over the rows of each group, (E, A, B) in dtype; `fill` () for empty groups."""
    del precision  # products of 16-bit numbers are exact, and their sums float32
    num_groups, height, width = group_sizes.shape[0], a.shape[1], b.shape[1]
    a, b = whole_rows(a, b)
    tiles = config.HOPPER_GRADIENT
    row_tiles, column_tiles = cdiv(height, ROWS), cdiv(width, tiles.columns)
    blocks = num_blocks(num_groups * row_tiles * column_tiles)
    groups, begins, ends, busy = formulas.largest_first(group_sizes)
    edges = [_edges(x, begins, ends) for x in (a, b)]
    ring_scratch = Ring.scratch(tiles, Factors(a, b, (0, 0)))
    num_barriers = tiles.stages * (NUM_CONSUMERS if tiles.in_turn else 1)
    edge_filled = plgpu.Barrier(num_arrivals=2 * len(_BLOCKS), num_barriers=num_barriers)
    scratch = [*ring_scratch, edge_filled, staging(dtype, config.STAGED_PIECES)]

    def body(*refs):
        sources, edge_refs, (fill_ref, *numbers), (out_ref,), ring, (edge_filled, stage) = split(refs, (2, 2, 5, 1, 4))
        group_ref, begin_ref, end_ref, busy_ref = numbers
        total = num_groups * row_tiles * column_tiles
        block = Block(total, busy_ref[0] * row_tiles * column_tiles, blocks, Ring(*ring), tiles)

        def rows(number):
            """An item's group's place and rows, and where its first step begins."""
            place = jax.lax.div(number, row_tiles * column_tiles)
            begin, end = begin_ref[place], end_ref[place]
            return place, begin, end, pl.multiple_of(jax.lax.div(begin, _PIECE) * _PIECE, _PIECE)

        def steps(number):
            _, begin, end, start = rows(number)
            return jnp.where(end > begin, jax.lax.div(end - start + tiles.depth - 1, tiles.depth), 0)

        def tile(number):
            """The first row and column of an item's tile."""
            tile = jax.lax.rem(number, row_tiles * column_tiles)
            return jax.lax.div(tile, column_tiles) * ROWS, jax.lax.rem(tile, column_tiles) * tiles.columns

        def copy(item):
            place, begin, end, start = rows(item.number)
            columns = [pl.ds(first, size) for first, size in zip(tile(item.number), (ROWS, tiles.columns), strict=True)]

            def copy_step(step, slot):
                first = start + step * tiles.depth
                is_edge = (first < begin) | (first + tiles.depth > end)

                @pl.when(jnp.logical_not(is_edge))
                def _():
                    depth = pl.ds(pl.multiple_of(first, _PIECE), tiles.depth)
                    block.copy_tiles(
                        item, step, slot, [x.at[depth, own] for x, own in zip(sources, columns, strict=True)]
                    )

                @pl.when(is_edge)
                def _():
                    filled = block.barrier(edge_filled, item, step)
                    for offset, count in _BLOCKS:
                        row = pl.multiple_of(first + offset, _PIECE)
                        is_whole = (row >= begin) & (row + count <= end)
                        edge = jnp.where(row < end, place, num_groups)
                        edge_row = pl.multiple_of(jnp.where(row < begin, 0, _PIECE), _PIECE)

                        def copy_block(x, x_row, offset=offset, count=count):
                            for ref, stage, own in zip(x, ring[:2], columns, strict=True):
                                there = stage.at[slot, pl.ds(offset, count)]
                                plgpu.copy_gmem_to_smem(ref.at[pl.ds(x_row, count), own], there, filled)

                        pl.when(is_whole)(functools.partial(copy_block, sources, row))
                        edges = [ref.at[edge] for ref in edge_refs]
                        pl.when(jnp.logical_not(is_whole))(functools.partial(copy_block, edges, edge_row))

            block.copy_steps(item, steps(item.number), copy_step)

        def finish(item, warpgroup):
            place, begin, end, start = rows(item.number)
            row, column = tile(item.number)
            above = 0 if tiles.in_turn else warpgroup * tiles.rows

            def wait(step):
                first = start + step * tiles.depth
                is_edge = (first < begin) | (first + tiles.depth > end)
                pl.when(is_edge)(lambda: plgpu.barrier_wait(block.barrier(edge_filled, item, step)))
                pl.when(jnp.logical_not(is_edge))(lambda: block.wait(item, step))

            def factors(slot):
                return block.ring.a.at[slot, :, pl.ds(above, tiles.rows)].transpose((1, 0)), block.ring.b.at[slot]

            values = block.multiply(item, steps(item.number), tiles.rows, factors, wait) + fill_ref[0]
            part = Tile(values, row + above, column, 0, warpgroup)
            store_tile(part, values, stage, out_ref.at[group_ref[place]], row + above, column)

        block.run(steps, copy, finish)

    (gradient,) = _hopper.launch(
        body, a, b, *edges, fill[None], groups, begins, ends, busy[None],
        num_blocks=blocks,
        out_types=[out_like(a, (num_groups, height, width), dtype)],
        scratch=scratch,
        name="grouped_matmul_weight_gradient",
    )  # fmt: skip
    return gradient


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
