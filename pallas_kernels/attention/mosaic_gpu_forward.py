"""Hopper's attention forward: tile by tile of queries, two warpgroups in turn at the softmax and the products."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _hopper
from liger_jax.pallas_kernels import _mosaic_gpu as plgpu
from liger_jax.pallas_kernels._hopper import row_layout, tile_layout
from liger_jax.pallas_kernels._tiles import out_like, round_up
from liger_jax.pallas_kernels.attention import config
from liger_jax.pallas_kernels.attention.intervals import Intervals, table, whole_blocks
from liger_jax.pallas_kernels.attention.mosaic_gpu_parts import (
    LOG2_E,
    NO_SCORE,
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
    vector,
    visible,
)


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
    shape = (WARPGROUP_ROWS, keys)
    entries = table(found.first, positions(length), found.is_foreign, batch, ROWS, keys)
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
            row = tile.rows * ROWS + warpgroup * WARPGROUP_ROWS
            own = pl.ds(row, WARPGROUP_ROWS)
            here = (tile.batch, own, tile.head)
            plgpu.copy_gmem_to_smem(q_ref.at[here], q_stage.at[warpgroup], arrived.at[warpgroup])
            first = rows_of(low_ref, row_of(low, tile.batch), own)
            own_ids = [rows_of(ref, tile.batch, own) for ref in ids_refs]
            plgpu.barrier_wait(arrived.at[warpgroup])

            def step(n, carry, *, mask):
                accumulator, maximum, total = carry
                slot = k_ring.wait(done + n)
                s = scores.capped(product(q_stage.at[warpgroup], k_ring.stages[0].at[slot], shape, take_turns))
                k_ring.release(done + n)
                if mask is not None:
                    key = tile.column_block(n) * keys
                    pair = pair_of_ids(ids_refs, mask, own_ids, tile.batch, pl.ds(key, keys))
                    low, high = over_rows(first - key, shape), own_rows(shape) + (row - key)
                    s = jnp.where(visible(shape, low, high, pair), s, -jnp.inf)
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
                filled((WARPGROUP_ROWS, width), 0.0, tile_layout()),
                filled((WARPGROUP_ROWS,), NO_SCORE, row_layout()),
                filled((WARPGROUP_ROWS,), 0.0, row_layout()),
            )
            accumulator, maximum, total = tile.over_columns(step, carry, has_ids)
            q_stage[warpgroup] = (accumulator * over_rows(1.0 / total, accumulator.shape)).astype(q_stage.dtype)
            lse_stage[warpgroup] = maximum + jnp.log(total) * LOG2_E
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_stage.at[warpgroup], out_ref.at[here])
            plgpu.copy_smem_to_gmem(lse_stage.at[warpgroup], lse_ref.at[tile.batch, tile.head, own])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            return done + tile.count

        produce(warpgroup, walk, table_ref, copies_of_keys(k_ref, v_ref, k_ring, v_ring, keys, group))

        @pl.when(warpgroup < NUM_CONSUMERS)
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
            _hopper.shared_tile((NUM_CONSUMERS, WARPGROUP_ROWS, width), q.dtype),
            vector(NUM_CONSUMERS, WARPGROUP_ROWS, jnp.float32),
            plgpu.Barrier(num_arrivals=1, num_barriers=NUM_CONSUMERS),
            Slots.scratch([column_stage()]),
            Slots.scratch([column_stage()]),
            plgpu.Barrier(num_arrivals=NUM_CONSUMERS),
        ],
        name="causal_attention_forward",
    )  # fmt: skip
    return out, log_sums
