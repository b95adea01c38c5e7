"""Hopper's dq: tile by tile of queries, from scores that are made again."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _hopper
from liger_jax.pallas_kernels import _mosaic_gpu as plgpu
from liger_jax.pallas_kernels._hopper import tile_layout
from liger_jax.pallas_kernels._tiles import out_like
from liger_jax.pallas_kernels.attention import config
from liger_jax.pallas_kernels.attention.intervals import Intervals, table, whole_blocks
from liger_jax.pallas_kernels.attention.mosaic_gpu_parts import (
    NUM_CONSUMERS,
    ROWS,
    WARPGROUP_ROWS,
    Scores,
    Slots,
    Tile,
    Walk,
    copies_of_keys,
    filled,
    over_rows,
    own_rows,
    pair_of_ids,
    positions,
    produce,
    product,
    row_of,
    rows_of,
    visible,
)


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
    shape = (WARPGROUP_ROWS, keys)
    entries = table(found.first, positions(length), found.is_foreign, batch, ROWS, keys)
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
            row = tile.rows * ROWS + warpgroup * WARPGROUP_ROWS
            own = pl.ds(row, WARPGROUP_ROWS)
            here, of_head = (tile.batch, own, tile.head), (tile.batch, tile.head, own)
            for ref, stage in ((q_ref, q_stage), (do_ref, do_stage)):
                plgpu.copy_gmem_to_smem(ref.at[here], stage.at[warpgroup], arrived.at[warpgroup])
            own_lse, own_delta = (rows_of(ref, *of_head) for ref in (lse_ref, delta_ref))
            first = rows_of(low_ref, row_of(low, tile.batch), own)
            own_ids = [rows_of(ref, tile.batch, own) for ref in ids_refs]
            plgpu.barrier_wait(arrived.at[warpgroup])

            def step(n, dq, *, mask):
                slot = k_ring.wait(done + n)
                (k_stage,) = k_ring.stages
                capped = scores.capped(product(q_stage.at[warpgroup], k_stage.at[slot], shape))
                p = jnp.exp2(capped * scores.factor - over_rows(own_lse, shape))
                if mask is not None:
                    key = tile.column_block(n) * keys
                    pair = pair_of_ids(ids_refs, mask, own_ids, tile.batch, pl.ds(key, keys))
                    low, high = over_rows(first - key, shape), own_rows(shape) + (row - key)
                    p = jnp.where(visible(shape, low, high, pair), p, 0.0)
                v_slot = v_ring.wait(done + n)
                dp = product(do_stage.at[warpgroup], v_ring.stages[0].at[v_slot], shape)
                v_ring.release(done + n)
                ds = scores.slope(p * (dp - over_rows(own_delta, shape)), capped)
                dq = _hopper.add_product(dq, ds.astype(q_stage.dtype), k_stage, slot)
                k_ring.release(done + n)
                return dq

            dq = tile.over_columns(step, filled((WARPGROUP_ROWS, width), 0.0, tile_layout()), has_ids)
            q_stage[warpgroup] = (dq * scores.scale).astype(q_stage.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_stage.at[warpgroup], dq_ref.at[here])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            return done + tile.count

        produce(warpgroup, walk, table_ref, copies_of_keys(k_ref, v_ref, k_ring, v_ring, keys, group))

        @pl.when(warpgroup < NUM_CONSUMERS)
        def _():
            plgpu.set_max_registers(232, action="increase")
            walk.for_each(table_ref, compute_tile)
            plgpu.wait_smem_to_gmem(0)

    own_stage = lambda: _hopper.shared_tile((NUM_CONSUMERS, WARPGROUP_ROWS, width), q.dtype)
    ring_stage = lambda count: _hopper.shared_tile((count, keys, width), k.dtype)
    (dq,) = _hopper.launch(
        body, entries.reshape(-1), low, *ids, q, k, v, do, lse, delta,
        num_blocks=walk.num_blocks,
        out_types=[out_like(q, q.shape, q.dtype)],
        scratch=[
            own_stage(),
            own_stage(),
            plgpu.Barrier(num_arrivals=2, num_barriers=NUM_CONSUMERS),
            Slots.scratch([ring_stage(blocks.stages)]),
            Slots.scratch([ring_stage(blocks.second_stages or blocks.stages)]),
        ],
        name="causal_attention_query_gradient",
    )  # fmt: skip
    return dq
