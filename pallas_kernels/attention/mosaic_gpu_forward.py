"""Hopper's attention forward: tile by tile of queries, two warpgroups in turn at the softmax and the products."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _mosaic_gpu as plgpu
from liger_jax.pallas_kernels import hopper
from liger_jax.pallas_kernels.attention import config
from liger_jax.pallas_kernels.attention.formulas import LOG2_E, NO_SCORE, Scores
from liger_jax.pallas_kernels.attention.intervals import Intervals, Tile
from liger_jax.pallas_kernels.attention.mosaic_gpu_mainloop import (
    NUM_CONSUMERS,
    ROWS,
    WARPGROUP_ROWS,
    StageRing,
    TileScheduler,
    consume,
    copies_of_keys,
    filled,
    over_rows,
    produce,
    product,
    vector,
)
from liger_jax.pallas_kernels.hopper import row_layout, tile_layout
from liger_jax.pallas_kernels.tiles import out_like, round_up


def forward(q: jax.Array, k: jax.Array, v: jax.Array, bounds: Intervals, scores: Scores) -> tuple[jax.Array, jax.Array]:
    """q (B, Tq, Q, H), k and v (B, Tk, K, H) → (B, Tq, Q, H), and log2 Σ exp2 of the scores (B, Q, Tq in whole tiles).

    A query that sees no key gets zeros, and the log-sum-exp `NO_SCORE`.
    """
    batch, length, query_heads, width = q.shape
    blocks = config.FORWARD[width]
    scheduler = TileScheduler.over(
        bounds.of_queries, batch, query_heads, rows=ROWS, columns=blocks.columns, one_each=width > 128
    )  # fmt: skip

    def body(*refs):
        _compute(scheduler, scores, query_heads // k.shape[2], *scheduler.split(refs))

    ring_stage = lambda: hopper.shared_tile((blocks.stages, blocks.columns, width), k.dtype)
    out, log_sums = hopper.launch(
        body, *scheduler.operands, q, k, v,
        num_blocks=scheduler.num_blocks,
        out_types=[
            out_like(q, q.shape, q.dtype),
            out_like(q, (batch, query_heads, round_up(length, ROWS)), jnp.float32),
        ],
        scratch=[
            hopper.shared_tile((NUM_CONSUMERS, WARPGROUP_ROWS, width), q.dtype),
            vector(NUM_CONSUMERS, WARPGROUP_ROWS, jnp.float32),
            plgpu.Barrier(num_arrivals=1, num_barriers=NUM_CONSUMERS),
            StageRing.scratch(ring_stage()),
            StageRing.scratch(ring_stage()),
            plgpu.Barrier(num_arrivals=NUM_CONSUMERS),
        ],
        name="causal_attention_forward",
    )  # fmt: skip
    return hopper.kept((out, log_sums))


def _compute(scheduler: TileScheduler, scores: Scores, group: int, scheduler_refs, refs) -> None:
    """The kernel's body."""
    q_ref, k_ref, v_ref, out_ref, lse_ref, q_stages, lse_stages, arrived, k_ring, v_ring, turns = refs
    warpgroup = jax.lax.axis_index("warpgroup")
    q_stage, lse_stage = q_stages.at[warpgroup], lse_stages.at[warpgroup]
    width = q_ref.shape[3]

    def take_turns():
        plgpu.barrier_arrive(turns)
        plgpu.barrier_wait(turns)

    def attend_tile(tile: Tile, done):
        own = pl.ds(tile.rows * ROWS + warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
        here = (tile.batch, own, tile.head)
        plgpu.copy_gmem_to_smem(q_ref.at[here], q_stage, arrived.at[warpgroup])
        mask = scheduler.mask(scheduler_refs, tile, own.start)
        plgpu.barrier_wait(arrived.at[warpgroup])

        def step(n, carry):
            accumulator, maximum, total = carry
            slot = k_ring.wait(done + n)
            s = scores.capped(product(q_stage, k_ring.stages[0].at[slot], take_turns))
            k_ring.release(done + n)
            s = mask.only_where_masked(s, n, -jnp.inf)
            new_maximum = jnp.maximum(maximum, jnp.max(s, axis=1) * scores.factor)
            shrink = jnp.exp2(maximum - new_maximum)
            p = jnp.exp2(s * scores.factor - over_rows(new_maximum, s.shape))
            accumulator *= over_rows(shrink, accumulator.shape)
            total = total * shrink + jnp.sum(p, axis=1)
            state = accumulator, new_maximum, total, p.astype(q_stage.dtype)
            accumulator, new_maximum, total, weights = jax.lax.optimization_barrier(state)
            plgpu.barrier_arrive(turns)
            slot = v_ring.wait(done + n)
            plgpu.barrier_wait(turns)
            accumulator = hopper.add_product(accumulator, weights, v_ring.stages[0].at[slot])
            v_ring.release(done + n)
            return accumulator, new_maximum, total

        carry = (
            filled((WARPGROUP_ROWS, width), 0.0, tile_layout()),
            filled((WARPGROUP_ROWS,), NO_SCORE, row_layout()),
            filled((WARPGROUP_ROWS,), 0.0, row_layout()),
        )
        accumulator, maximum, total = jax.lax.fori_loop(0, tile.count, step, carry)
        total = jnp.where(total > 0.0, total, 1.0)
        q_stage[...] = (accumulator * over_rows(1.0 / total, accumulator.shape)).astype(q_stage.dtype)
        lse_stage[...] = maximum + jnp.log(total) * LOG2_E
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_stage, out_ref.at[here])
        plgpu.copy_smem_to_gmem(lse_stage, lse_ref.at[tile.batch, tile.head, own])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        return done + tile.count

    def attend():
        pl.when(warpgroup == 1)(take_turns)
        scheduler.for_each(scheduler_refs, attend_tile)
        pl.when(warpgroup == 0)(take_turns)

    copy_tile = copies_of_keys(scheduler, group, k_ref, v_ref, k_ring, v_ring)
    produce(lambda: scheduler.for_each(scheduler_refs, copy_tile))
    consume(attend)
