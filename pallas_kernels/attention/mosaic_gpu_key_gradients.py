"""Hopper's dk and dv: tile by tile of keys, from scores that are made again; a group's heads add up in registers."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _hopper
from liger_jax.pallas_kernels import _mosaic_gpu as plgpu
from liger_jax.pallas_kernels._hopper import column_layout, tile_layout
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
    filled,
    over_columns,
    over_rows,
    own_rows,
    pair_of_ids,
    positions,
    produce,
    product,
    row_of,
    rows_of,
    vector,
    visible,
)


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
    shape = (WARPGROUP_ROWS, queries)
    # Where a warpgroup's registers do not hold both gradients of 64 keys, one makes dv of them and the other dk.
    is_split = width > 128
    rows = WARPGROUP_ROWS if is_split else ROWS
    entries = table(positions(length), found.last, found.is_foreign, batch, rows, queries)
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
            row = tile.rows * rows + (0 if is_split else warpgroup * WARPGROUP_ROWS)
            own = pl.ds(row, WARPGROUP_ROWS)
            here = (tile.batch, own, tile.head)
            k_stage, v_stage = k_stages.at[warpgroup], v_stages.at[0 if is_split else warpgroup]
            plgpu.copy_gmem_to_smem(k_ref.at[here], k_stage, k_arrived.at[warpgroup])
            if of_keys:
                plgpu.copy_gmem_to_smem(v_ref.at[here], v_stage, v_arrived.at[warpgroup])
            last = rows_of(high_ref, row_of(high, tile.batch), own)
            own_ids = [rows_of(ref, tile.batch, own) for ref in ids_refs]
            plgpu.barrier_wait(k_arrived.at[warpgroup])
            if of_keys:
                plgpu.barrier_wait(v_arrived.at[warpgroup])

            def of_head(g, carry):
                begun = done + g * tile.count

                def step(n, carry, *, mask):
                    dk, dv = carry
                    slot = q_ring.wait(begun + n)
                    q_stage, lse_stage = q_ring.stages
                    capped = scores.capped(product(k_stage, q_stage.at[slot], shape))
                    lse = _hopper.load(lse_stage, (slot,), column_layout())
                    p = jnp.exp2(capped * scores.factor - over_columns(lse, shape))
                    if mask is not None:
                        query = tile.column_block(n) * queries
                        pair = pair_of_ids(ids_refs, mask, own_ids, tile.batch, pl.ds(query, queries))
                        low, high = own_rows(shape) + (row - query), over_rows(last - query, shape)
                        p = jnp.where(visible(shape, low, high, pair), p, 0.0)
                    do_slot = do_ring.wait(begun + n)
                    do_stage, delta_stage = do_ring.stages
                    ds = None
                    if of_keys:
                        dp = product(v_stage, do_stage.at[do_slot], shape)
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

            nothing = filled((WARPGROUP_ROWS, width), 0.0, tile_layout())
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

        produce(warpgroup, walk, table_ref, copy_tile)

        def compute(**parts):
            plgpu.set_max_registers(232, action="increase")
            walk.for_each(table_ref, functools.partial(compute_tile, **parts))
            plgpu.wait_smem_to_gmem(0)

        if is_split:
            pl.when(warpgroup == 0)(lambda: compute(of_keys=False, of_values=True))
            pl.when(warpgroup == 1)(lambda: compute(of_keys=True, of_values=False))
        else:
            pl.when(warpgroup < NUM_CONSUMERS)(lambda: compute(of_keys=True, of_values=True))

    own_stage = lambda count: _hopper.shared_tile((count, WARPGROUP_ROWS, width), k.dtype)
    stages = blocks.stages
    ring_stage = lambda: _hopper.shared_tile((stages, queries, width), q.dtype)
    dk, dv = _hopper.launch(
        body, entries.reshape(-1), high, *ids, q, k, v, do, lse, delta,
        num_blocks=walk.num_blocks,
        out_types=[out_like(k, k.shape, k.dtype), out_like(v, v.shape, v.dtype)],
        scratch=[
            own_stage(NUM_CONSUMERS),
            own_stage(1 if is_split else NUM_CONSUMERS),
            plgpu.Barrier(num_barriers=NUM_CONSUMERS),
            plgpu.Barrier(num_barriers=NUM_CONSUMERS),
            Slots.scratch([ring_stage(), vector(stages, queries, jnp.float32)]),
            Slots.scratch([ring_stage(), vector(stages, queries, jnp.float32)]),
        ],
        name="causal_attention_key_gradients",
    )  # fmt: skip
    return dk, dv
