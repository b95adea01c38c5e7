"""A matrix product for Hopper (Pallas Mosaic GPU) whose tiles go to an epilogue before they reach memory.

    product(Factors(a, b, contract), tiles, Epilogue(finish, …), name=…)

The kernel is persistent and warp-specialised: in each block one warpgroup copies tiles of both operands into a ring of
shared memory, and two warpgroups multiply them and run the epilogue. These two either share a tile, 64 rows each, or
take whole tiles in turn. Then one multiplies while the other is in its epilogue, which is better where the contracted
axis is short. Blocks walk the output along a snake, so that tiles which are computed at the same time share their
operands in L2. (Pairs of blocks that share b's tiles by multicast were within 1 % of single blocks on an H200, with
either kind of tile, and are left out.)
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _mosaic_gpu as plgpu
from liger_jax.pallas_kernels._hopper_tiles import NUM_CONSUMERS, ROWS, Epilogue, Tile, Tiles
from liger_jax.pallas_kernels.hopper import NUM_CORES, column_layout, cores_here, launch, load, row_layout, shared_tile
from liger_jax.pallas_kernels.tiles import cdiv, split


@dataclasses.dataclass(frozen=True)
class Factors:
    """What is multiplied: a · b, which contracts a's and b's axes of `contract`.

    `added` is a second pair of matrices, contracted along the same axes, whose product is added to the first's. To the
    kernel it is as if the contracted axis were longer.

    `first_column` and `first_depth` (1,) int32 say where b begins: along the axis that is kept, of which `num_columns`
    are multiplied, and along the contracted axis. They are multiples of 64, and None stands for the beginning.

    Elements past an end are read as zero. Inner axes are multiples of 64, and the matrices' rows multiples of 8.
    """

    a: jax.Array
    b: jax.Array
    contract: tuple[int, int]
    first_column: jax.Array | None = None
    first_depth: jax.Array | None = None
    num_columns: int | None = None
    added: tuple[jax.Array, jax.Array] | None = None

    @property
    def operands(self) -> tuple[jax.Array, ...]:
        """The matrices, pair by pair."""
        return self.a, self.b, *(self.added or ())

    @property
    def rows(self) -> int:
        """The product's rows."""
        return self.a.shape[1 - self.contract[0]]

    @property
    def columns(self) -> int:
        """The product's columns."""
        return self.num_columns or self.b.shape[1 - self.contract[1]]

    @property
    def depth(self) -> int:
        """The length of the contracted axis."""
        return self.a.shape[self.contract[0]]

    @property
    def added_depth(self) -> int:
        """The length of the contracted axis of `added`."""
        return 0 if self.added is None else self.added[0].shape[self.contract[0]]


@dataclasses.dataclass(frozen=True)
class _TileScheduler:
    """The output tiles of a block, the steps that each takes, and the places of its operands in the ring."""

    tiles: Tiles
    row_tiles: int
    column_tiles: int
    steps: int  # over the contracted axis, and over that of the added pair
    added_steps: int = 0  # those of the added pair

    @property
    def num_tiles(self) -> int:
        return self.row_tiles * self.column_tiles

    @property
    def num_blocks(self) -> int:
        return min(NUM_CORES, cores_here(), self.num_tiles)

    def place(self, i: Any) -> tuple[Any, Any]:
        """The row tile and the column tile of this block's i-th tile."""
        tile = jax.lax.axis_index("block") + i * self.num_blocks
        shape = self.row_tiles, self.column_tiles
        bands = cdiv(self.row_tiles, self.tiles.snake_width)  # all equally wide: a narrow band shares less
        return plgpu.planar_snake(tile, shape, minor_dim=0, tile_width=cdiv(self.row_tiles, bands))

    def slot(self, i: Any, step: Any) -> Any:
        """The place in the ring for a step of this block's i-th tile."""
        return jax.lax.rem(i * self.steps + step, self.tiles.stages)

    def filled(self, barriers: Any, i: Any, step: Any) -> Any:
        """The barrier of the place in the ring for a step of this block's i-th tile.

        A warpgroup that waits at a barrier must see each of its phases. So warpgroups that take turns have one each.
        """
        turn = jax.lax.rem(i, 2) * self.tiles.stages if self.tiles.in_turn else 0
        return barriers.at[self.slot(i, step) + turn]


class Ring(NamedTuple):
    """Tiles of both operands in shared memory, and barriers for the warpgroups that fill and that empty them."""

    a: Any
    b: Any
    filled: Any
    emptied: Any

    @classmethod
    def scratch(cls, tiles: Tiles, factors: Factors) -> "Ring":

        def block(size, contracted_axis):
            return (size, tiles.depth) if contracted_axis == 1 else (tiles.depth, size)

        turns = NUM_CONSUMERS if tiles.in_turn else 1
        a_block, b_block = map(block, (ROWS, tiles.columns), factors.contract)
        return cls(
            shared_tile((tiles.stages, *a_block), factors.a.dtype),
            shared_tile((tiles.stages, *b_block), factors.b.dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=tiles.stages * turns),
            plgpu.Barrier(num_arrivals=NUM_CONSUMERS // turns, num_barriers=tiles.stages),
        )


class _Vectors(NamedTuple):
    """The row vectors and column vectors of the epilogue, in device memory and staged for each warpgroup."""

    of_rows: Sequence[bool]
    refs: Sequence[Any]
    stages: Sequence[Any]
    filled: Any

    @staticmethod
    def scratch(tiles: Tiles, epilogue: Epilogue) -> list[Any]:
        """The barrier, and the staged vectors."""
        of_rows = [plgpu.SMEM((NUM_CONSUMERS, tiles.rows), x.dtype) for x in epilogue.row_vectors]
        of_columns = [plgpu.SMEM((NUM_CONSUMERS, tiles.columns), x.dtype) for x in epilogue.column_vectors]
        arrivals = max(1, len(of_rows) + len(of_columns))
        return [plgpu.Barrier(num_arrivals=arrivals, num_barriers=NUM_CONSUMERS), *of_rows, *of_columns]

    def fetch(self, warpgroup: Any, row: Any, column: Any) -> None:
        for of_rows, ref, stage in zip(self.of_rows, self.refs, self.stages, strict=True):
            source = ref.at[pl.ds(row if of_rows else column, stage.shape[1])]
            plgpu.copy_gmem_to_smem(source, stage.at[warpgroup], self.filled.at[warpgroup])

    def load(self, warpgroup: Any) -> tuple[list[Any], list[Any]]:
        """The vectors of rows, and the vectors of columns."""
        if self.refs:
            plgpu.barrier_wait(self.filled.at[warpgroup])
        vectors: tuple[list[Any], list[Any]] = [], []
        for of_rows, stage in zip(self.of_rows, self.stages, strict=True):
            vectors[not of_rows].append(load(stage, (warpgroup,), row_layout() if of_rows else column_layout()))
        return vectors


def _numbers(factors: Factors, epilogue: Epilogue) -> dict[str, jax.Array]:
    """The numbers that a block reads first, by their names; None stands for 0, which need not be read."""
    numbers = {
        "first_column": factors.first_column,
        "first_depth": factors.first_depth,
        "place": epilogue.place,
        "flag": epilogue.flag,
    }
    return {name: number for name, number in numbers.items() if number is not None}


def _read(name: str, ref: Any) -> Any:
    """A number from device memory. All but the flag are places, which are at whole pieces."""
    return ref[0] if name == "flag" else pl.multiple_of(ref[0], 64)


class _Block(NamedTuple):
    """A block's share of the product: its tiles, and where they are read and staged."""

    scheduler: _TileScheduler
    contract: tuple[int, int]
    operands: Sequence[Any]
    ring: Ring
    vectors: _Vectors
    numbers: Mapping[str, Any]
    epilogue: Epilogue
    refs: Sequence[Any]
    scratch: Sequence[Any]

    def run(self) -> None:
        """The last warpgroup copies tiles, and the others multiply them."""
        in_turn, warpgroup = self.scheduler.tiles.in_turn, jax.lax.axis_index("warpgroup")
        own_tiles = (
            jax.lax.div(self.scheduler.num_tiles - 1 - jax.lax.axis_index("block"), self.scheduler.num_blocks) + 1
        )

        @pl.when(warpgroup == NUM_CONSUMERS)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            jax.lax.fori_loop(0, own_tiles, lambda i, _: self._copy_tile(i), None)

        @pl.when(warpgroup < NUM_CONSUMERS)
        def _():
            plgpu.set_max_registers(232, action="increase")
            if in_turn:
                own_turns = jax.lax.div(own_tiles - warpgroup + 1, 2)
                jax.lax.fori_loop(0, own_turns, lambda i, _: self._finish_tile(2 * i + warpgroup, warpgroup), None)
            else:
                jax.lax.fori_loop(0, own_tiles, lambda i, _: self._finish_tile(i, warpgroup), None)
            plgpu.wait_smem_to_gmem(0)

    def _copy_tile(self, i: Any) -> None:
        """Copies the operands of the block's i-th tile."""
        scheduler, ring = self.scheduler, self.ring
        tiles, (row_tile, column_tile) = scheduler.tiles, scheduler.place(i)
        first_column, first_depth = self.numbers.get("first_column", 0), self.numbers.get("first_depth", 0)

        def copy_step(step, operands, depth, b_depth):
            slot = scheduler.slot(i, step)
            pl.when(i * scheduler.steps + step >= tiles.stages)(lambda: plgpu.barrier_wait(ring.emptied.at[slot]))
            indices = (
                (pl.ds(row_tile * ROWS, ROWS), pl.ds(depth, tiles.depth)),
                (pl.ds(first_column + column_tile * tiles.columns, tiles.columns), pl.ds(b_depth, tiles.depth)),
            )
            for ref, stage, index, axis in zip(operands, (ring.a, ring.b), indices, self.contract, strict=True):
                source = ref.at[index if axis == 1 else index[::-1]]
                plgpu.copy_gmem_to_smem(source, stage.at[slot], scheduler.filled(ring.filled, i, step))

        def copy_own(step, _):
            copy_step(step, self.operands[:2], step * tiles.depth, first_depth + step * tiles.depth)

        def copy_added(step, _):
            copy_step(own_steps + step, self.operands[2:], step * tiles.depth, step * tiles.depth)

        own_steps = scheduler.steps - scheduler.added_steps
        jax.lax.fori_loop(0, own_steps, copy_own, None)
        if scheduler.added_steps:
            jax.lax.fori_loop(0, scheduler.added_steps, copy_added, None)

    def _finish_tile(self, i: Any, warpgroup: Any) -> None:
        """The product and the epilogue of a warpgroup's share of the block's i-th tile."""
        tiles, (row_tile, column_tile) = self.scheduler.tiles, self.scheduler.place(i)
        row = row_tile * ROWS + (0 if tiles.in_turn else warpgroup * tiles.rows)
        column = column_tile * tiles.columns
        self.vectors.fetch(warpgroup, row, self.numbers.get("first_column", 0) + column)
        seen = {name: number for name, number in self.numbers.items() if name != "first_depth"}
        tile = Tile(None, row, column, column_tile, warpgroup, **seen)
        if self.epilogue.prepare is not None:
            self.epilogue.prepare(tile, list(self.refs), self.scratch)
        values = self._multiply_tile(i, warpgroup)
        row_values, column_values = self.vectors.load(warpgroup)
        tile = tile._replace(values=values, row_vectors=row_values, column_vectors=column_values)
        self.epilogue.finish(tile, list(self.refs), self.scratch)

    def _multiply_tile(self, i: Any, warpgroup: Any) -> jax.Array:
        """A warpgroup's share of the block's i-th tile (rows, columns), float32."""
        scheduler, ring, (a_axis, b_axis) = self.scheduler, self.ring, self.contract
        rows = scheduler.tiles.rows
        own_rows = slice(None) if scheduler.tiles.in_turn else pl.ds(warpgroup * rows, rows)

        def multiply(accumulator):
            def multiply_step(step, _):
                slot = scheduler.slot(i, step)
                plgpu.barrier_wait(scheduler.filled(ring.filled, i, step))
                x, y = ring.a.at[slot], ring.b.at[slot]
                x = x.at[own_rows] if a_axis == 1 else x.at[:, own_rows].transpose((1, 0))
                plgpu.wgmma(accumulator, x, y.transpose((1, 0)) if b_axis == 1 else y)
                plgpu.wgmma_wait(1)  # all products but the last are done, so the tiles that they read are free
                pl.when(step > 0)(lambda: plgpu.barrier_arrive(ring.emptied.at[scheduler.slot(i, step - 1)]))

            jax.lax.fori_loop(0, scheduler.steps, multiply_step, None)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(ring.emptied.at[scheduler.slot(i, scheduler.steps - 1)])
            return accumulator[...]

        return pl.run_scoped(
            multiply, plgpu.WGMMAAccumulatorRef((scheduler.tiles.rows, scheduler.tiles.columns), jnp.float32)
        )


def product(factors: Factors, tiles: Tiles, epilogue: Epilogue, *, name: str) -> Any:
    """Runs the epilogue on each tile of the product. Returns its outputs, or its updated `in_place`."""
    row_tiles, column_tiles = cdiv(factors.rows, ROWS), cdiv(factors.columns, tiles.columns)
    added_steps = cdiv(factors.added_depth, tiles.depth)
    steps = cdiv(factors.depth, tiles.depth) + added_steps
    scheduler = _TileScheduler(tiles, row_tiles, column_tiles, steps, added_steps)
    vectors = (*epilogue.row_vectors, *epilogue.column_vectors)
    of_rows = [True] * len(epilogue.row_vectors) + [False] * len(epilogue.column_vectors)
    numbers = _numbers(factors, epilogue)
    ring_scratch, vector_scratch = Ring.scratch(tiles, factors), _Vectors.scratch(tiles, epilogue)
    counts = (
        len(factors.operands),
        len(vectors),
        len(numbers),
        epilogue.num_refs,
        len(ring_scratch),
        len(vector_scratch),
    )

    def body(*refs):
        operands, vector_refs, number_refs, array_refs, ring, (filled, *stages), scratch = split(refs, counts)
        scalars = {name: _read(name, ref) for name, ref in zip(numbers, number_refs, strict=True)}
        own_vectors = _Vectors(of_rows, vector_refs, stages, filled)
        block = _Block(
            scheduler, factors.contract, operands, Ring(*ring), own_vectors, scalars, epilogue, array_refs, scratch
        )
        block.run()

    return launch(
        body, *factors.operands, *vectors, *numbers.values(), *epilogue.matrices,
        num_blocks=scheduler.num_blocks,
        out_types=epilogue.out_types,
        in_place=epilogue.in_place,
        scratch=[*ring_scratch, *vector_scratch, *epilogue.scratch],
        name=name,
    )  # fmt: skip
