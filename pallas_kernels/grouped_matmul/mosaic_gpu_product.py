"""Hopper's grouped product: each row with the weight of its group.

A tile begins at its group's first row, rounded down to the 8 rows that the copy engine moves, so that of a group only
the last tile has rows to spare. If these are 64 or more, nobody multiplies them. A tile's rows of other groups are not
written: whole halves of a tile leave as they are, others row by row of powers of two.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _mosaic_gpu as plgpu
from liger_jax.pallas_kernels import hopper
from liger_jax.pallas_kernels._hopper_product import Factors, Ring
from liger_jax.pallas_kernels._hopper_tiles import NUM_CONSUMERS, ROWS, Tile, staging, store_tile
from liger_jax.pallas_kernels.grouped_matmul import config, formulas
from liger_jax.pallas_kernels.grouped_matmul.mosaic_gpu_block import Block, num_blocks
from liger_jax.pallas_kernels.tiles import cdiv, out_like, split

_HALF = ROWS // NUM_CONSUMERS


def whole_rows(*arrays: jax.Array) -> list[jax.Array]:
    """The matrices with a multiple of 8 rows, which the copy engine needs."""
    return [jnp.pad(x, ((0, -x.shape[0] % 8), (0, 0))) if x.shape[0] % 8 else x for x in arrays]


def product(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array, fill: jax.Array, *, transpose_w: bool, precision: Any
) -> jax.Array:
    """x (M, K), w (E, K, N) or (E, N, K) → (M, N) in x.dtype; `fill` () is written after the last group."""
    del precision  # products of 16-bit numbers are exact, and their sums float32
    (m, k), num_groups, n = x.shape, w.shape[0], w.shape[1 if transpose_w else 2]
    tiles = config.HOPPER_PRODUCT
    column_tiles, steps = cdiv(n, tiles.columns), k // tiles.depth
    row_tiles = formulas.tiles(group_sizes, m, ROWS, multiple=8)
    (x,) = whole_rows(x)
    blocks = num_blocks(row_tiles.group.shape[0] * column_tiles)
    ring_scratch = Ring.scratch(tiles, Factors(x, w, (1, 1 if transpose_w else 0)))
    rows_stage = plgpu.SMEM((NUM_CONSUMERS, _HALF, config.STAGED_COLUMNS), x.dtype)
    scratch = [*ring_scratch, staging(x.dtype, config.STAGED_PIECES), rows_stage]

    def body(*refs):
        (x_ref, w_ref), (fill_ref, *listed_refs), (out_ref,), ring, stages = split(refs, (2, 7, 1, 4))
        listed = formulas.GroupTiles(*listed_refs)
        total = listed.so_far[num_groups - 1] * column_tiles
        block = Block(total, total, blocks, Ring(*ring), tiles)
        store = functools.partial(_store, out_ref=out_ref, stage=stages[0], rows_stage=stages[1])

        def place(number):
            tile = jax.lax.div(number, column_tiles)
            row = pl.multiple_of(listed.offset[tile] + tile * ROWS, 8)
            return tile, row, jax.lax.rem(number, column_tiles) * tiles.columns

        def copy(item):
            tile, row, column = place(item.number)
            weight = w_ref.at[listed.group[tile]]

            def copy_step(step, slot):
                depth, columns = pl.ds(step * tiles.depth, tiles.depth), pl.ds(column, tiles.columns)
                own = weight.at[(columns, depth) if transpose_w else (depth, columns)]
                block.copy_tiles(item, step, slot, (x_ref.at[pl.ds(row, ROWS), depth], own))

            block.copy_steps(item, steps, copy_step)

        def finish(item, warpgroup):
            tile, row, column = place(item.number)
            above = 0 if tiles.in_turn else warpgroup * _HALF  # rows of the tile before the warpgroup's
            row += above
            first, last = jnp.maximum(listed.begin[tile] - row, 0), listed.end[tile] - row

            def multiply(rows):
                def factors(slot):
                    weight = block.ring.b.at[slot]
                    return block.ring.a.at[slot, pl.ds(above, rows)], weight.transpose(
                        (1, 0)
                    ) if transpose_w else weight

                values = block.multiply(item, steps, rows, factors, lambda step: block.wait(item, step))
                for half in range(0, rows, _HALF):
                    here = jnp.maximum(first - half, 0), jnp.minimum(last - half, _HALF)
                    store(values[half : half + _HALF], row + half, column, warpgroup, *here)

            if tiles.in_turn:
                pl.when(last > _HALF)(lambda: multiply(ROWS))
                pl.when(last <= _HALF)(lambda: multiply(_HALF))
            else:
                has_rows = jnp.minimum(last, _HALF) > first
                pl.when(has_rows)(lambda: multiply(_HALF))
                pl.when(jnp.logical_not(has_rows))(lambda: block.pass_over(item, steps))

        block.run(lambda _: steps, copy, finish)
        _fill(listed.ends[num_groups - 1], fill_ref[0], m, column_tiles, tiles.columns, blocks, store)

    (y,) = hopper.launch(
        body, x, w, fill[None], *row_tiles,
        num_blocks=blocks,
        out_types=[out_like(x, (x.shape[0], n), x.dtype)],
        scratch=scratch,
        name="grouped_matmul_product",
    )  # fmt: skip
    return hopper.kept(y)[:m]


def _fill(first_free: Any, value: Any, m: int, column_tiles: int, columns: int, blocks: int, store: Any) -> None:
    """Writes the value to rows from `first_free` on, in halves of tiles that all consumers of all blocks share."""
    warpgroup = jax.lax.axis_index("warpgroup")

    @pl.when(warpgroup < NUM_CONSUMERS)
    def _():
        aligned = jax.lax.div(first_free, 8) * 8
        total = jax.lax.div(m - aligned + ROWS - 1, ROWS) * column_tiles
        values = plgpu.layout_cast(jnp.full((_HALF, columns), value, jnp.float32), hopper.tile_layout())

        def fill_tile(i, _):
            item = jax.lax.axis_index("block") + i * blocks
            row = pl.multiple_of(aligned + jax.lax.div(item, column_tiles) * ROWS, 8) + warpgroup * _HALF
            column = jax.lax.rem(item, column_tiles) * columns
            first, last = jnp.maximum(first_free - row, 0), jnp.minimum(m - row, _HALF)
            pl.when(last > first)(lambda: store(values, row, column, warpgroup, first, last))

        own = jax.lax.div(total - 1 - jax.lax.axis_index("block") + blocks, blocks)
        jax.lax.fori_loop(0, own, fill_tile, None)
        plgpu.wait_smem_to_gmem(0)


def _store(
    values: Any,
    row: Any,
    column: Any,
    warpgroup: Any,
    first: Any,
    last: Any,
    *,
    out_ref: Any,
    stage: Any,
    rows_stage: Any,
) -> None:
    """Writes rows `first` to `last` of (64, columns) values, whose first element belongs at (row, column)."""
    tile = Tile(values, row, column, 0, warpgroup)
    size = last - first
    pl.when(size == _HALF)(lambda: store_tile(tile, values, stage, out_ref, row, column))

    @pl.when(size < _HALF)
    def _():
        width, end = rows_stage.shape[2], out_ref.shape[1]

        def store_columns(start):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            hopper.store(rows_stage, (warpgroup,), values[:, start : start + width].astype(rows_stage.dtype))
            plgpu.commit_smem()
            _store_rows(rows_stage.at[warpgroup], out_ref, row, column + start, first, size)

        # Rows of 64 columns are one after the other: on an H200, what is past the last column fell on the next rows.
        for start in range(0, values.shape[1], width):
            pl.when(column + start < end)(functools.partial(store_columns, start))


def _store_rows(stage: Any, out_ref: Any, row: Any, column: Any, first: Any, size: Any) -> None:
    """Writes `size` < 64 rows from row `first` of the stage on, in copies of 32, 16, … rows."""
    for count in (32, 16, 8, 4, 2, 1):
        here = first + jax.lax.div(size, 2 * count) * 2 * count

        def copy(here=here, count=count):
            there = out_ref.at[pl.ds(row + here, count), pl.ds(column, stage.shape[1])]
            plgpu.copy_smem_to_gmem(stage.at[pl.ds(here, count)], there)

        pl.when(jax.lax.rem(jax.lax.div(size, count), 2) == 1)(copy)
