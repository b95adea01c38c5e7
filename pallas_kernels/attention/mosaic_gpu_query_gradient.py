"""Hopper's dq: tile by tile of queries, from recomputed scores."""

import jax
import jax.numpy as jnp
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
    StageRing,
    TileScheduler,
    consume,
    copies_of_keys,
    filled,
    over_rows,
    produce,
    product,
    rows_of,
)
from liger_jax.pallas_kernels.hopper import tile_layout
from liger_jax.pallas_kernels.tiles import out_like


def query_gradient(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    do: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    bounds: Intervals,
    scores: Scores,
) -> jax.Array:
    """dq like q, tile by tile of queries: dq = scale · Σ over keys of ds · k, with ds = p · (do·vᵀ − delta)."""
    batch, _, query_heads, width = q.shape
    blocks = config.QUERY_GRADIENT[width]
    scheduler = TileScheduler.over(
        bounds.of_queries, batch, query_heads, rows=ROWS, columns=blocks.columns, one_each=width > 128
    )  # fmt: skip

    def body(*refs):
        _compute(scheduler, scores, query_heads // k.shape[2], *scheduler.split(refs))

    own_stage = lambda: hopper.shared_tile((NUM_CONSUMERS, WARPGROUP_ROWS, width), q.dtype)
    ring_stage = lambda count: hopper.shared_tile((count, blocks.columns, width), k.dtype)
    (dq,) = hopper.launch(
        body, *scheduler.operands, q, k, v, do, lse, delta,
        num_blocks=scheduler.num_blocks,
        out_types=[out_like(q, q.shape, q.dtype)],
        scratch=[
            own_stage(),
            own_stage(),
            plgpu.Barrier(num_arrivals=2, num_barriers=NUM_CONSUMERS),
            StageRing.scratch(ring_stage(blocks.stages)),
            StageRing.scratch(ring_stage(blocks.second_stages or blocks.stages)),
        ],
        name="causal_attention_query_gradient",
    )  # fmt: skip
    return dq


def _compute(scheduler: TileScheduler, scores: Scores, group: int, scheduler_refs, refs) -> None:
    """The kernel's body."""
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, q_stages, do_stages, arrived, k_ring, v_ring = refs
    warpgroup = jax.lax.axis_index("warpgroup")
    q_stage, do_stage = q_stages.at[warpgroup], do_stages.at[warpgroup]

    def compute_tile(tile: Tile, done):
        own = pl.ds(tile.rows * ROWS + warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
        here, of_head = (tile.batch, own, tile.head), (tile.batch, tile.head, own)
        for ref, stage in ((q_ref, q_stage), (do_ref, do_stage)):
            plgpu.copy_gmem_to_smem(ref.at[here], stage, arrived.at[warpgroup])
        own_lse, own_delta = (rows_of(ref, *of_head) for ref in (lse_ref, delta_ref))
        mask = scheduler.mask(scheduler_refs, tile, own.start)
        plgpu.barrier_wait(arrived.at[warpgroup])

        def step(n, dq):
            slot = k_ring.wait(done + n)
            (k_stage,) = k_ring.stages
            own = warpgroup + hopper.opaque_zero()
            capped = scores.capped(product(q_stages.at[own], k_stage.at[slot]))
            p = mask.only_where_masked(jnp.exp2(capped * scores.factor - over_rows(own_lse, capped.shape)), n, 0.0)
            sloped = scores.slope(p, capped)
            v_slot = v_ring.wait(done + n)
            dp = product(do_stages.at[own], v_ring.stages[0].at[v_slot])
            v_ring.release(done + n)
            ds = sloped * (dp - over_rows(own_delta, dp.shape))
            dq = hopper.add_product(dq, ds.astype(q_stage.dtype), k_stage.at[slot])
            k_ring.release(done + n)
            return dq

        dq = jax.lax.fori_loop(0, tile.count, step, filled(q_stage.shape, 0.0, tile_layout()))
        q_stage[...] = (dq * scores.scale).astype(q_stage.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_stage, dq_ref.at[here])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        return done + tile.count

    copy_tile = copies_of_keys(scheduler, group, k_ref, v_ref, k_ring, v_ring)
    produce(lambda: scheduler.for_each(scheduler_refs, copy_tile))
    consume(lambda: scheduler.for_each(scheduler_refs, compute_tile))
