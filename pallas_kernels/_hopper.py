"""A matrix product for Hopper (Pallas Mosaic GPU) whose tiles go to an epilogue before they reach memory.

Persistent and warp-specialised: in each block one warpgroup copies tiles of both operands into a ring of shared
memory, two multiply them and run the epilogue. They either share a tile, 64 rows each, or take whole tiles in turn, so
that one multiplies while the other is in its epilogue: better where the contracted axis is short. Blocks walk the
output along a snake, so that the tiles in flight at a time share their operands in L2. (Pairs of blocks that share
b's tiles by multicast were within 1 % of single ones on an H200, with either kind of tile, and are left out.)
"""

import contextlib
import contextvars
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from liger_jax.pallas_kernels._tiles import cdiv, out_like

LAYOUT = plgpu.Layout.WGMMA  # how a warpgroup's registers hold a tile
ROW_LAYOUT, COLUMN_LAYOUT = LAYOUT.reduce(1), LAYOUT.reduce(0)  # one number a row, one a column
ROWS = 128  # of a block's tile, and what vectors of rows are padded to: their ends are not masked
NUM_CORES = 132
PIECE_COLUMNS = 32
_NUM_CONSUMERS = 2
_SWIZZLE_BYTES = 128
_is_interpreted = contextvars.ContextVar("is_interpreted", default=False)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """What one block computes at a time: a tile of 128 rows by `columns`, `depth` of the contracted axis a step.

    Shared memory, at most 227 KiB: stages · (128 + columns) · depth · 2 bytes for the ring, and what the epilogue
    stages. Registers: a warpgroup's accumulator is 64 · columns float32 where a tile is shared, else 128 · columns;
    more than 128 of them a thread spill.
    """

    columns: int = 256
    in_turn: bool = False  # each warpgroup takes tiles of its own
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
        return jax.lax.broadcast_in_dim(vector, self.values.shape, (1,))

    def column_indices(self):
        """(rows, columns) int32, counted from the tile's first column."""
        return plgpu.broadcasted_iota(jnp.int32, self.values.shape, 1, layout=LAYOUT)


def shared_tile(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for tiles (..., rows, columns) that matrix units and the copy engine read."""
    width = min(_SWIZZLE_BYTES, shape[-1] * jnp.dtype(dtype).itemsize)
    tiling = plgpu.TilingTransform((8, width // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(width)))


def staging(dtype: Any) -> Any:
    """Where `store_tile` puts pieces on their way out: two of 64 rows by 32 columns for each warpgroup."""
    return shared_tile((_NUM_CONSUMERS, 2, 64, PIECE_COLUMNS), dtype)


def row_staging(tiles: Tiles, dtype: Any) -> Any:
    """Where `store_rows` puts one number a row on its way out."""
    return plgpu.SMEM((_NUM_CONSUMERS, tiles.rows), dtype)


def pieces(shape: Sequence[int]) -> list[tuple[slice, slice]]:
    """A tile of the given shape as the pieces of `staging`."""
    return [
        (slice(row, row + 64), slice(column, column + PIECE_COLUMNS))
        for row in range(0, shape[0], 64)
        for column in range(0, shape[1], PIECE_COLUMNS)
    ]


def at(ref: Any, row: Any, column: Any, piece: tuple[slice, slice]) -> Any:
    """The piece of a tile that begins at (row, column) of an array in device memory."""
    rows, columns = piece
    height, width = rows.stop - rows.start, columns.stop - columns.start
    return ref.at[pl.ds(row + rows.start, height), pl.ds(column + columns.start, width)]


def load(ref: Any, index: tuple[Any, ...], layout: Any) -> Any:
    """Shared memory to registers; the index is an argument of its own in JAX 0.10 and gone in 0.12."""
    if jax.__version_info__ < (0, 11):
        return plgpu.load(ref, index, layout=layout)
    return plgpu.load(ref.at[index], layout=layout)


def store_tile(tile: Tile, values: Any, stage: Any, out_ref: Any, row: Any, column: Any, add: bool = False) -> None:
    """Writes a tile's values to out_ref from (row, column) on, or adds them to what is there."""
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


def launch(
    body: Callable[..., None],
    *operands: Any,
    num_blocks: int,
    scratch: Any,
    name: str,
    out_types: Sequence[Any] = (),
    in_place: Sequence[jax.Array] = (),
) -> Any:
    """Runs body(*operands', *outputs' and in_place's refs, *scratch) in blocks of three warpgroups.

    Returns the outputs, or what became of `in_place`: arrays that the body changes where they are. Inside a
    `shard_map` that checks how values vary over its mesh, JAX has no such arrays: see `can_write_in_place`.
    """
    mesh = plgpu.Mesh(grid=(num_blocks,), grid_names=("block",), num_threads=3, thread_name="warpgroup")

    def run(*refs):
        pl.run_scoped(functools.partial(body, *refs), *scratch, collective_axes="warpgroup")

    # approx_math: exp to 2 units in the last place. tanh's would be good to 2^-11 only: kernels spell it by exp.
    params = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
    kernel = pl.kernel(run, out_type=list(out_types), mesh=mesh, compiler_params=params, name=name)
    if not in_place:
        return kernel(*operands)
    return pl.run_state(lambda refs: kernel(*operands, *refs) and None)(tuple(in_place))


def empty(like: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An array of anything, for kernels to fill: zeros cost a pass over memory."""
    no_scratch = [plgpu.SMEM((8,), jnp.float32)]
    (array,) = launch(
        lambda *_: None, num_blocks=1, scratch=no_scratch, name="empty", out_types=[out_like(like, shape, dtype)]
    )
    return array


def can_write_in_place(x: jax.Array) -> bool:
    """Whether `launch` may change arrays that vary over the mesh as x does."""
    return not jax.typeof(x).manual_axis_type.varying


def can_add_in_place(x: jax.Array) -> bool:
    """Whether `store_tile` may add: JAX's interpreter has no copies that do."""
    return can_write_in_place(x) and not _is_interpreted.get()


@contextlib.contextmanager
def interpreter(interpret: bool) -> Iterator[None]:
    """Within it `launch` simulates blocks on the CPU (JAX ≥ 0.12): warpgroups, barriers, copies, matrix units.

    Memory begins as NaN, and a data race is an error.
    """
    if not interpret:
        yield
        return
    token = _is_interpreted.set(True)
    try:
        gpu: Any = plgpu  # JAX 0.10's types do not know what follows
        with gpu.force_gpu_interpret_mode(gpu.InterpretGPUParams(detect_races=True)):
            yield
    finally:
        _is_interpreted.reset(token)


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
    row_vectors: Sequence[jax.Array] = (),
    column_vectors: Sequence[jax.Array] = (),
    start: jax.Array | None = None,
    start_of: str = "columns",
    num_columns: int | None = None,
) -> Any:
    """Calls `epilogue(tile, refs, scratch)` for each tile of a · b, which contracts a's and b's axes of `contract`.

    `prologue(tile, refs, scratch)` comes before a tile's product, with no values yet, to fetch what the epilogue needs.
    `start` (1,) int32 is where b's columns begin (then `num_columns` of them are multiplied), or its contracted axis
    (`start_of="depth"`), or is the epilogue's alone: a multiple of 64 (`"output"`), or anything (`"flag"`). What lies
    past an end is read as zero and not written. Row vectors (rows,), column vectors (columns of b,) come to the
    epilogue in the tile. See `launch` for `out_types` and `in_place`. All inner axes must be multiples of 64.
    """
    num_rows, num_depth = a.shape[1 - contract[0]], a.shape[contract[0]]
    columns = tiles.columns
    row_tiles, column_tiles = cdiv(num_rows, ROWS), cdiv(num_columns or b.shape[1 - contract[1]], columns)
    steps, total = cdiv(num_depth, tiles.depth), row_tiles * column_tiles
    num_blocks = min(NUM_CORES, total)
    stages, rows = tiles.stages, tiles.rows
    vectors = (*row_vectors, *column_vectors)
    starts = () if start is None else (start,)

    def body(a_ref, b_ref, *refs):
        given, refs = refs[: len(vectors) + len(starts)], refs[len(vectors) + len(starts) :]
        refs, all_scratch = refs[:-num_scratch], refs[-num_scratch:]
        a_ring, b_ring, filled, emptied, vectors_filled, *scratch_refs = all_scratch
        vector_stages, scratch_refs = scratch_refs[: len(vectors)], scratch_refs[len(vectors) :]
        warpgroup, block = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("block")
        start = given[-1][0] if starts else 0
        if starts and start_of != "flag":
            start = pl.multiple_of(start, 64)
        num_tiles = jax.lax.div(total - 1 - block, num_blocks) + 1
        b_column = start if start_of == "columns" else 0
        b_depth = start if start_of == "depth" else 0
        # A barrier's waiters must see its every phase: warpgroups that take turns have one each.
        filled_at = lambda i, slot: filled.at[slot + (jax.lax.rem(i, 2) * stages if tiles.in_turn else 0)]

        def place(i):
            tile = block + i * num_blocks
            return plgpu.planar_snake(tile, (row_tiles, column_tiles), minor_dim=0, tile_width=tiles.snake_width)

        def copy_tile(i, _):
            row_tile, column_tile = place(i)

            def copy_step(step, _):
                count = i * steps + step
                slot = jax.lax.rem(count, stages)
                pl.when(count >= stages)(lambda: plgpu.barrier_wait(emptied.at[slot]))
                a_index = (pl.ds(row_tile * ROWS, ROWS), pl.ds(step * tiles.depth, tiles.depth))
                b_index = (
                    pl.ds(b_column + column_tile * columns, columns),
                    pl.ds(b_depth + step * tiles.depth, tiles.depth),
                )
                for ref, ring, index, axis in (
                    (a_ref, a_ring, a_index, contract[0]),
                    (b_ref, b_ring, b_index, contract[1]),
                ):
                    source = ref.at[index if axis == 1 else index[::-1]]
                    plgpu.copy_gmem_to_smem(source, ring.at[slot], filled_at(i, slot))

            jax.lax.fori_loop(0, steps, copy_step, None)

        def multiply_tile(i, _):
            row_tile, column_tile = place(i)
            row = row_tile * ROWS + (0 if tiles.in_turn else warpgroup * rows)
            column = column_tile * columns
            for k, (vector_ref, stage) in enumerate(zip(given, vector_stages, strict=False)):
                of_rows = k < len(row_vectors)
                index = pl.ds(row, rows) if of_rows else pl.ds(b_column + column, columns)
                plgpu.copy_gmem_to_smem(vector_ref.at[index], stage.at[warpgroup], vectors_filled.at[warpgroup])
            tile = Tile(None, row, column, column_tile, warpgroup, [], [], start)
            if prologue is not None:
                prologue(tile, list(refs), scratch_refs)
            own_rows = slice(None) if tiles.in_turn else pl.ds(warpgroup * rows, rows)

            def multiply(accumulator):
                def multiply_step(step, _):
                    count = i * steps + step
                    slot = jax.lax.rem(count, stages)
                    plgpu.barrier_wait(filled_at(i, slot))
                    x, y = a_ring.at[slot], b_ring.at[slot]
                    x = x.at[own_rows] if contract[0] == 1 else x.at[:, own_rows].transpose((1, 0))
                    plgpu.wgmma(accumulator, x, y.transpose((1, 0)) if contract[1] == 1 else y)
                    plgpu.wgmma_wait(1)  # all but the product just begun: its predecessor's tiles are free
                    pl.when(step > 0)(lambda: plgpu.barrier_arrive(emptied.at[jax.lax.rem(count - 1, stages)]))

                jax.lax.fori_loop(0, steps, multiply_step, None)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(emptied.at[jax.lax.rem((i + 1) * steps - 1, stages)])
                return accumulator[...]

            values = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((rows, columns), jnp.float32))
            if vectors:
                plgpu.barrier_wait(vectors_filled.at[warpgroup])
            layouts = [ROW_LAYOUT] * len(row_vectors) + [COLUMN_LAYOUT] * len(column_vectors)
            loaded = [load(stage, (warpgroup,), layout) for stage, layout in zip(vector_stages, layouts, strict=True)]
            row_values, column_values = loaded[: len(row_vectors)], loaded[len(row_vectors) :]
            tile = tile._replace(values=values, row_vectors=row_values, column_vectors=column_values)
            epilogue(tile, list(refs), scratch_refs)

        @pl.when(warpgroup == _NUM_CONSUMERS)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            jax.lax.fori_loop(0, num_tiles, copy_tile, None)

        @pl.when(warpgroup < _NUM_CONSUMERS)
        def _():
            plgpu.set_max_registers(232, action="increase")
            if tiles.in_turn:
                own_tiles = jax.lax.div(num_tiles - warpgroup + 1, 2)
                jax.lax.fori_loop(0, own_tiles, lambda i, _: multiply_tile(2 * i + warpgroup, None), None)
            else:
                jax.lax.fori_loop(0, num_tiles, multiply_tile, None)
            plgpu.wait_smem_to_gmem(0)

    block_shape = lambda size, axis: (size, tiles.depth) if axis == 1 else (tiles.depth, size)
    turns = _NUM_CONSUMERS if tiles.in_turn else 1
    vector_size = lambda k: rows if k < len(row_vectors) else columns
    all_scratch = [
        shared_tile((stages, *block_shape(ROWS, contract[0])), a.dtype),
        shared_tile((stages, *block_shape(columns, contract[1])), b.dtype),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages * turns),
        plgpu.Barrier(num_arrivals=_NUM_CONSUMERS // turns, num_barriers=stages),
        plgpu.Barrier(num_arrivals=max(1, len(vectors)), num_barriers=_NUM_CONSUMERS),
        *[plgpu.SMEM((_NUM_CONSUMERS, vector_size(k)), vector.dtype) for k, vector in enumerate(vectors)],
        *scratch,
    ]
    num_scratch = len(all_scratch)
    return launch(
        body, a, b, *vectors, *starts,
        num_blocks=num_blocks, out_types=out_types, in_place=in_place, scratch=all_scratch, name=name,
    )  # fmt: skip


def tanh(x: jax.Array) -> jax.Array:
    """1 − 2/(1 + exp(2x)), exact to 2^-23 of 1."""
    return 1.0 - 2.0 / (1.0 + jnp.exp2(x * (2 * math.log2(math.e))))
