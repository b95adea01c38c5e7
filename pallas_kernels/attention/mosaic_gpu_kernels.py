"""The kernels of `mosaic_gpu`: what they share, the forward, and the two of the backward."""

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
from liger_jax.pallas_kernels._tiles import cdiv, out_like, round_up
from liger_jax.pallas_kernels.attention import config
from liger_jax.pallas_kernels.attention.intervals import COLUMNS, Intervals, table, whole_blocks

_LOG2_E = math.log2(math.e)
_NOTHING = -1e30  # a maximum of no scores; finite, so that what is masked has the weight exp2(−inf) = 0, and no NaN
_NUM_CONSUMERS = 2
_WARPGROUP_ROWS = 64
ROWS = _WARPGROUP_ROWS * _NUM_CONSUMERS  # of a tile of queries; log-sum-exps are padded to it


@dataclasses.dataclass(frozen=True)
class Scores:
    """How a product of a query and a key becomes an exponent of 2: factor · capped(q·k)."""

    softcap: float | None
    scale: float

    @property
    def factor(self) -> float:
        return _LOG2_E * (self.scale if self.softcap is None else self.softcap)

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
        return cls(*[table_ref[entry * COLUMNS + i] for i in range(COLUMNS)], head)

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
        return self.entries * self.heads

    @property
    def num_blocks(self) -> int:
        return min(_hopper.NUM_CORES, self.num_tiles)

    def _number(self, i: Any) -> Any:
        """Of the block's i-th tile."""
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
        return cls(stages, barrier(len(stages)), barrier(_NUM_CONSUMERS))

    def slot(self, i: Any) -> Any:
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
    return jax.lax.broadcast_in_dim(vector, shape, (0,))


def over_columns(vector: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.broadcast_in_dim(vector, shape, (1,))


def _filled(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _product(a: Any, b: Any, shape: tuple[int, int], meanwhile: Callable[[], None] | None = None) -> jax.Array:
    """a · bᵀ of two refs in shared memory."""

    def multiply(accumulator_ref):
        plgpu.wgmma(accumulator_ref, a, b.transpose((1, 0)))
        if meanwhile is not None:
            meanwhile()
        return accumulator_ref[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def _row_of(x: Any, batch: Any) -> Any:
    """Of an array that has a row for each of the batch, or one for all."""
    return 0 if x.shape[0] == 1 else batch


def _positions(length: int) -> Any:
    return np.arange(length, dtype=np.int32)[None]


def _vector(count: int, length: int, dtype: Any) -> Any:
    return plgpu.SMEM((count, length), dtype)


def _rows_of(ref: Any, *index: Any) -> jax.Array:
    """A vector over rows, from device memory."""
    return _hopper.load(ref, index, row_layout(), optimized=False)


def _pair(ids_refs: Sequence[Any], mask: str | None, own_ids: Sequence[jax.Array], *index: Any) -> Any:
    """Ids of rows and of columns where they have to be compared: so seldom that no ring holds them."""
    if mask != "ids":
        return None
    return own_ids[0], _hopper.load(ids_refs[0], index, column_layout(), optimized=False)


def _visible(shape: tuple[int, int], low: Any, high: Any, ids: tuple[Any, Any] | None) -> jax.Array:
    """Where low ≤ column ≤ high, of vectors over rows, and perhaps ids of row and column are equal."""
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=tile_layout())
    visible = (column >= low) & (column <= high)
    if ids is not None:
        visible = visible & (over_rows(ids[0], shape) == over_columns(ids[1], shape))
    return visible


def _own_rows(shape: tuple[int, int]) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=tile_layout())


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    found: Intervals,
    scores: Scores,
) -> tuple[jax.Array, jax.Array]:
    """q (B, T, Q, H), k and v (B, T, K, H) → (B, T, Q, H), and log2 Σ exp2 of the scores (B, Q, T in whole tiles)."""
    batch, length, query_heads, width = q.shape
    group = query_heads // k.shape[2]
    blocks = config.FORWARD[width]
    keys = blocks.columns
    shape = (_WARPGROUP_ROWS, keys)
    entries = table(found.first, _positions(length), found.is_foreign, batch, ROWS, keys)
    walk = Walk(entries.shape[0], query_heads)
    low = whole_blocks(found.first, ROWS)
    ids = [] if segment_ids is None else [whole_blocks(segment_ids, max(ROWS, keys))]
    has_ids = bool(ids)

    def body(table_ref, low_ref, *refs):
        ids_refs, refs = refs[:has_ids], refs[has_ids:]
        q_ref, k_ref, v_ref, out_ref, lse_ref, q_stage, lse_stage, arrived, k_ring, v_ring, turns = refs
        warpgroup = jax.lax.axis_index("warpgroup")

        def take_turns():
            plgpu.barrier_arrive(turns)
            plgpu.barrier_wait(turns)

        def attend_tile(tile: Tile, done):
            row = tile.rows * ROWS + warpgroup * _WARPGROUP_ROWS
            own = pl.ds(row, _WARPGROUP_ROWS)
            here = (tile.batch, own, tile.head)
            plgpu.copy_gmem_to_smem(q_ref.at[here], q_stage.at[warpgroup], arrived.at[warpgroup])
            first = _rows_of(low_ref, _row_of(low, tile.batch), own)
            own_ids = [_rows_of(ref, tile.batch, own) for ref in ids_refs]
            plgpu.barrier_wait(arrived.at[warpgroup])

            def step(n, carry, *, mask):
                accumulator, maximum, total = carry
                slot = k_ring.wait(done + n)
                s = scores.capped(_product(q_stage.at[warpgroup], k_ring.stages[0].at[slot], shape, take_turns))
                k_ring.release(done + n)
                if mask is not None:
                    key = tile.column_block(n) * keys
                    pair = _pair(ids_refs, mask, own_ids, tile.batch, pl.ds(key, keys))
                    low, high = over_rows(first - key, shape), _own_rows(shape) + (row - key)
                    s = jnp.where(_visible(shape, low, high, pair), s, -jnp.inf)
                new_maximum = jnp.maximum(maximum, jnp.max(s, axis=1) * scores.factor)
                shrink = jnp.exp2(maximum - new_maximum)
                p = jnp.exp2(s * scores.factor - over_rows(new_maximum, shape))
                accumulator *= over_rows(shrink, accumulator.shape)
                total = total * shrink + jnp.sum(p, axis=1)
                state = accumulator, new_maximum, total, p.astype(q_stage.dtype)
                accumulator, new_maximum, total, weights = jax.lax.optimization_barrier(state)
                plgpu.barrier_arrive(turns)
                slot = v_ring.wait(done + n)
                plgpu.barrier_wait(turns)
                accumulator = _hopper.add_product(accumulator, weights, v_ring.stages[0], slot)
                v_ring.release(done + n)
                return accumulator, new_maximum, total

            carry = (
                _filled((_WARPGROUP_ROWS, width), 0.0, tile_layout()),
                _filled((_WARPGROUP_ROWS,), _NOTHING, row_layout()),
                _filled((_WARPGROUP_ROWS,), 0.0, row_layout()),
            )
            accumulator, maximum, total = tile.over_columns(step, carry, has_ids)
            q_stage[warpgroup] = (accumulator * over_rows(1.0 / total, accumulator.shape)).astype(q_stage.dtype)
            lse_stage[warpgroup] = maximum + jnp.log(total) * _LOG2_E
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_stage.at[warpgroup], out_ref.at[here])
            plgpu.copy_smem_to_gmem(lse_stage.at[warpgroup], lse_ref.at[tile.batch, tile.head, own])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            return done + tile.count

        def copy_tile(tile: Tile, done):
            def copy(n, _):
                own = pl.ds(tile.column_block(n) * keys, keys)
                there = (tile.batch, own, jax.lax.div(tile.head, group))
                k_ring.fill(done + n, k_ref.at[there])
                v_ring.fill(done + n, v_ref.at[there])

            jax.lax.fori_loop(0, tile.count, copy, None)
            return done + tile.count

        @pl.when(warpgroup == _NUM_CONSUMERS)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            walk.for_each(table_ref, copy_tile)

        @pl.when(warpgroup < _NUM_CONSUMERS)
        def _():
            plgpu.set_max_registers(232, action="increase")
            pl.when(warpgroup == 1)(take_turns)
            walk.for_each(table_ref, attend_tile)
            pl.when(warpgroup == 0)(take_turns)
            plgpu.wait_smem_to_gmem(0)

    column_stage = lambda: _hopper.shared_tile((blocks.stages, keys, width), k.dtype)
    out, log_sums = _hopper.launch(
        body, entries.reshape(-1), low, *ids, q, k, v,
        num_blocks=walk.num_blocks,
        out_types=[
            out_like(q, q.shape, q.dtype),
            out_like(q, (batch, query_heads, round_up(length, ROWS)), jnp.float32),
        ],
        scratch=[
            _hopper.shared_tile((_NUM_CONSUMERS, _WARPGROUP_ROWS, width), q.dtype),
            _vector(_NUM_CONSUMERS, _WARPGROUP_ROWS, jnp.float32),
            plgpu.Barrier(num_arrivals=1, num_barriers=_NUM_CONSUMERS),
            Slots.scratch([column_stage()]),
            Slots.scratch([column_stage()]),
            plgpu.Barrier(num_arrivals=_NUM_CONSUMERS),
        ],
        name="causal_attention_forward",
    )  # fmt: skip
    return out, log_sums


def query_gradient(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    do: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    found: Intervals,
    scores: Scores,
) -> jax.Array:
    """dq like q, tile by tile of queries: dq = scale · Σ over keys of ds · k, with ds = p · (do·vᵀ − delta)."""
    batch, length, query_heads, width = q.shape
    group = query_heads // k.shape[2]
    blocks = config.QUERY_GRADIENT[width]
    keys = blocks.columns
    shape = (_WARPGROUP_ROWS, keys)
    entries = table(found.first, _positions(length), found.is_foreign, batch, ROWS, keys)
    walk = Walk(entries.shape[0], query_heads)
    low = whole_blocks(found.first, ROWS)
    ids = [] if segment_ids is None else [whole_blocks(segment_ids, max(ROWS, keys))]
    has_ids = bool(ids)

    def body(table_ref, low_ref, *refs):
        ids_refs, refs = refs[:has_ids], refs[has_ids:]
        q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, *scratch = refs
        q_stage, do_stage, arrived, k_ring, v_ring = scratch
        warpgroup = jax.lax.axis_index("warpgroup")

        def compute_tile(tile: Tile, done):
            row = tile.rows * ROWS + warpgroup * _WARPGROUP_ROWS
            own = pl.ds(row, _WARPGROUP_ROWS)
            here, of_head = (tile.batch, own, tile.head), (tile.batch, tile.head, own)
            for ref, stage in ((q_ref, q_stage), (do_ref, do_stage)):
                plgpu.copy_gmem_to_smem(ref.at[here], stage.at[warpgroup], arrived.at[warpgroup])
            own_lse, own_delta = (_rows_of(ref, *of_head) for ref in (lse_ref, delta_ref))
            first = _rows_of(low_ref, _row_of(low, tile.batch), own)
            own_ids = [_rows_of(ref, tile.batch, own) for ref in ids_refs]
            plgpu.barrier_wait(arrived.at[warpgroup])

            def step(n, dq, *, mask):
                slot = k_ring.wait(done + n)
                (k_stage,) = k_ring.stages
                capped = scores.capped(_product(q_stage.at[warpgroup], k_stage.at[slot], shape))
                p = jnp.exp2(capped * scores.factor - over_rows(own_lse, shape))
                if mask is not None:
                    key = tile.column_block(n) * keys
                    pair = _pair(ids_refs, mask, own_ids, tile.batch, pl.ds(key, keys))
                    low, high = over_rows(first - key, shape), _own_rows(shape) + (row - key)
                    p = jnp.where(_visible(shape, low, high, pair), p, 0.0)
                v_slot = v_ring.wait(done + n)
                dp = _product(do_stage.at[warpgroup], v_ring.stages[0].at[v_slot], shape)
                v_ring.release(done + n)
                ds = scores.slope(p * (dp - over_rows(own_delta, shape)), capped)
                dq = _hopper.add_product(dq, ds.astype(q_stage.dtype), k_stage, slot)
                k_ring.release(done + n)
                return dq

            dq = tile.over_columns(step, _filled((_WARPGROUP_ROWS, width), 0.0, tile_layout()), has_ids)
            q_stage[warpgroup] = (dq * scores.scale).astype(q_stage.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_stage.at[warpgroup], dq_ref.at[here])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            return done + tile.count

        def copy_tile(tile: Tile, done):
            def copy(n, _):
                own = pl.ds(tile.column_block(n) * keys, keys)
                there = (tile.batch, own, jax.lax.div(tile.head, group))
                k_ring.fill(done + n, k_ref.at[there])
                v_ring.fill(done + n, v_ref.at[there])

            jax.lax.fori_loop(0, tile.count, copy, None)
            return done + tile.count

        @pl.when(warpgroup == _NUM_CONSUMERS)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            walk.for_each(table_ref, copy_tile)

        @pl.when(warpgroup < _NUM_CONSUMERS)
        def _():
            plgpu.set_max_registers(232, action="increase")
            walk.for_each(table_ref, compute_tile)
            plgpu.wait_smem_to_gmem(0)

    own_stage = lambda: _hopper.shared_tile((_NUM_CONSUMERS, _WARPGROUP_ROWS, width), q.dtype)
    ring_stage = lambda count: _hopper.shared_tile((count, keys, width), k.dtype)
    (dq,) = _hopper.launch(
        body, entries.reshape(-1), low, *ids, q, k, v, do, lse, delta,
        num_blocks=walk.num_blocks,
        out_types=[out_like(q, q.shape, q.dtype)],
        scratch=[
            own_stage(),
            own_stage(),
            plgpu.Barrier(num_arrivals=2, num_barriers=_NUM_CONSUMERS),
            Slots.scratch([ring_stage(blocks.stages)]),
            Slots.scratch([ring_stage(blocks.second_stages or blocks.stages)]),
        ],
        name="causal_attention_query_gradient",
    )  # fmt: skip
    return dq


def key_gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    do: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    found: Intervals,
    scores: Scores,
) -> tuple[jax.Array, jax.Array]:
    """dk and dv like k, tile by tile of keys, summed over the group's query heads in registers."""
    batch, length, query_heads, width = q.shape
    kv_heads = k.shape[2]
    group = query_heads // kv_heads
    blocks = config.KEY_GRADIENTS[width]
    queries = blocks.columns
    shape = (_WARPGROUP_ROWS, queries)
    # Where a warpgroup's registers do not hold both gradients of 64 keys, one makes dv of them and the other dk.
    is_split = width > 128
    rows = _WARPGROUP_ROWS if is_split else ROWS
    entries = table(_positions(length), found.last, found.is_foreign, batch, rows, queries)
    walk = Walk(entries.shape[0], kv_heads)
    high = whole_blocks(found.last, ROWS)
    ids = [] if segment_ids is None else [whole_blocks(segment_ids, max(ROWS, queries))]
    has_ids = bool(ids)

    def body(table_ref, high_ref, *refs):
        ids_refs, refs = refs[:has_ids], refs[has_ids:]
        q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_ref, dv_ref, *scratch = refs
        k_stages, v_stages, k_arrived, v_arrived, q_ring, do_ring = scratch
        warpgroup = jax.lax.axis_index("warpgroup")

        def compute_tile(tile: Tile, done, *, of_keys: bool, of_values: bool):
            row = tile.rows * rows + (0 if is_split else warpgroup * _WARPGROUP_ROWS)
            own = pl.ds(row, _WARPGROUP_ROWS)
            here = (tile.batch, own, tile.head)
            k_stage, v_stage = k_stages.at[warpgroup], v_stages.at[0 if is_split else warpgroup]
            plgpu.copy_gmem_to_smem(k_ref.at[here], k_stage, k_arrived.at[warpgroup])
            if of_keys:
                plgpu.copy_gmem_to_smem(v_ref.at[here], v_stage, v_arrived.at[warpgroup])
            last = _rows_of(high_ref, _row_of(high, tile.batch), own)
            own_ids = [_rows_of(ref, tile.batch, own) for ref in ids_refs]
            plgpu.barrier_wait(k_arrived.at[warpgroup])
            if of_keys:
                plgpu.barrier_wait(v_arrived.at[warpgroup])

            def of_head(g, carry):
                begun = done + g * tile.count

                def step(n, carry, *, mask):
                    dk, dv = carry
                    slot = q_ring.wait(begun + n)
                    q_stage, lse_stage = q_ring.stages
                    capped = scores.capped(_product(k_stage, q_stage.at[slot], shape))
                    lse = _hopper.load(lse_stage, (slot,), column_layout())
                    p = jnp.exp2(capped * scores.factor - over_columns(lse, shape))
                    if mask is not None:
                        query = tile.column_block(n) * queries
                        pair = _pair(ids_refs, mask, own_ids, tile.batch, pl.ds(query, queries))
                        low, high = _own_rows(shape) + (row - query), over_rows(last - query, shape)
                        p = jnp.where(_visible(shape, low, high, pair), p, 0.0)
                    do_slot = do_ring.wait(begun + n)
                    do_stage, delta_stage = do_ring.stages
                    ds = None
                    if of_keys:
                        dp = _product(v_stage, do_stage.at[do_slot], shape)
                        delta = _hopper.load(delta_stage, (do_slot,), column_layout())
                        ds = scores.slope(p * (dp - over_columns(delta, shape)), capped).astype(q_stage.dtype)
                    if of_values:
                        dv = _hopper.add_product(dv, p.astype(do_stage.dtype), do_stage, do_slot)
                    do_ring.release(begun + n, was_loaded=True)
                    if ds is not None:
                        dk = _hopper.add_product(dk, ds, q_stage, slot)
                    q_ring.release(begun + n, was_loaded=True)
                    return dk, dv

                return tile.over_columns(step, carry, has_ids)

            nothing = _filled((_WARPGROUP_ROWS, width), 0.0, tile_layout())
            start = nothing if of_keys else None, nothing if of_values else None
            dk, dv = jax.lax.fori_loop(0, group, of_head, start)
            if of_keys:
                v_stage[...] = (dk * scores.scale).astype(v_stage.dtype)
            if of_values:
                k_stage[...] = dv.astype(k_stage.dtype)
            plgpu.commit_smem()
            if of_keys:
                plgpu.copy_smem_to_gmem(v_stage, dk_ref.at[here])
            if of_values:
                plgpu.copy_smem_to_gmem(k_stage, dv_ref.at[here])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            return done + group * tile.count

        def copy_tile(tile: Tile, done):
            def copy(i, _):
                head = tile.head * group + jax.lax.div(i, tile.count)
                own = pl.ds(tile.column_block(jax.lax.rem(i, tile.count)) * queries, queries)
                there, of_head = (tile.batch, own, head), (tile.batch, head, own)
                q_ring.fill(done + i, q_ref.at[there], lse_ref.at[of_head])
                do_ring.fill(done + i, do_ref.at[there], delta_ref.at[of_head])

            jax.lax.fori_loop(0, group * tile.count, copy, None)
            return done + group * tile.count

        @pl.when(warpgroup == _NUM_CONSUMERS)
        def _():
            plgpu.set_max_registers(40, action="decrease")
            walk.for_each(table_ref, copy_tile)

        def compute(**parts):
            plgpu.set_max_registers(232, action="increase")
            walk.for_each(table_ref, functools.partial(compute_tile, **parts))
            plgpu.wait_smem_to_gmem(0)

        if is_split:
            pl.when(warpgroup == 0)(lambda: compute(of_keys=False, of_values=True))
            pl.when(warpgroup == 1)(lambda: compute(of_keys=True, of_values=False))
        else:
            pl.when(warpgroup < _NUM_CONSUMERS)(lambda: compute(of_keys=True, of_values=True))

    own_stage = lambda count: _hopper.shared_tile((count, _WARPGROUP_ROWS, width), k.dtype)
    stages = blocks.stages
    ring_stage = lambda: _hopper.shared_tile((stages, queries, width), q.dtype)
    dk, dv = _hopper.launch(
        body, entries.reshape(-1), high, *ids, q, k, v, do, lse, delta,
        num_blocks=walk.num_blocks,
        out_types=[out_like(k, k.shape, k.dtype), out_like(v, v.shape, v.dtype)],
        scratch=[
            own_stage(_NUM_CONSUMERS),
            own_stage(1 if is_split else _NUM_CONSUMERS),
            plgpu.Barrier(num_barriers=_NUM_CONSUMERS),
            plgpu.Barrier(num_barriers=_NUM_CONSUMERS),
            Slots.scratch([ring_stage(), _vector(stages, queries, jnp.float32)]),
            Slots.scratch([ring_stage(), _vector(stages, queries, jnp.float32)]),
        ],
        name="causal_attention_key_gradients",
    )  # fmt: skip
    return dk, dv
