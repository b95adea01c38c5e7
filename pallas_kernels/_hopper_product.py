"""A matrix product for Hopper (Pallas Mosaic GPU) whose tiles go to an epilogue before they reach memory.

The kernel is persistent and warp-specialised: in each block one warpgroup copies tiles of both operands into a ring of
shared memory, and two warpgroups multiply them and run the epilogue. These two either share a tile, 64 rows each, or
take whole tiles in turn. Then one multiplies while the other is in its epilogue, which is better where the contracted
axis is short. Blocks walk the output along a snake, so that tiles which are computed at the same time share their
operands in L2. (Pairs of blocks that share b's tiles by multicast were within 1 % of single blocks on an H200, with
either kind of tile, and are left out.)
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _mosaic_gpu as plgpu
from liger_jax.pallas_kernels._hopper import (
    NUM_CORES,
    at,
    column_layout,
    launch,
    load,
    row_layout,
    shared_tile,
    tile_layout,
)
from liger_jax.pallas_kernels._tiles import cdiv, split

ROWS = 128  # of a block's tile. Vectors of rows are padded to a multiple of it: their ends are not masked.
PIECE_COLUMNS = 32
_NUM_CONSUMERS = 2


@dataclasses.dataclass(frozen=True)
class Tiles:
    """What one block computes at a time: a tile of 128 rows by `columns`, `depth` of the contracted axis a step.

    Shared memory, at most 227 KiB: stages · (128 + columns) · depth · 2 bytes for the ring, and what the epilogue
    stages. Registers: a warpgroup's accumulator is 64 · columns float32 where a tile is shared, and 128 · columns where
    tiles are taken in turn. A thread has room for 128 of them; more would spill.
    """

    columns: int = 256
    in_turn: bool = False  # each warpgroup takes its own tiles
    depth: int = 64
    stages: int = 4
    snake_width: int = 16

    def __post_init__(self) -> None:
        accumulator = self.rows * self.columns // 128
        if accumulator > 128:
            raise ValueError(f"{self} needs {accumulator} registers a thread for its accumulator; 128 are there.")

    @property
    def rows(self) -> int:
        """Rows of a warpgroup's accumulator."""
        return ROWS if self.in_turn else ROWS // _NUM_CONSUMERS


class Tile(NamedTuple):
    """One warpgroup's part of the product, as the epilogue gets it."""

    values: Any  # (rows, columns) float32
    row: Any  # of its first element
    column: Any
    column_tile: Any
    warpgroup: Any
    row_vectors: list[Any]
    column_vectors: list[Any]
    start: Any  # what `start` holds, or 0

    def over_rows(self, vector):
        """A vector of rows, repeated along the columns."""
        return jax.lax.broadcast_in_dim(vector, self.values.shape, (0,))

    def over_columns(self, vector):
        """A vector of columns, repeated along the rows."""
        return jax.lax.broadcast_in_dim(vector, self.values.shape, (1,))

    def column_indices(self):
        """(rows, columns) int32, counted from the tile's first column."""
        return plgpu.broadcasted_iota(jnp.int32, self.values.shape, 1, layout=tile_layout())


def staging(dtype: Any) -> Any:
    """Shared memory of `store_tile`: two pieces of 64 rows by 32 columns for each warpgroup."""
    return shared_tile((_NUM_CONSUMERS, 2, 64, PIECE_COLUMNS), dtype)


def row_staging(tiles: Tiles, dtype: Any) -> Any:
    """Shared memory of `store_rows`: one number for each row."""
    return plgpu.SMEM((_NUM_CONSUMERS, tiles.rows), dtype)


def pieces(shape: Sequence[int]) -> list[tuple[slice, slice]]:
    """A tile of the given shape as the pieces of `staging`."""
    return [
        (slice(row, row + 64), slice(column, column + PIECE_COLUMNS))
        for row in range(0, shape[0], 64)
        for column in range(0, shape[1], PIECE_COLUMNS)
    ]


def store_tile(tile: Tile, values: Any, stage: Any, out_ref: Any, row: Any, column: Any, add: bool = False) -> None:
    """Writes a tile's values to out_ref from (row, column) on, or adds them to the values there."""
    for i, piece in enumerate(pieces(values.shape)):
        slot = stage.at[tile.warpgroup, i % 2]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        slot[...] = values[piece].astype(stage.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(slot, at(out_ref, row, column, piece), reduction_op="add" if add else None)


def store_rows(tile: Tile, vectors: Sequence[Any], stages: Sequence[Any], out_refs: Sequence[Any]) -> None:
    """Writes one number a row to each of out_refs (column tiles, rows)."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for stage, vector in zip(stages, vectors, strict=True):
        stage[tile.warpgroup] = vector
    plgpu.commit_smem()
    for stage, out_ref in zip(stages, out_refs, strict=True):
        plgpu.copy_smem_to_gmem(stage.at[tile.warpgroup], out_ref.at[tile.column_tile, pl.ds(tile.row, stage.shape[1])])


@dataclasses.dataclass(frozen=True)
class _Walk:
    """The output tiles of a block, the steps that each takes, and the places of its operands in the ring."""

    tiles: Tiles
    row_tiles: int
    column_tiles: int
    steps: int  # over the contracted axis

    @property
    def num_tiles(self) -> int:
        return self.row_tiles * self.column_tiles

    @property
    def num_blocks(self) -> int:
        return min(NUM_CORES, self.num_tiles)

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

        Whoever waits at a barrier must see each of its phases. So warpgroups that take turns have a barrier each.
        """
        turn = jax.lax.rem(i, 2) * self.tiles.stages if self.tiles.in_turn else 0
        return barriers.at[self.slot(i, step) + turn]


class _Ring(NamedTuple):
    """Tiles of both operands in shared memory, and barriers for the warpgroups that fill and that empty them."""

    a: Any
    b: Any
    filled: Any
    emptied: Any

    @classmethod
    def scratch(cls, tiles: Tiles, contract: tuple[int, int], a_dtype: Any, b_dtype: Any) -> "_Ring":

        def block(size, contracted_axis):
            return (size, tiles.depth) if contracted_axis == 1 else (tiles.depth, size)

        turns = _NUM_CONSUMERS if tiles.in_turn else 1
        return cls(
            shared_tile((tiles.stages, *block(ROWS, contract[0])), a_dtype),
            shared_tile((tiles.stages, *block(tiles.columns, contract[1])), b_dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=tiles.stages * turns),
            plgpu.Barrier(num_arrivals=_NUM_CONSUMERS // turns, num_barriers=tiles.stages),
        )


def _copy_tile(walk: _Walk, i: Any, operands: Any, contract: tuple[int, int], ring: _Ring, column: Any, depth: Any):
    """Copies the operands of the block's i-th tile. b begins at `column`, and at `depth` of the contracted axis."""
    tiles = walk.tiles
    row_tile, column_tile = walk.place(i)

    def copy_step(step, _):
        slot = walk.slot(i, step)
        pl.when(i * walk.steps + step >= tiles.stages)(lambda: plgpu.barrier_wait(ring.emptied.at[slot]))
        indices = (
            (pl.ds(row_tile * ROWS, ROWS), pl.ds(step * tiles.depth, tiles.depth)),
            (
                pl.ds(column + column_tile * tiles.columns, tiles.columns),
                pl.ds(depth + step * tiles.depth, tiles.depth),
            ),
        )
        for ref, stage, index, axis in zip(operands, (ring.a, ring.b), indices, contract, strict=True):
            source = ref.at[index if axis == 1 else index[::-1]]
            plgpu.copy_gmem_to_smem(source, stage.at[slot], walk.filled(ring.filled, i, step))

    jax.lax.fori_loop(0, walk.steps, copy_step, None)


def _multiply_tile(walk: _Walk, i: Any, warpgroup: Any, contract: tuple[int, int], ring: _Ring) -> jax.Array:
    """A warpgroup's part of the block's i-th tile (rows, columns), float32."""
    rows = walk.tiles.rows
    own_rows = slice(None) if walk.tiles.in_turn else pl.ds(warpgroup * rows, rows)

    def multiply(accumulator):
        def multiply_step(step, _):
            slot = walk.slot(i, step)
            plgpu.barrier_wait(walk.filled(ring.filled, i, step))
            x, y = ring.a.at[slot], ring.b.at[slot]
            x = x.at[own_rows] if contract[0] == 1 else x.at[:, own_rows].transpose((1, 0))
            plgpu.wgmma(accumulator, x, y.transpose((1, 0)) if contract[1] == 1 else y)
            plgpu.wgmma_wait(1)  # all products but the last are done, so the tiles that they read are free
            pl.when(step > 0)(lambda: plgpu.barrier_arrive(ring.emptied.at[walk.slot(i, step - 1)]))

        jax.lax.fori_loop(0, walk.steps, multiply_step, None)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(ring.emptied.at[walk.slot(i, walk.steps - 1)])
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((walk.tiles.rows, walk.tiles.columns), jnp.float32))


class _Vectors(NamedTuple):
    """The row vectors and column vectors of the epilogue, in device memory and staged for each warpgroup."""

    of_rows: Sequence[bool]
    refs: Sequence[Any]
    stages: Sequence[Any]
    filled: Any

    def fetch(self, warpgroup: Any, row: Any, column: Any) -> None:
        for of_rows, ref, stage in zip(self.of_rows, self.refs, self.stages, strict=True):
            source = ref.at[pl.ds(row if of_rows else column, stage.shape[1])]
            plgpu.copy_gmem_to_smem(source, stage.at[warpgroup], self.filled.at[warpgroup])

    def load(self, warpgroup: Any) -> tuple[list[Any], list[Any]]:
        """The vectors of rows, and the vectors of columns."""
        if self.refs:
            plgpu.barrier_wait(self.filled.at[warpgroup])
        found: tuple[list[Any], list[Any]] = [], []
        for of_rows, stage in zip(self.of_rows, self.stages, strict=True):
            found[not of_rows].append(load(stage, (warpgroup,), row_layout() if of_rows else column_layout()))
        return found


def product(
    a: jax.Array,
    b: jax.Array,
    contract: tuple[int, int],
    tiles: Tiles,
    epilogue: Callable[[Tile, list[Any], list[Any]], None],
    *,
    name: str,
    prologue: Callable[[Tile, list[Any], list[Any]], None] | None = None,
    out_types: Sequence[Any] = (),
    in_place: Sequence[jax.Array] = (),
    scratch: Sequence[Any] = (),
    matrices: Sequence[jax.Array] = (),
    row_vectors: Sequence[jax.Array] = (),
    column_vectors: Sequence[jax.Array] = (),
    start: jax.Array | None = None,
    start_of: str = "columns",
    num_columns: int | None = None,
) -> Any:
    """Calls `epilogue(tile, refs, scratch)` for each tile of a · b, which contracts a's and b's axes of `contract`.

    `prologue(tile, refs, scratch)` is called before a tile's product, when the tile has no values, to fetch what the
    epilogue needs. `refs` are references to `matrices`, and then to the outputs or to `in_place` (see `launch`).
    The tile brings its parts of the row vectors (rows,) and of the column vectors (columns of b,).

    `start` (1,) int32 is a number, and `start_of` says what it means. "columns": b's columns begin there, and
    `num_columns` of them are multiplied. "depth": b's contracted axis begins there. "output", a multiple of 64, and
    "flag", any number, change nothing in the product: the epilogue finds the number in `tile.start`.

    Elements past an end are read as zero, and are not written. Inner axes are multiples of 64, and the matrices' rows
    multiples of 8.
    """
    walk = _Walk(
        tiles,
        cdiv(a.shape[1 - contract[0]], ROWS),
        cdiv(num_columns or b.shape[1 - contract[1]], tiles.columns),
        cdiv(a.shape[contract[0]], tiles.depth),
    )
    vectors = (*row_vectors, *column_vectors)
    of_rows = [True] * len(row_vectors) + [False] * len(column_vectors)
    starts = () if start is None else (start,)
    ring_scratch = _Ring.scratch(tiles, contract, a.dtype, b.dtype)
    sizes = [tiles.rows if of_row else tiles.columns for of_row in of_rows]
    all_scratch = [
        *ring_scratch,
        plgpu.Barrier(num_arrivals=max(1, len(vectors)), num_barriers=_NUM_CONSUMERS),
        *[plgpu.SMEM((_NUM_CONSUMERS, size), x.dtype) for size, x in zip(sizes, vectors, strict=True)],
        *scratch,
    ]

    def body(a_ref, b_ref, *refs):
        counts = len(vectors), len(starts), len([*matrices, *out_types, *in_place]), len(ring_scratch), 1, len(vectors)
        vector_refs, start_refs, array_refs, ring, (filled,), stages, scratch_refs = split(refs, counts)
        ring, given = _Ring(*ring), _Vectors(of_rows, vector_refs, stages, filled)
        start = start_refs[0][0] if starts else 0
        start = pl.multiple_of(start, 64) if starts and start_of != "flag" else start
        b_column, b_depth = (start if start_of == what else 0 for what in ("columns", "depth"))
        warpgroup = jax.lax.axis_index("warpgroup")
        own_tiles = jax.lax.div(walk.num_tiles - 1 - jax.lax.axis_index("block"), walk.num_blocks) + 1

        def finish_tile(i, _):
            row_tile, column_tile = walk.place(i)
            row = row_tile * ROWS + (0 if tiles.in_turn else warpgroup * tiles.rows)
            column = column_tile * tiles.columns
            given.fetch(warpgroup, row, b_column + column)
            tile = Tile(None, row, column, column_tile, warpgroup, [], [], start)
            if prologue is not None:
                prologue(tile, list(array_refs), scratch_refs)
            values = _multiply_tile(walk, i, warpgroup, contract, ring)
            row_values, column_values = given.load(warpgroup)
            tile = tile._replace(values=values, row_vectors=row_values, column_vectors=column_values)
            epilogue(tile, list(array_refs), scratch_refs)

        @pl.when(warpgroup == _NUM_CONSUMERS)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            copy = lambda i, _: _copy_tile(walk, i, (a_ref, b_ref), contract, ring, b_column, b_depth)
            jax.lax.fori_loop(0, own_tiles, copy, None)

        @pl.when(warpgroup < _NUM_CONSUMERS)
        def _():
            plgpu.set_max_registers(232, action="increase")
            if tiles.in_turn:
                own_turns = jax.lax.div(own_tiles - warpgroup + 1, 2)
                jax.lax.fori_loop(0, own_turns, lambda i, _: finish_tile(2 * i + warpgroup, None), None)
            else:
                jax.lax.fori_loop(0, own_tiles, finish_tile, None)
            plgpu.wait_smem_to_gmem(0)

    return launch(
        body, a, b, *vectors, *starts, *matrices,
        num_blocks=walk.num_blocks, out_types=out_types, in_place=in_place, scratch=all_scratch, name=name,
    )  # fmt: skip
