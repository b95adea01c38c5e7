"""The grouped product in Pallas Mosaic GPU (Hopper): persistent kernels whose tiles are assigned from the sizes.

The frame is that of `_hopper_product`: one warpgroup copies tiles of both operands into a ring, and two multiply them,
64 rows each. XLA lists the tiles from the sizes, a few hundred numbers, and each block reads its own.

Product: a tile begins at its group's first row, rounded down to the 8 rows that the copy engine moves, so that of a
group only the last tile has rows to spare. If these are 64 or more, the second warpgroup does not multiply. A tile's
rows of other groups are not written: whole halves of a tile leave as they are, others row by row of powers of two.
Weights' gradient: the contracted axis are the rows of one group. Rows of others in its first and last step are set to
zero in shared memory, in both factors, so that NaN does not pass. A group's sum is made in registers, and written once.
Memory passes: each operand's tiles are read once for each tile of the other, from L2 but for the first.
Rounding: sums are float32, and rounded once.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _hopper
from liger_jax.pallas_kernels import _mosaic_gpu as plgpu
from liger_jax.pallas_kernels._hopper import NUM_CORES, cores_here, launch
from liger_jax.pallas_kernels._hopper_product import Factors, Ring
from liger_jax.pallas_kernels._hopper_tiles import NUM_CONSUMERS, ROWS, Tile, staging, store_tile
from liger_jax.pallas_kernels._tiles import cdiv, out_like, split
from liger_jax.pallas_kernels.grouped_matmul import formulas
from liger_jax.pallas_kernels.grouped_matmul.config import HOPPER_TILES as TILES

_HALF = ROWS // NUM_CONSUMERS


def unsupported(x: Any, w: Any) -> str | None:
    """Takes 16-bit operands in sizes that the copy engine moves in tiles."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"Hopper's matrix units take bfloat16 and float16, and x is {x.dtype}; use 'xla'."
    if any(size % 64 for size in w.shape[1:]):
        return f"the copy engine moves rows of 64, and w is {w.shape}; use 'xla'."
    return None


class _Block(NamedTuple):
    """One block's loop over its items, which the warpgroups share.

    Attributes:
        total: items that are multiplied.
        num_blocks: blocks of the kernel.
        ring: tiles of both operands.
        stages: places in the ring.
    """

    total: Any
    num_blocks: int
    ring: Ring
    stages: int

    def run(self, copy: Any, finish: Any) -> None:
        """Calls copy(item, done) in one warpgroup and finish(item, done, warpgroup) in others; both return steps."""
        warpgroup = jax.lax.axis_index("warpgroup")
        own = jax.lax.div(self.total - 1 - jax.lax.axis_index("block") + self.num_blocks, self.num_blocks)

        def over_items(function):
            item = lambda i: jax.lax.axis_index("block") + i * self.num_blocks
            jax.lax.fori_loop(0, own, lambda i, done: done + function(item(i), done), jnp.int32(0))

        @pl.when(warpgroup == NUM_CONSUMERS)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            over_items(copy)

        @pl.when(warpgroup < NUM_CONSUMERS)
        def _():
            plgpu.set_max_registers(232, action="increase")
            over_items(functools.partial(finish, warpgroup=warpgroup))
            plgpu.wait_smem_to_gmem(0)

    def slot(self, step: Any) -> Any:
        return jax.lax.rem(step, self.stages)

    def copy_steps(self, done: Any, steps: Any, sources: Any) -> Any:
        """Copies the tiles of `sources(step)` into the ring, step by step."""

        def copy_step(step, _):
            slot = self.slot(done + step)
            pl.when(done + step >= self.stages)(lambda: plgpu.barrier_wait(self.ring.emptied.at[slot]))
            for source, stage in zip(sources(step), (self.ring.a, self.ring.b), strict=True):
                plgpu.copy_gmem_to_smem(source, stage.at[slot], self.ring.filled.at[slot])

        jax.lax.fori_loop(0, steps, copy_step, None)
        return steps

    def multiply(self, done: Any, steps: Any, factors: Any, prepare: Any = None) -> jax.Array:
        """The sum over steps of the products of factors(slot): (64, columns) float32."""

        def run(accumulator):
            def multiply_step(step, _):
                slot = self.slot(done + step)
                plgpu.barrier_wait(self.ring.filled.at[slot])
                if prepare is not None:
                    prepare(step, slot)
                plgpu.wgmma(accumulator, *factors(slot))
                plgpu.wgmma_wait(1)  # all products but the last are done, so the tiles that they read are free
                pl.when(step > 0)(lambda: plgpu.barrier_arrive(self.ring.emptied.at[self.slot(done + step - 1)]))

            jax.lax.fori_loop(0, steps, multiply_step, None)
            plgpu.wgmma_wait(0)
            pl.when(steps > 0)(lambda: plgpu.barrier_arrive(self.ring.emptied.at[self.slot(done + steps - 1)]))
            return accumulator[...]

        return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((_HALF, TILES.columns), jnp.float32))

    def pass_over(self, done: Any, steps: Any) -> None:
        """Empties the ring as `multiply` does, without a product."""

        def pass_step(step, _):
            slot = self.slot(done + step)
            plgpu.barrier_wait(self.ring.filled.at[slot])
            plgpu.barrier_arrive(self.ring.emptied.at[slot])

        jax.lax.fori_loop(0, steps, pass_step, None)


def _num_blocks(num_items: int) -> int:
    return min(NUM_CORES, cores_here(), num_items)


def _whole_rows(*arrays: jax.Array) -> list[jax.Array]:
    """The matrices with a multiple of 8 rows, which the copy engine needs."""
    return [jnp.pad(x, ((0, -x.shape[0] % 8), (0, 0))) if x.shape[0] % 8 else x for x in arrays]


def product(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array, fill: jax.Array, *, transpose_w: bool, precision: Any
) -> jax.Array:
    """x (M, K), w (E, K, N) or (E, N, K) → (M, N) in x.dtype; `fill` () is written behind the last group."""
    del precision  # products of 16-bit numbers are exact, and their sums float32
    m, k, n = *x.shape, w.shape[1 if transpose_w else 2]
    column_tiles, steps = cdiv(n, TILES.columns), k // TILES.depth
    listed = formulas.tiles(group_sizes, m, ROWS, multiple=8)
    (x,) = _whole_rows(x)
    num_blocks = _num_blocks(listed.group.shape[0] * column_tiles)
    ring_scratch = Ring.scratch(TILES, Factors(x, w, (1, 1 if transpose_w else 0)))
    scratch = [*ring_scratch, staging(x.dtype), plgpu.SMEM((NUM_CONSUMERS, _HALF, 64), x.dtype)]

    def body(*refs):
        (x_ref, w_ref), (total_ref, fill_ref, *numbers), (out_ref,), ring, (stage, rows_stage) = split(
            refs, (2, 6, 1, 4)
        )
        start_ref, begin_ref, end_ref, group_ref = numbers
        block = _Block(total_ref[0] * column_tiles, num_blocks, Ring(*ring), TILES.stages)
        store = functools.partial(_store, out_ref=out_ref, stage=stage, rows_stage=rows_stage)

        def place(item):
            tile = jax.lax.div(item, column_tiles)
            return tile, pl.multiple_of(start_ref[tile], 8), jax.lax.rem(item, column_tiles) * TILES.columns

        def copy(item, done):
            tile, row, column = place(item)
            weight = w_ref.at[group_ref[tile]]

            def sources(step):
                depth, columns = pl.ds(step * TILES.depth, TILES.depth), pl.ds(column, TILES.columns)
                return x_ref.at[pl.ds(row, ROWS), depth], weight.at[
                    (columns, depth) if transpose_w else (depth, columns)
                ]

            return block.copy_steps(done, steps, sources)

        def finish(item, done, warpgroup):
            tile, row, column = place(item)
            row += warpgroup * _HALF
            first = jnp.maximum(begin_ref[tile] - row, 0)
            last = jnp.minimum(end_ref[tile] - row, _HALF)

            @pl.when(last > first)
            def _():
                def factors(slot):
                    own = block.ring.b.at[slot]
                    rows = block.ring.a.at[slot, pl.ds(warpgroup * _HALF, _HALF)]
                    return rows, own.transpose((1, 0)) if transpose_w else own

                store(block.multiply(done, steps, factors), row, column, warpgroup, first, last)

            pl.when(last <= first)(lambda: block.pass_over(done, steps))
            return steps

        block.run(copy, finish)
        # Rows behind the last group, in halves of tiles that all consumers of all blocks share.
        warpgroup = jax.lax.axis_index("warpgroup")

        @pl.when(warpgroup < NUM_CONSUMERS)
        def _():
            behind = end_ref[listed.group.shape[0]]
            aligned = jax.lax.div(behind, 8) * 8
            tiles = jax.lax.div(m - aligned + ROWS - 1, ROWS) * column_tiles
            values = jnp.full((_HALF, TILES.columns), fill_ref[0], jnp.float32)
            values = plgpu.layout_cast(values, _hopper.tile_layout())

            def fill_tile(i, _):
                item = jax.lax.axis_index("block") + i * num_blocks
                row = pl.multiple_of(aligned + jax.lax.div(item, column_tiles) * ROWS, 8) + warpgroup * _HALF
                column = jax.lax.rem(item, column_tiles) * TILES.columns
                first, last = jnp.maximum(behind - row, 0), jnp.minimum(m - row, _HALF)
                pl.when(last > first)(lambda: store(values, row, column, warpgroup, first, last))

            own = jax.lax.div(tiles - 1 - jax.lax.axis_index("block") + num_blocks, num_blocks)
            jax.lax.fori_loop(0, own, fill_tile, None)
            plgpu.wait_smem_to_gmem(0)

    ends = jnp.concatenate([listed.end, group_sizes.sum(dtype=jnp.int32)[None]])
    numbers = listed.total[None], fill[None], listed.start, listed.begin, ends, listed.group
    (y,) = launch(
        body, x, w, *numbers,
        num_blocks=num_blocks,
        out_types=[out_like(x, (x.shape[0], n), x.dtype)],
        scratch=scratch,
        name="grouped_matmul_product",
    )  # fmt: skip
    return y[:m]


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
        for start in range(0, TILES.columns, 64):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            _hopper.store(rows_stage, (warpgroup,), values[:, start : start + 64].astype(rows_stage.dtype))
            plgpu.commit_smem()
            _store_rows(rows_stage.at[warpgroup], out_ref, row, column + start, first, size)


def _store_rows(stage: Any, out_ref: Any, row: Any, column: Any, first: Any, size: Any) -> None:
    """Writes `size` < 64 rows from row `first` of the stage on, in copies of 32, 16, … rows."""
    for count in (32, 16, 8, 4, 2, 1):
        here = first + jax.lax.div(size, 2 * count) * 2 * count

        def copy(here=here, count=count):
            there = out_ref.at[pl.ds(row + here, count), pl.ds(column, 64)]
            plgpu.copy_smem_to_gmem(stage.at[pl.ds(here, count)], there)

        pl.when(jax.lax.rem(jax.lax.div(size, count), 2) == 1)(copy)


def weight_gradient(
    a: jax.Array, b: jax.Array, group_sizes: jax.Array, fill: jax.Array, *, dtype: Any, precision: Any
) -> jax.Array:
    """a (M, A), b (M, B) → aᵀ · b over the rows of each group, (E, A, B) in dtype; `fill` () for empty groups."""
    del precision  # products of 16-bit numbers are exact, and their sums float32
    num_groups, height, width = group_sizes.shape[0], a.shape[1], b.shape[1]
    a, b = _whole_rows(a, b)
    row_tiles, column_tiles = cdiv(height, ROWS), cdiv(width, TILES.columns)
    num_blocks = _num_blocks(num_groups * row_tiles * column_tiles)
    scratch = [*Ring.scratch(TILES, Factors(a, b, (0, 0))), staging(dtype), plgpu.Barrier(num_arrivals=NUM_CONSUMERS)]
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)

    def body(*refs):
        (a_ref, b_ref), (fill_ref, begin_ref, end_ref), (out_ref,), ring, (stage, masked) = split(refs, (2, 3, 1, 4))
        block = _Block(num_groups * row_tiles * column_tiles, num_blocks, Ring(*ring), TILES.stages)

        def place(item):
            """The group, the tile's first row and column, the group's rows, its first step's row, and its steps."""
            group = jax.lax.div(item, row_tiles * column_tiles)
            tile = jax.lax.rem(item, row_tiles * column_tiles)
            begin, end = begin_ref[group], end_ref[group]
            start = jax.lax.div(begin, 8) * 8
            steps = jnp.where(end > begin, jax.lax.div(end - start + TILES.depth - 1, TILES.depth), 0)
            row, column = jax.lax.div(tile, column_tiles) * ROWS, jax.lax.rem(tile, column_tiles) * TILES.columns
            return group, row, column, begin, end, start, steps

        def copy(item, done):
            _, row, column, _, _, start, steps = place(item)

            def sources(step):
                depth = pl.ds(pl.multiple_of(start + step * TILES.depth, 8), TILES.depth)
                return a_ref.at[depth, pl.ds(row, ROWS)], b_ref.at[depth, pl.ds(column, TILES.columns)]

            return block.copy_steps(done, steps, sources)

        def finish(item, done, warpgroup):
            group, row, column, begin, end, start, steps = place(item)
            own = pl.ds(warpgroup * _HALF, _HALF)

            def prepare(step, slot):
                first = start + step * TILES.depth

                @pl.when((first < begin) | (first + TILES.depth > end))
                def _():
                    plgpu.wgmma_wait(0)
                    _keep_rows(block.ring.a, slot, warpgroup * _HALF, begin - first, end - first)
                    for half in range(0, TILES.columns // NUM_CONSUMERS, 64):
                        offset = warpgroup * (TILES.columns // NUM_CONSUMERS) + half
                        _keep_rows(block.ring.b, slot, offset, begin - first, end - first)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(masked)
                    plgpu.barrier_wait(masked)

            factors = lambda slot: (block.ring.a.at[slot, :, own].transpose((1, 0)), block.ring.b.at[slot])
            values = block.multiply(done, steps, factors, prepare) + fill_ref[0]
            tile_row = row + warpgroup * _HALF
            tile = Tile(values, tile_row, column, 0, warpgroup)
            store_tile(tile, values, stage, out_ref.at[group], tile_row, column)
            return steps

        block.run(copy, finish)

    (gradient,) = launch(
        body, a, b, fill[None], ends - group_sizes, ends,
        num_blocks=num_blocks,
        out_types=[out_like(a, (num_groups, height, width), dtype)],
        scratch=scratch,
        name="grouped_matmul_weight_gradient",
    )  # fmt: skip
    return gradient


def _keep_rows(ref: Any, slot: Any, column: Any, first: Any, last: Any) -> None:
    """Sets rows before `first` and from `last` on to zero, in 64 columns of a place in the ring."""
    here = slot, slice(None), pl.ds(column, 64)
    values = _hopper.load(ref, here, _hopper.tile_layout())
    rows = plgpu.broadcasted_iota(jnp.int32, (TILES.depth, 64), 0, layout=_hopper.tile_layout())
    ref[here] = jnp.where((rows >= first) & (rows < last), values, jnp.zeros((), values.dtype))
