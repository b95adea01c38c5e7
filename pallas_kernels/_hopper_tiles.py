"""The tiles of Hopper's product: their sizes, the tile that an epilogue gets, and how it writes results to memory."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _mosaic_gpu as plgpu
from liger_jax.pallas_kernels.hopper import at, shared_tile, tile_layout

ROWS = 128  # of a block's tile. Vectors of rows are padded to a multiple of it: their ends are not masked.
PIECE_COLUMNS = 32
NUM_CONSUMERS = 2  # warpgroups of a block that multiply


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
            raise ValueError(f"{self} needs {accumulator} registers a thread for its accumulator; 128 are available.")

    @property
    def rows(self) -> int:
        """Rows of a warpgroup's accumulator."""
        return ROWS if self.in_turn else ROWS // NUM_CONSUMERS


class Tile(NamedTuple):
    """One warpgroup's tile of the product, as the epilogue gets it."""

    values: Any  # (rows, columns) float32
    row: Any  # the row of its first element
    column: Any  # the column of its first element, counted from `first_column`
    column_tile: Any
    warpgroup: Any
    row_vectors: Sequence[Any] = ()
    column_vectors: Sequence[Any] = ()
    first_column: Any = 0  # where b's columns begin (`Factors`)
    place: Any = 0  # where the results go (`Epilogue`)
    flag: Any = 0  # the epilogue's own number

    def over_rows(self, vector):
        """A vector of rows, repeated along the columns."""
        return jax.lax.broadcast_in_dim(vector, self.values.shape, (0,))

    def over_columns(self, vector):
        """A vector of columns, repeated along the rows."""
        return jax.lax.broadcast_in_dim(vector, self.values.shape, (1,))

    def column_indices(self):
        """(rows, columns) int32, counted from the tile's first column."""
        return plgpu.broadcasted_iota(jnp.int32, self.values.shape, 1, layout=tile_layout())


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """What becomes of a tile of the product.

    `finish(tile, refs, scratch)` is called for each tile. `prepare(tile, refs, scratch)` is called before a tile's
    product, when the tile has no values, to fetch what `finish` needs. `refs` are references to `matrices`, and then to
    the outputs or to `in_place` (see `launch`), in which elements past an end are not written.

    A tile brings its pieces of the row vectors (rows,) and of the column vectors (columns of b,), and two numbers that
    change nothing in the product, each (1,) int32 or None: `place`, a multiple of 64, and `flag`.
    """

    finish: Callable[[Tile, list[Any], Sequence[Any]], None]
    prepare: Callable[[Tile, list[Any], Sequence[Any]], None] | None = None
    out_types: Sequence[Any] = ()
    in_place: Sequence[jax.Array] = ()
    scratch: Sequence[Any] = ()
    matrices: Sequence[jax.Array] = ()
    row_vectors: Sequence[jax.Array] = ()
    column_vectors: Sequence[jax.Array] = ()
    place: jax.Array | None = None
    flag: jax.Array | None = None

    @property
    def num_refs(self) -> int:
        """How many references `finish` gets."""
        return len(self.matrices) + len(self.out_types) + len(self.in_place)


def staging(dtype: Any, num_pieces: int = 2) -> Any:
    """Shared memory of `store_tile`: pieces of 64 rows by 32 columns for each warpgroup."""
    return shared_tile((NUM_CONSUMERS, num_pieces, 64, PIECE_COLUMNS), dtype)


def row_staging(tiles: Tiles, dtype: Any) -> Any:
    """Shared memory of `store_rows`: one number for each row."""
    return plgpu.SMEM((NUM_CONSUMERS, tiles.rows), dtype)


def pieces(shape: Sequence[int]) -> list[tuple[slice, slice]]:
    """A tile of the given shape as the pieces of `staging`."""
    return [
        (slice(row, row + 64), slice(column, column + PIECE_COLUMNS))
        for row in range(0, shape[0], 64)
        for column in range(0, shape[1], PIECE_COLUMNS)
    ]


def store_tile(tile: Tile, values: Any, stage: Any, out_ref: Any, row: Any, column: Any, add: bool = False) -> None:
    """Writes a tile's values to out_ref from (row, column) on, or adds them to the values there."""
    num_slots = stage.shape[1]
    for i, piece in enumerate(pieces(values.shape)):
        slot = stage.at[tile.warpgroup, i % num_slots]
        plgpu.wait_smem_to_gmem(num_slots - 1, wait_read_only=True)
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
