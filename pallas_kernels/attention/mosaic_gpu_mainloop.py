"""What Hopper's attention kernels share: the tile scheduler, masks, rings of pipeline stages, and products."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _mosaic_gpu as plgpu
from liger_jax.pallas_kernels import hopper
from liger_jax.pallas_kernels.attention.intervals import Bounds, Tile, table, whole_blocks
from liger_jax.pallas_kernels.hopper import column_layout, row_layout, tile_layout
from liger_jax.pallas_kernels.tiles import cdiv, split

NUM_CONSUMERS = 2
WARPGROUP_ROWS = 64
ROWS = WARPGROUP_ROWS * NUM_CONSUMERS  # rows of a tile; log-sum-exps are padded to a multiple of it
# Registers of a thread. A core has 65,536 for two warpgroups that compute and one that copies.
_COPY_REGISTERS, _COMPUTE_REGISTERS = 24, 240


@dataclasses.dataclass(frozen=True)
class TileScheduler:
    """Which block computes which tiles of a kernel, each some rows of a head and the columns that they see.

    By default each core runs one block. It takes tiles by turns, the largest first, and copies the next tile's columns
    while it computes. With `one_each` every tile has its own block, which the hardware starts on the next free
    core. That evens out few tiles of different sizes, and it saves the registers of the loop.
    """

    bounds: Bounds
    entries: Any
    heads: int
    rows: int
    columns: int
    one_each: bool

    @classmethod
    def over(
        cls, bounds: Bounds, batch: int, heads: int, *, rows: int, columns: int, one_each: bool
    ) -> "TileScheduler":
        """The scheduler of all tiles of all heads."""
        return cls(bounds, table(*bounds[:3], batch, rows, columns), heads, rows, columns, one_each)

    @property
    def num_tiles(self) -> int:
        """How many tiles there are: one for each entry and head."""
        return self.entries.shape[0] * self.heads

    @property
    def num_blocks(self) -> int:
        """How many blocks are launched."""
        most = min(hopper.NUM_CORES, hopper.cores_here())
        return self.num_tiles if self.one_each else min(self.num_tiles, most)

    @property
    def operands(self) -> list[Any]:
        """The kernel's first operands: the table, the bounds, and the ids of rows and columns if there are segments."""
        bounds = self.bounds
        operands = [self.entries.reshape(-1), *(whole_blocks(x, ROWS) for x in bounds[:2])]
        if bounds.row_ids is not None:
            operands += [whole_blocks(bounds.row_ids, ROWS), whole_blocks(bounds.column_ids, self.columns)]
        return operands

    def split(self, refs: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Splits a kernel's refs into the refs of `operands` and the others."""
        own, others = split(refs, [3 if self.bounds.row_ids is None else 5])
        return own, others

    def _number(self, i: Any) -> Any:
        """The number of the block's i-th tile."""
        own = jax.lax.axis_index("block")
        return i * self.num_blocks + jnp.where(jax.lax.rem(i, 2) == 0, own, self.num_blocks - 1 - own)

    def tile(self, refs: Sequence[Any], number: Any) -> Tile:
        """The tile of a number, which with `one_each` is its block's number."""
        return Tile.read(refs[0], jax.lax.div(number, self.heads), jax.lax.rem(number, self.heads))

    def for_each(self, refs: Sequence[Any], body: Callable[[Tile, Any], Any]) -> None:
        """Calls done = body(tile, done) for all tiles of this block; `done` counts the copies that used the ring."""

        def step(i, done):
            return body(self.tile(refs, self._number(i)), done)

        if self.one_each:
            step(jnp.int32(0), jnp.int32(0))
            return
        last = jnp.int32(cdiv(self.num_tiles, self.num_blocks) - 1)
        own = last + (self._number(last) < self.num_tiles).astype(jnp.int32)
        jax.lax.fori_loop(0, own, step, jnp.int32(0))

    def mask(self, refs: Sequence[Any], tile: Tile, row: Any) -> "Mask":
        """The columns that the 64 rows from `row` on see."""
        _, low_ref, high_ref, *ids_refs = refs
        own = pl.ds(row, WARPGROUP_ROWS)
        load = lambda ref, batch: rows_of(ref, batch, own)
        low, high = (load(ref, 0 if ref.shape[0] == 1 else tile.batch) for ref in (low_ref, high_ref))
        ids = load(ids_refs[0], tile.batch) if ids_refs else None
        return Mask(tile, self.columns, low, high, ids, ids_refs[1] if ids_refs else None)


@dataclasses.dataclass(frozen=True)
class Mask:
    """The mask of a tile for a warpgroup's 64 rows: the columns that they see.

    Ids are read from device memory, because they are seldom compared: no ring has places for them.
    """

    tile: Tile
    columns: int
    low: jax.Array
    high: jax.Array
    ids: jax.Array | None
    column_ids_ref: Any

    def only(self, x: jax.Array, n: Any, unseen: float) -> jax.Array:
        """The values x of the tile's n-th block of columns, with `unseen` where a row does not see a column."""
        return self.only_in_block(x, self.tile.column_block(n), unseen)

    def only_in_block(self, x: jax.Array, block: Any, unseen: float) -> jax.Array:
        """`only`, for a block of columns by its number among all."""
        begin = block * self.columns
        column = plgpu.broadcasted_iota(jnp.int32, x.shape, 1, layout=tile_layout())
        low, high = (over_rows(bound - begin, x.shape) for bound in (self.low, self.high))
        x = jnp.where((column >= low) & (column <= high), x, unseen)
        if self.ids is None:
            return x

        def of_own_id(x):
            index = self.tile.batch, pl.ds(begin, self.columns)
            ids = hopper.load(self.column_ids_ref, index, column_layout(), optimized=False)
            return jnp.where(over_rows(self.ids, x.shape) == over_columns(ids, x.shape), x, unseen)

        return jax.lax.cond(self.tile.is_foreign == 1, of_own_id, lambda x: x, x)

    def only_where_masked(self, x: jax.Array, n: Any, unseen: float) -> jax.Array:
        """`only` in a branch: for loops over masked blocks and over others."""
        return jax.lax.cond(n < self.tile.num_masked, lambda x: self.only(x, n, unseen), lambda x: x, x)


class StageRing(NamedTuple):
    """A ring of pipeline stages in shared memory, with their barriers. A stage has room for the arrays of one copy."""

    stages: Sequence[Any]
    filled: Any
    emptied: Any

    @classmethod
    def scratch(cls, *stages: Any, consumers: int = NUM_CONSUMERS) -> "StageRing":
        """The scratch memory of a ring. Axis 0 of `stages` numbers its places, and `consumers` warpgroups read each."""
        count = stages[0].shape[0]
        barrier = lambda arrivals: plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)
        return cls(stages, barrier(len(stages)), barrier(consumers))

    def slot(self, i: Any) -> Any:
        """The place of the i-th copy."""
        return jax.lax.rem(i, self.stages[0].shape[0])

    def fill(self, i: Any, *sources: Any) -> None:
        """Starts the i-th copy, once its place is free."""
        slot = self.slot(i)
        pl.when(i >= self.stages[0].shape[0])(lambda: plgpu.barrier_wait(self.emptied.at[slot]))
        for source, stage in zip(sources, self.stages, strict=True):
            plgpu.copy_gmem_to_smem(source, stage.at[slot], self.filled.at[slot])

    def wait(self, i: Any) -> Any:
        """Waits for the i-th copy; returns its place."""
        slot = self.slot(i)
        plgpu.barrier_wait(self.filled.at[slot])
        return slot

    def release(self, i: Any, was_loaded: bool = False) -> None:
        """Frees the place of the i-th copy. If it `was_loaded` to registers, the next copy waits until that is done."""
        if was_loaded or hopper.is_interpreted():  # the interpreter loads operands of products, too
            plgpu.commit_smem()
        plgpu.barrier_arrive(self.emptied.at[self.slot(i)])


def over_rows(vector: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A number for each row → a tile in which all columns have it."""
    return jax.lax.broadcast_in_dim(vector, shape, (0,))


def over_columns(vector: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A number for each column → a tile in which all rows have it."""
    return jax.lax.broadcast_in_dim(vector, shape, (1,))


def filled(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
    """A float32 tile or vector of one value, in registers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def product(a: Any, b: Any, meanwhile: Callable[[], None] | None = None) -> jax.Array:
    """a · bᵀ of two refs in shared memory."""

    def multiply(accumulator_ref):
        plgpu.wgmma(accumulator_ref, a, b.transpose((1, 0)))
        if meanwhile is not None:
            meanwhile()
        return accumulator_ref[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[0]), jnp.float32))


def vector(count: int, length: int, dtype: Any) -> Any:
    """Shared memory for `count` vectors."""
    return plgpu.SMEM((count, length), dtype)


def rows_of(ref: Any, *index: Any) -> jax.Array:
    """A vector over rows, from device memory."""
    return hopper.load(ref, index, row_layout(), optimized=False)


def copies_of_keys(
    scheduler: TileScheduler, group: int, k_ref: Any, v_ref: Any, k_ring: StageRing, v_ring: StageRing
) -> Callable[[Tile, Any], Any]:
    """copy_tile(tile, done) for `TileScheduler.for_each`: fills the rings with a tile's keys and values."""

    def copy_tile(tile: Tile, done):
        def copy(n, _):
            own = pl.ds(tile.column_block(n) * scheduler.columns, scheduler.columns)
            there = (tile.batch, own, jax.lax.div(tile.head, group))
            k_ring.fill(done + n, k_ref.at[there])
            v_ring.fill(done + n, v_ref.at[there])

        jax.lax.fori_loop(0, tile.count, copy, None)
        return done + tile.count

    return copy_tile


def produce(copy_all: Callable[[], None]) -> None:
    """The last warpgroup copies. It gives registers to the warpgroups that compute."""

    @pl.when(jax.lax.axis_index("warpgroup") == NUM_CONSUMERS)
    def _():
        plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")
        copy_all()


def consume(compute_all: Callable[[], None], warpgroup: int | None = None) -> None:
    """The other warpgroups, or the one that is given, compute. They wait until all results are written."""
    own = jax.lax.axis_index("warpgroup")

    @pl.when(own < NUM_CONSUMERS if warpgroup is None else own == warpgroup)
    def _():
        plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
        compute_all()
        plgpu.wait_smem_to_gmem(0)
