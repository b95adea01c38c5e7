"""What Hopper's attention kernels share: tiles and the walk over them, rings of copies, products and masks."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _hopper
from liger_jax.pallas_kernels import _mosaic_gpu as plgpu
from liger_jax.pallas_kernels._hopper import column_layout, row_layout, tile_layout
from liger_jax.pallas_kernels._tiles import cdiv
from liger_jax.pallas_kernels.attention.intervals import COLUMNS

LOG2_E = math.log2(math.e)
NO_SCORE = -1e30  # a maximum of no scores; finite, so that what is masked has the weight exp2(−inf) = 0, and no NaN
NUM_CONSUMERS = 2
WARPGROUP_ROWS = 64
ROWS = WARPGROUP_ROWS * NUM_CONSUMERS  # of a tile of queries; log-sum-exps are padded to it


@dataclasses.dataclass(frozen=True)
class Scores:
    """How a product of a query and a key becomes an exponent of 2: factor · capped(q·k)."""

    softcap: float | None
    scale: float

    @property
    def factor(self) -> float:
        """What a capped product is multiplied by: base 2 and the scale, or the softcap in the scale's place."""
        return LOG2_E * (self.scale if self.softcap is None else self.softcap)

    def capped(self, products: jax.Array) -> jax.Array:
        """With a softcap in [−1, 1]."""
        return products if self.softcap is None else _hopper.tanh(products * (self.scale / self.softcap))

    def slope(self, gradient: jax.Array, capped: jax.Array) -> jax.Array:
        """The gradient by the capped score → that by the product, but for the scale."""
        return gradient if self.softcap is None else gradient * (1.0 - jnp.square(capped))


@dataclasses.dataclass(frozen=True)
class Tile:
    """What a block computes at a time: an entry of `intervals.table`, and a head."""

    batch: Any
    rows: Any
    begin: Any
    all_begin: Any
    all_count: Any
    count: Any
    is_foreign: Any
    head: Any

    @classmethod
    def read(cls, table_ref: Any, entry: Any, head: Any) -> "Tile":
        """The tile of a head at an entry of the flat table."""
        return cls(*[table_ref[entry * COLUMNS + i] for i in range(COLUMNS)], head=head)

    def column_block(self, n: Any) -> Any:
        """The n-th block of columns: first those that are masked, before and after those that all rows see."""
        masked = self.begin + n
        masked = jnp.where(masked < self.all_begin, masked, masked + self.all_count)
        num_masked = self.count - self.all_count
        return jnp.where(n < num_masked, masked, self.all_begin + n - num_masked)

    def over_columns(self, step: Callable[..., Any], carry: Any, has_ids: bool) -> Any:
        """carry = step(n, carry, mask=…) for all blocks of columns, where mask is "ids", "interval" or None."""
        num_masked = self.count - self.all_count
        begin = 0
        if has_ids:
            begin = jnp.where(self.is_foreign == 1, num_masked, 0)
            carry = jax.lax.fori_loop(0, begin, functools.partial(step, mask="ids"), carry)
        carry = jax.lax.fori_loop(begin, num_masked, functools.partial(step, mask="interval"), carry)
        return jax.lax.fori_loop(num_masked, self.count, functools.partial(step, mask=None), carry)


@dataclasses.dataclass(frozen=True)
class Walk:
    """Which tiles a block goes through: to and fro over them, the largest first, by which work evens out."""

    entries: int
    heads: int

    @property
    def num_tiles(self) -> int:
        """How many tiles all blocks go through: each entry for each head."""
        return self.entries * self.heads

    @property
    def num_blocks(self) -> int:
        """How many blocks are launched: one for each core, if there are tiles for all."""
        return min(_hopper.NUM_CORES, self.num_tiles)

    def _number(self, i: Any) -> Any:
        """The number of the block's i-th tile."""
        own = jax.lax.axis_index("block")
        return i * self.num_blocks + jnp.where(jax.lax.rem(i, 2) == 0, own, self.num_blocks - 1 - own)

    def for_each(self, table_ref: Any, body: Callable[[Tile, Any], Any]) -> None:
        """done = body(tile, done) for all tiles of this block, where `done` counts what went through the ring."""

        def step(i, done):
            number = self._number(i)
            tile = Tile.read(table_ref, jax.lax.div(number, self.heads), jax.lax.rem(number, self.heads))
            return body(tile, done)

        last = jnp.int32(cdiv(self.num_tiles, self.num_blocks) - 1)
        own = last + (self._number(last) < self.num_tiles).astype(jnp.int32)
        jax.lax.fori_loop(0, own, step, jnp.int32(0))


class Slots(NamedTuple):
    """A ring of places in shared memory for what arrives together, and the barriers of who fills and empties it."""

    stages: Sequence[Any]
    filled: Any
    emptied: Any

    @classmethod
    def scratch(cls, stages: Sequence[Any]) -> "Slots":
        """Each of `stages` has a leading axis, of as many as the ring has places."""
        count = stages[0].shape[0]
        barrier = lambda arrivals: plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)
        return cls(stages, barrier(len(stages)), barrier(NUM_CONSUMERS))

    def slot(self, i: Any) -> Any:
        """The place of the i-th copy."""
        return jax.lax.rem(i, self.stages[0].shape[0])

    def fill(self, i: Any, *sources: Any) -> None:
        """Copies the i-th to come, once its place is free."""
        slot = self.slot(i)
        pl.when(i >= self.stages[0].shape[0])(lambda: plgpu.barrier_wait(self.emptied.at[slot]))
        for source, stage in zip(sources, self.stages, strict=True):
            plgpu.copy_gmem_to_smem(source, stage.at[slot], self.filled.at[slot])

    def wait(self, i: Any) -> Any:
        """The place of the i-th, once it is there."""
        slot = self.slot(i)
        plgpu.barrier_wait(self.filled.at[slot])
        return slot

    def release(self, i: Any, was_loaded: bool = False) -> None:
        """Frees the place of the i-th; `was_loaded` to registers, before which the next copy must not come."""
        if was_loaded or _hopper.is_interpreted():  # where a product's operand may have been loaded, too
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


def product(a: Any, b: Any, shape: tuple[int, int], meanwhile: Callable[[], None] | None = None) -> jax.Array:
    """a · bᵀ of two refs in shared memory."""

    def multiply(accumulator_ref):
        plgpu.wgmma(accumulator_ref, a, b.transpose((1, 0)))
        if meanwhile is not None:
            meanwhile()
        return accumulator_ref[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def row_of(x: Any, batch: Any) -> Any:
    """Which row of x belongs to this member of the batch: its own, or the one that all share."""
    return 0 if x.shape[0] == 1 else batch


def positions(length: int) -> Any:
    """0 to length − 1 as (1, T): the bound that causality alone gives."""
    return np.arange(length, dtype=np.int32)[None]


def vector(count: int, length: int, dtype: Any) -> Any:
    """Shared memory for `count` vectors."""
    return plgpu.SMEM((count, length), dtype)


def rows_of(ref: Any, *index: Any) -> jax.Array:
    """A vector over rows, from device memory."""
    return _hopper.load(ref, index, row_layout(), optimized=False)


def pair_of_ids(ids_refs: Sequence[Any], mask: str | None, own_ids: Sequence[jax.Array], *index: Any) -> Any:
    """Ids of rows and of columns where they have to be compared: so seldom that no ring holds them."""
    if mask != "ids":
        return None
    return own_ids[0], _hopper.load(ids_refs[0], index, column_layout(), optimized=False)


def visible(shape: tuple[int, int], low: Any, high: Any, ids: tuple[Any, Any] | None) -> jax.Array:
    """Where low ≤ column ≤ high, of vectors over rows, and perhaps ids of row and column are equal."""
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=tile_layout())
    inside = (column >= low) & (column <= high)
    if ids is not None:
        inside = inside & (over_rows(ids[0], shape) == over_columns(ids[1], shape))
    return inside


def own_rows(shape: tuple[int, int]) -> jax.Array:
    """The number of each row, in all columns of a tile."""
    return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=tile_layout())


def copies_of_keys(
    k_ref: Any, v_ref: Any, k_ring: Slots, v_ring: Slots, keys: int, group: int
) -> Callable[[Tile, Any], Any]:
    """copy_tile(tile, done) for `Walk.for_each`: fills the rings with all blocks of keys and values of a tile."""

    def copy_tile(tile: Tile, done):
        def copy(n, _):
            own = pl.ds(tile.column_block(n) * keys, keys)
            there = (tile.batch, own, jax.lax.div(tile.head, group))
            k_ring.fill(done + n, k_ref.at[there])
            v_ring.fill(done + n, v_ref.at[there])

        jax.lax.fori_loop(0, tile.count, copy, None)
        return done + tile.count

    return copy_tile


def produce(warpgroup: Any, walk: Walk, table_ref: Any, copy_tile: Callable[[Tile, Any], Any]) -> None:
    """What the last warpgroup does: it copies, and leaves its registers to those that compute."""

    @pl.when(warpgroup == NUM_CONSUMERS)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        walk.for_each(table_ref, copy_tile)
