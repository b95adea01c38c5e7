"""Hopper's dq, dk and dv in one pass over tiles of keys: five products, and dq is accumulated in a fixed order.

Two warpgroups have 64 keys each and compute scores, their gradients, dk and dv. Both write their half of ds to shared
memory, and each computes half of a block of dq from all 128 keys. In the third warpgroup, one warp copies queries into
rings, and another adds the blocks of dq to their sums in device memory. Each block of queries has a semaphore that
counts the tiles that have been added, and a tile waits for its turn: its rank among these tiles in the scheduler's
order. So every run gives the same bits.
A tile waits for earlier tiles only. Each tile has a separate block, and GPUs start blocks in order, so the first
unfinished tile waits for nothing, and no concurrent kernel can make it wait forever.
Memory: queries and do are read once for each tile of keys that they see, as in the two kernels; dq's sums are written
or added to as often, with 4 bytes per element. They pass through the L2 cache. Sums that do not stay there cost more
than the two products that are saved, so `config.ONE_PASS` lists the shapes for which this kernel runs.
Rounding: as in the two kernels, but dq is a sum, over tiles of 128 keys, of float32 sums.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _mosaic_gpu as plgpu
from liger_jax.pallas_kernels import hopper
from liger_jax.pallas_kernels.attention import config
from liger_jax.pallas_kernels.attention.formulas import Scores
from liger_jax.pallas_kernels.attention.intervals import Intervals, Tile
from liger_jax.pallas_kernels.attention.mosaic_gpu_mainloop import (
    NUM_CONSUMERS,
    ROWS,
    WARPGROUP_ROWS,
    Mask,
    StageRing,
    TileScheduler,
    consume,
    filled,
    over_columns,
    produce,
    product,
)
from liger_jax.pallas_kernels.hopper import column_layout, row_layout, tile_layout
from liger_jax.pallas_kernels.tiles import cdiv, out_like, split

TILES_AT_ONCE = 8  # of a head, at least: they add to the same blocks of dq, which then stay in the L2 cache


def gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    do: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    bounds: Intervals,
    scores: Scores,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq in the shape of q, dk and dv in the shape of k. `bounds` has no segments."""
    batch, q_length, query_heads, width = q.shape
    kv_heads = k.shape[2]
    columns = config.GRADIENTS[width].columns
    scheduler = TileScheduler.over(bounds.of_keys, batch, kv_heads, rows=ROWS, columns=columns, one_each=True)
    scheduler = dataclasses.replace(scheduler, entries=_few_rows_at_a_time(scheduler.entries, kv_heads))
    num_blocks = cdiv(q_length, columns)
    ranks, is_seen = map(jnp.asarray, _ranks(scheduler.entries, batch, num_blocks))
    # Without a barrier XLA would fuse delta, a sum, into the concatenation, which takes six times as long.
    numbers = jnp.stack([lse, jax.lax.optimization_barrier(delta)], axis=2)

    def body(*refs):
        turns = None
        if not hopper.is_interpreted():  # it runs one block after the other, and has no semaphores
            turns = pl.get_global(plgpu.SemaphoreType.REGULAR((batch * query_heads * num_blocks,)))
        scheduler_refs, (ranks_ref, *others) = scheduler.split(refs)
        arrays, memory = split(others, [len(_Arrays._fields)])
        group = query_heads // kv_heads
        _Kernel(
            scheduler, scores, group, num_blocks, scheduler_refs, ranks_ref, turns, _Arrays(*arrays), _Memory(*memory)
        ).run()

    sums, dk, dv = hopper.launch(
        body, *scheduler.operands, ranks.reshape(-1), q, k, v, do, numbers,
        num_blocks=scheduler.num_blocks,
        out_types=[
            out_like(q, (batch, num_blocks * columns, query_heads, width), jnp.float32),
            out_like(k, k.shape, k.dtype),
            out_like(v, v.shape, v.dtype),
        ],
        scratch=_Memory.scratch(width, q.dtype),
        has_semaphores=True,
        name="causal_attention_gradients",
    )  # fmt: skip
    is_seen = jnp.repeat(is_seen, columns, axis=1)[:, :, None, None]
    dq = jnp.where(is_seen, sums * scores.scale, 0.0).astype(q.dtype)
    return dq[:, :q_length], dk, dv


def _few_rows_at_a_time(entries: Any, kv_heads: int) -> Any:
    """The entries, ordered such that concurrent tiles belong to few rows of the batch."""
    rows_at_once = max(1, hopper.cores_here() // (TILES_AT_ONCE * kv_heads))
    xp: Any = np if isinstance(entries, np.ndarray) else jnp
    return entries[xp.argsort(entries[:, 0] // rows_at_once, stable=True)]


def _ranks(entries: Any, batch: int, num_blocks: int) -> tuple[Any, Any]:
    """How many earlier entries of a row see a block of queries, (entries, blocks); whether any does, (B, blocks)."""
    xp: Any = np if isinstance(entries, np.ndarray) else jnp
    order = xp.argsort(entries[:, 0], stable=True)
    own = entries[order]
    begin, end = own[:, 2:3], own[:, 2:3] + own[:, 5:6]
    block = xp.arange(num_blocks, dtype=xp.int32)[None]
    sees = ((block >= begin) & (block < end)).astype(xp.int32).reshape(batch, -1, num_blocks)
    total = xp.cumsum(sees, axis=1, dtype=xp.int32)
    ranks = (total - sees).reshape(-1, num_blocks)[xp.argsort(order)]
    return ranks, total[:, -1] > 0


class _Arrays(NamedTuple):
    """References to arrays in device memory; `numbers` (B, Q, 2, Tq) are lse and delta."""

    q: Any
    k: Any
    v: Any
    do: Any
    numbers: Any
    dq: Any
    dk: Any
    dv: Any


class _Memory(NamedTuple):
    """Shared memory: a tile's keys, values and bounds, rings of queries, and values that warpgroups exchange."""

    k: Any
    v: Any
    bounds: Any
    arrived: Any
    queries: Any
    do: Any
    ds: Any
    met: Any
    dq: Any
    dq_filled: Any
    dq_emptied: Any

    @classmethod
    def scratch(cls, width: int, dtype: Any) -> "_Memory":
        """What to allocate for heads of a width."""
        columns, stages = config.GRADIENTS[width].columns, config.GRADIENTS[width].stages
        tile = lambda *shape, dtype=dtype: hopper.shared_tile(shape, dtype)
        # A warpgroup's half of dq has 64 of 128 queries, or half of the width of 64.
        half = (WARPGROUP_ROWS, width if columns == ROWS else width // 2)
        return cls(
            k=tile(1, ROWS, width),
            v=tile(1, ROWS, width),
            bounds=plgpu.SMEM((NUM_CONSUMERS, 2, WARPGROUP_ROWS), jnp.int32),
            arrived=plgpu.Barrier(num_arrivals=4, num_barriers=NUM_CONSUMERS),
            queries=StageRing.scratch(tile(stages, columns, width), plgpu.SMEM((stages, 2, columns), jnp.float32)),
            do=StageRing.scratch(tile(stages, columns, width)),
            ds=tile(2, ROWS, columns),
            met=plgpu.Barrier(num_arrivals=NUM_CONSUMERS),
            dq=tile(NUM_CONSUMERS, *half, dtype=jnp.float32),
            dq_filled=plgpu.Barrier(num_arrivals=NUM_CONSUMERS),
            dq_emptied=plgpu.Barrier(),
        )


class _Kernel(NamedTuple):
    """The kernel's body. A tile has a step for each block of queries that it sees and each head of the group."""

    scheduler: TileScheduler
    scores: Scores
    group: int
    num_blocks: int
    scheduler_refs: Any
    ranks_ref: Any
    turns: Any
    arrays: _Arrays
    memory: _Memory

    def run(self) -> None:
        """Computes, copies and stores the tile of this block of the grid."""
        number = jax.lax.axis_index("block")
        tile = lambda: self.scheduler.tile(self.scheduler_refs, number)
        for own in range(NUM_CONSUMERS):
            consume(lambda own=own: self.compute(tile(), own), own)

        @produce
        def _():
            # A fourth warpgroup would leave too few registers for each thread.
            @plgpu.warp_map
            def _(warp):
                pl.when(warp == 0)(lambda: self.copy(tile()))
                pl.when(warp == 1)(lambda: self.store(tile()))

    def num_steps(self, tile: Tile) -> Any:
        """How many steps a tile has."""
        return self.group * tile.count

    def place(self, tile: Tile, n: Any) -> tuple[Any, Any]:
        """The head and the block of queries of a tile's n-th step: from the last block on, all heads of each."""
        head, block = jax.lax.rem(n, self.group), jax.lax.div(n, self.group)
        return tile.head * self.group + head, tile.begin + tile.count - 1 - block

    def compute(self, tile: Tile, own: int) -> None:
        """dk and dv of a warpgroup's 64 keys, and its halves of the tile's blocks of dq."""
        arrays, memory = self.arrays, self.memory
        rows = slice(own * WARPGROUP_ROWS, (own + 1) * WARPGROUP_ROWS)
        there = pl.ds(tile.rows * ROWS + own * WARPGROUP_ROWS, WARPGROUP_ROWS)
        of_head = (tile.batch, there, tile.head)
        k_own, v_own, arrived = memory.k.at[0, rows], memory.v.at[0, rows], memory.arrived.at[own]
        plgpu.copy_gmem_to_smem(arrays.k.at[of_head], k_own, arrived)
        plgpu.copy_gmem_to_smem(arrays.v.at[of_head], v_own, arrived)
        for number, ref in enumerate(self.scheduler_refs[1:3]):
            batch = 0 if ref.shape[0] == 1 else tile.batch
            plgpu.copy_gmem_to_smem(ref.at[batch, there], memory.bounds.at[own, number], arrived)
        plgpu.barrier_wait(arrived)

        steps = self.num_steps(tile)
        nothing = filled(k_own.shape, 0.0, tile_layout())
        dk, dv = jax.lax.fori_loop(0, steps, functools.partial(self.step, tile, own), (nothing, nothing))
        pl.when(steps > 0)(lambda: self.multiply_keys(own, steps - 1))
        # The other warpgroup may still multiply by these keys.
        plgpu.barrier_arrive(memory.met)
        plgpu.barrier_wait(memory.met)
        for x, stage, ref in ((dk * self.scores.scale, v_own, arrays.dk), (dv, k_own, arrays.dv)):
            stage[...] = x.astype(stage.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(stage, ref.at[of_head])

    def step(self, tile: Tile, own: int, n: Any, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Adds the n-th step to dk and dv, and computes dq of the previous step, whose ds are complete by now."""
        dk, dv = sums
        memory = self.memory
        rows = slice(own * WARPGROUP_ROWS, (own + 1) * WARPGROUP_ROWS)
        slot = memory.queries.wait(n)
        q_stage, numbers = memory.queries.stages[0].at[slot], memory.queries.stages[1]
        capped = self.scores.capped(product(memory.k.at[hopper.opaque_zero(), rows], q_stage))
        lse = hopper.load(numbers, (slot, 0), column_layout())
        p = jnp.exp2(capped * self.scores.factor - over_columns(lse, capped.shape))
        block = self.place(tile, n)[1]
        is_masked = (block < tile.all_begin) | (block >= tile.all_begin + tile.all_count)
        p = jax.lax.cond(is_masked, lambda p: self.only_seen(tile, own, p, block), lambda p: p, p)
        weights, sloped = p.astype(q_stage.dtype), self.scores.slope(p, capped)
        do_stage = memory.do.stages[0].at[memory.do.wait(n)]
        dv = hopper.add_product(dv, weights, do_stage)
        pl.when(n > 0)(lambda: self.multiply_keys(own, n - 1))
        delta = hopper.load(numbers, (slot, 1), column_layout())
        v_do = do_stage.transpose((1, 0))
        dp = hopper.add_product(-over_columns(delta, p.shape), memory.v.at[hopper.opaque_zero(), rows], v_do)
        memory.do.release(n)
        ds = (sloped * dp).astype(q_stage.dtype)
        memory.ds[jax.lax.rem(n, 2), rows] = ds
        plgpu.commit_smem()
        plgpu.barrier_arrive(memory.met)
        dk = hopper.add_product(dk, ds, q_stage)
        memory.queries.release(n)
        return dk, dv

    def only_seen(self, tile: Tile, own: int, p: jax.Array, block: Any) -> jax.Array:
        """p, with 0 where a key is not seen. Bounds that were loaded once would take registers through all steps."""
        low, high = (hopper.load(self.memory.bounds, (own, number), row_layout()) for number in range(2))
        return Mask(tile, self.scheduler.columns, low, high, None, None).only_in_block(p, block, 0.0)

    def multiply_keys(self, own: int, n: Any) -> None:
        """Stores dsᵀ · k of the n-th step for `store`: half of its rows with 128 queries, else of its columns."""
        memory = self.memory
        plgpu.barrier_wait(memory.met)
        ds, k = memory.ds.at[jax.lax.rem(n, 2)], memory.k.at[hopper.opaque_zero()]
        height, width = memory.dq.shape[1:]
        if width == memory.k.shape[2]:
            ds = ds.at[:, own * height : (own + 1) * height]
        else:
            k = k.at[:, own * width : (own + 1) * width]
        dq = hopper.add_product(filled((height, width), 0.0, tile_layout()), ds.transpose((1, 0)), k)
        pl.when(n > 0)(lambda: plgpu.barrier_wait(memory.dq_emptied))
        memory.dq[own] = dq
        plgpu.commit_smem()
        plgpu.barrier_arrive(memory.dq_filled)

    def copy(self, tile: Tile) -> None:
        """Copies the queries of all steps of a tile into the rings."""
        arrays, memory = self.arrays, self.memory

        def copy_step(n, _):
            head, block = self.place(tile, n)
            own = pl.ds(block * self.scheduler.columns, self.scheduler.columns)
            there = tile.batch, own, head
            memory.queries.fill(n, arrays.q.at[there], arrays.numbers.at[tile.batch, head, :, own])
            memory.do.fill(n, arrays.do.at[there])

        jax.lax.fori_loop(0, self.num_steps(tile), copy_step, None)

    def store(self, tile: Tile) -> None:
        """Adds dq of all steps of a tile to its sums in device memory, each in its turn."""
        memory = self.memory

        def store_step(n, turn_before):
            head, block = self.place(tile, n)
            rank = self.ranks_ref[tile.entry * self.num_blocks + block]
            turn = (tile.batch * self.arrays.q.shape[2] + head) * self.num_blocks + block
            plgpu.barrier_wait(memory.dq_filled)
            self.wait_for(turn, rank)
            pl.when(rank == 0)(lambda: self.store_dq(tile.batch, head, block, is_first=True))
            pl.when(rank > 0)(lambda: self.store_dq(tile.batch, head, block, is_first=False))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(memory.dq_emptied)
            pl.when(n > 0)(lambda: self.pass_on(turn_before, pending=1))
            return turn

        steps = self.num_steps(tile)
        last = jax.lax.fori_loop(0, steps, store_step, jnp.int32(0))
        pl.when(steps > 0)(lambda: self.pass_on(last, pending=0))

    def wait_for(self, turn: Any, rank: Any) -> None:
        """Waits until as many tiles have added to a block of queries as come before this one."""
        if self.turns is not None:
            plgpu.semaphore_wait(self.turns.at[turn], rank, decrement=False, memory_scope="gpu")

    def pass_on(self, turn: Any, pending: int) -> None:
        """Signals that this tile was added to a block of queries, once all but `pending` blocks are written."""
        plgpu.wait_smem_to_gmem(pending)
        if self.turns is not None:
            plgpu.semaphore_signal(self.turns.at[turn], memory_scope="gpu")

    def store_dq(self, batch: Any, head: Any, block: Any, *, is_first: bool) -> None:
        """Starts to write a block of dq, or to add it: both halves as one group of copies."""
        stages = self.memory.dq
        height, width = stages.shape[1:]
        is_whole = width == self.memory.k.shape[2]
        for number in range(NUM_CONSUMERS):
            row, column = (number * height, 0) if is_whole else (0, number * width)
            there = (batch, pl.ds(block * self.scheduler.columns + row, height), head, pl.ds(column, width))
            stage, sums_ref = stages.at[number], self.arrays.dq.at[there]
            reduction = None if is_first else "add"
            if hopper.is_interpreted() and not is_first:  # its copies do not add
                stage[...] = stage[...] + sums_ref[...]
                plgpu.commit_smem()
                reduction = None
            plgpu.copy_smem_to_gmem(stage, sums_ref, reduction_op=reduction, commit_group=number > 0)
