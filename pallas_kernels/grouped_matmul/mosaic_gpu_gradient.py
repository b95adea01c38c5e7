"""Hopper's gradient of the weights: for each group, a product whose contracted axis are the group's rows.

Rows of others in a group's first and last step are set to zero in shared memory, in both factors, so that NaN does not
pass. A group's sum is made in registers, and written once. Large groups come first, so that blocks end together.
"""

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
    stage = staging(dtype, config.STAGED_PIECES)
    scratch = [*Ring.scratch(tiles, Factors(a, b, (0, 0))), stage, plgpu.Barrier(num_arrivals=NUM_CONSUMERS)]

    def body(*refs):
        (a_ref, b_ref), (fill_ref, group_ref, begin_ref, end_ref), (out_ref,), ring, (stage, masked) = split(
            refs, (2, 4, 1, 4)
        )
        block = Block(num_groups * row_tiles * column_tiles, blocks, Ring(*ring), tiles)

        def rows(number):
            """The rows of an item's group, and where its first step begins."""
            place = jax.lax.div(number, row_tiles * column_tiles)
            begin, end = begin_ref[place], end_ref[place]
            return begin, end, jax.lax.div(begin, 8) * 8

        def steps(number):
            begin, end, start = rows(number)
            return jnp.where(end > begin, jax.lax.div(end - start + tiles.depth - 1, tiles.depth), 0)

        def tile(number):
            """The first row and column of an item's tile."""
            tile = jax.lax.rem(number, row_tiles * column_tiles)
            return jax.lax.div(tile, column_tiles) * ROWS, jax.lax.rem(tile, column_tiles) * tiles.columns

        def copy(item):
            _, _, start = rows(item.number)
            row, column = tile(item.number)

            def sources(step):
                depth = pl.ds(pl.multiple_of(start + step * tiles.depth, 8), tiles.depth)
                return a_ref.at[depth, pl.ds(row, ROWS)], b_ref.at[depth, pl.ds(column, tiles.columns)]

            block.copy_steps(item, steps(item.number), sources)

        def finish(item, warpgroup):
            begin, end, start = rows(item.number)
            row, column = tile(item.number)
            own = 0 if tiles.in_turn else warpgroup * tiles.rows
            share = 1 if tiles.in_turn else NUM_CONSUMERS  # warpgroups that mask together

            def prepare(step, slot):
                first = start + step * tiles.depth

                @pl.when((first < begin) | (first + tiles.depth > end))
                def _():
                    plgpu.wgmma_wait(0)
                    for ref, columns in ((block.ring.a, ROWS // share), (block.ring.b, tiles.columns // share)):
                        for offset in range(0, columns, 64):
                            place = (0 if tiles.in_turn else warpgroup * columns) + offset
                            _keep_rows(ref, slot, place, begin - first, end - first, tiles.depth)
                    plgpu.commit_smem()
                    if not tiles.in_turn:
                        plgpu.barrier_arrive(masked)
                        plgpu.barrier_wait(masked)

            def factors(slot):
                return block.ring.a.at[slot, :, pl.ds(own, tiles.rows)].transpose((1, 0)), block.ring.b.at[slot]

            values = block.multiply(item, steps(item.number), tiles.rows, factors, prepare) + fill_ref[0]
            part = Tile(values, row + own, column, 0, warpgroup)
            group = group_ref[jax.lax.div(item.number, row_tiles * column_tiles)]
            store_tile(part, values, stage, out_ref.at[group], row + own, column)

        block.run(steps, copy, finish)

    (gradient,) = _hopper.launch(
        body, a, b, fill[None], *formulas.largest_first(group_sizes),
        num_blocks=blocks,
        out_types=[out_like(a, (num_groups, height, width), dtype)],
        scratch=scratch,
        name="grouped_matmul_weight_gradient",
    )  # fmt: skip
    return gradient


def _keep_rows(ref: Any, slot: Any, column: Any, first: Any, last: Any, depth: int) -> None:
    """Sets rows before `first` and from `last` on to zero, in 64 columns of a place in the ring."""
    here = slot, slice(None), pl.ds(column, 64)
    values = _hopper.load(ref, here, _hopper.tile_layout())
    rows = plgpu.broadcasted_iota(jnp.int32, (depth, 64), 0, layout=_hopper.tile_layout())
    ref[here] = jnp.where((rows >= first) & (rows < last), values, jnp.zeros((), values.dtype))
