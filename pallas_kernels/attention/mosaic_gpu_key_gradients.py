"""Hopper's dk and dv: tile by tile of keys, from recomputed scores; a group's heads are summed in registers."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

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
    Mask,
    StageRing,
    TileScheduler,
    consume,
    filled,
    over_columns,
    produce,
    product,
    vector,
)
from liger_jax.pallas_kernels.hopper import column_layout, tile_layout
from liger_jax.pallas_kernels.tiles import cdiv, out_like

FEW_TILES = 3  # tiles for each core; below it, both warpgroups of a block share one


@dataclasses.dataclass(frozen=True)
class _Task:
    """Which gradients a warpgroup makes, and from which blocks of queries.

    With `takes_turns` both warpgroups have the same 64 keys. Each takes every other block, and their sums are added.
    """

    of_keys: bool = True
    of_values: bool = True
    takes_turns: bool = False


def key_gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    do: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    bounds: Intervals,
    scores: Scores,
) -> tuple[jax.Array, jax.Array]:
    """dk and dv in the shape of k, by tiles of keys. Registers hold the sums over the query heads of a group."""
    batch, length, kv_heads, width = k.shape
    tasks = _tasks(width, batch * kv_heads * cdiv(length, ROWS))
    takes_turns = tasks[0].takes_turns
    blocks = config.KEY_GRADIENTS_IN_TURNS[width] if takes_turns else config.KEY_GRADIENTS[width]
    rows = ROWS if tasks == (_Task(), _Task()) else WARPGROUP_ROWS
    scheduler = TileScheduler.over(
        bounds.of_keys, batch, kv_heads, rows=rows, columns=blocks.columns, one_each=rows == WARPGROUP_ROWS
    )  # fmt: skip
    consumers = 1 if takes_turns else NUM_CONSUMERS

    def body(*refs):
        _compute(scheduler, scores, q.shape[2] // kv_heads, tasks, *scheduler.split(refs))

    own_stage = lambda count: hopper.shared_tile((count, WARPGROUP_ROWS, width), k.dtype)
    ring_stage = lambda: hopper.shared_tile((blocks.stages, blocks.columns, width), q.dtype)
    numbers = lambda: vector(blocks.stages, blocks.columns, jnp.float32)
    sums = [hopper.shared_tile((WARPGROUP_ROWS, width), jnp.float32), plgpu.Barrier(num_arrivals=NUM_CONSUMERS)]
    dk, dv = hopper.launch(
        body, *scheduler.operands, q, k, v, do, lse, delta,
        num_blocks=scheduler.num_blocks,
        out_types=[out_like(k, k.shape, k.dtype), out_like(v, v.shape, v.dtype)],
        scratch=[
            own_stage(NUM_CONSUMERS),
            own_stage(sum(task.of_keys for task in tasks)),
            plgpu.Barrier(num_barriers=NUM_CONSUMERS),
            plgpu.Barrier(num_barriers=NUM_CONSUMERS),
            StageRing.scratch(ring_stage(), numbers(), consumers=consumers),
            StageRing.scratch(ring_stage(), numbers(), consumers=consumers),
            *(sums if takes_turns else []),
        ],
        name="causal_attention_key_gradients",
    )  # fmt: skip
    return dk, dv


def _tasks(width: int, num_tiles: int) -> tuple[_Task, _Task]:
    """The tasks of the two warpgroups. Each has 64 keys of its own, unless heads are wide or tiles are few."""
    if width > 128:  # registers do not hold both gradients
        return _Task(of_keys=False), _Task(of_values=False)
    # The tile of a long segment may be more than a core's share of the work.
    task = _Task(takes_turns=num_tiles < FEW_TILES * hopper.NUM_CORES)
    return task, task


def _compute(
    scheduler: TileScheduler, scores: Scores, group: int, tasks: tuple[_Task, _Task], scheduler_refs, refs
) -> None:
    """The kernel's body."""
    q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_ref, dv_ref, *scratch = refs
    k_stages, v_stages, k_arrived, v_arrived, q_ring, do_ring, *shared = scratch
    warpgroup = jax.lax.axis_index("warpgroup")

    def compute_tile(tile: Tile, done, *, task: _Task):
        row = tile.rows * scheduler.rows + (warpgroup * WARPGROUP_ROWS if scheduler.rows == ROWS else 0)
        here = (tile.batch, pl.ds(row, WARPGROUP_ROWS), tile.head)
        keys_and_values = lambda own: (k_stages.at[own], v_stages.at[own if v_stages.shape[0] > 1 else 0])
        k_stage, v_stage = keys_and_values(warpgroup)
        plgpu.copy_gmem_to_smem(k_ref.at[here], k_stage, k_arrived.at[warpgroup])
        if task.of_keys:
            plgpu.copy_gmem_to_smem(v_ref.at[here], v_stage, v_arrived.at[warpgroup])
        mask = scheduler.mask(scheduler_refs, tile, row)
        plgpu.barrier_wait(k_arrived.at[warpgroup])
        if task.of_keys:
            plgpu.barrier_wait(v_arrived.at[warpgroup])
        in_a_step = lambda: keys_and_values(warpgroup + hopper.opaque_zero())
        step = functools.partial(_step, task, scores, mask, in_a_step, q_ring, do_ring)
        dk, dv = _over_blocks(task, tile, group, done, step, filled(k_stage.shape, 0.0, tile_layout()))
        if task.takes_turns:
            dk, dv = (_sum_of_both(x, owner, *shared) for owner, x in enumerate((dk, dv)))
        outputs = [(0, dk * scores.scale, v_stage, dk_ref)] if task.of_keys else []
        outputs += [(1, dv, k_stage, dv_ref)] if task.of_values else []
        for owner, x, stage, ref in outputs:
            write = functools.partial(_write, x, stage, ref.at[here])
            pl.when(warpgroup == owner)(write) if task.takes_turns else write()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        return done + group * tile.count

    def copy_tile(tile: Tile, done):
        for count, begin in _blocks_of(tile):

            def copy(i, _, *, done=done, count=count, begin=begin):
                head = tile.head * group + jax.lax.div(i, count)
                own = pl.ds(tile.column_block(begin + jax.lax.rem(i, count)) * scheduler.columns, scheduler.columns)
                there, of_head = (tile.batch, own, head), (tile.batch, head, own)
                q_ring.fill(done + i, q_ref.at[there], lse_ref.at[of_head])
                do_ring.fill(done + i, do_ref.at[there], delta_ref.at[of_head])

            jax.lax.fori_loop(0, group * count, copy, None)
            done += group * count
        return done

    compute_all = lambda task: scheduler.for_each(scheduler_refs, functools.partial(compute_tile, task=task))
    produce(lambda: scheduler.for_each(scheduler_refs, copy_tile))
    if tasks[0] == tasks[1]:
        consume(lambda: compute_all(tasks[0]))
    else:
        for number, task in enumerate(tasks):
            consume(functools.partial(compute_all, task), number)


def _blocks_of(tile: Tile) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """(count, first) of the blocks of queries of a head that are masked, and of those that are not."""
    return (tile.num_masked, 0), (tile.all_count, tile.num_masked)


def _over_blocks(task: _Task, tile: Tile, group: int, done: Any, step: Callable[..., Any], nothing: jax.Array) -> Any:
    """dk and dv: the sums that `step` makes over all blocks of queries of all heads of the group."""
    sums = nothing if task.of_keys else None, nothing if task.of_values else None
    for (count, _), is_masked in zip(_blocks_of(tile), (True, False), strict=True):
        first, every = 0, 1
        if task.takes_turns:  # a place of the rings always serves the same warpgroup
            first, every = jax.lax.rem(done + jax.lax.axis_index("warpgroup"), 2), 2

        def add(j, sums, *, done=done, count=count, is_masked=is_masked, first=first, every=every):
            i = first + every * j
            return step(done + i, jax.lax.rem(i, count) if is_masked else None, sums)

        sums = jax.lax.fori_loop(0, (group * count - first + every - 1) // every, add, sums)
        done += group * count
    return sums


def _step(
    task: _Task,
    scores: Scores,
    mask: Mask,
    keys_and_values: Callable[[], tuple[Any, Any]],
    q_ring: StageRing,
    do_ring: StageRing,
    i: Any,
    n: Any,
    sums,
):
    """Adds the gradients by the i-th block in the rings. It is the tile's n-th block; None if it needs no mask."""
    dk, dv = sums
    k_stage, v_stage = keys_and_values()
    slot = q_ring.wait(i)
    q_stage, lse_stage = q_ring.stages
    capped = scores.capped(product(k_stage, q_stage.at[slot]))
    lse = hopper.load(lse_stage, (slot,), column_layout())
    p = jnp.exp2(capped * scores.factor - over_columns(lse, capped.shape))
    if n is not None:
        p = mask.only(p, n, 0.0)
    weights, sloped = p.astype(q_stage.dtype), scores.slope(p, capped)
    do_slot = do_ring.wait(i)
    do_stage, delta_stage = do_ring.stages
    ds: Any = None
    if task.of_keys:
        dp = product(v_stage, do_stage.at[do_slot])
        delta = hopper.load(delta_stage, (do_slot,), column_layout())
        ds = (sloped * (dp - over_columns(delta, dp.shape))).astype(q_stage.dtype)
    if task.of_values:
        dv = hopper.add_product(dv, weights, do_stage.at[do_slot])
    do_ring.release(i, was_loaded=True)
    if task.of_keys:
        dk = hopper.add_product(dk, ds, q_stage.at[slot])
    q_ring.release(i, was_loaded=True)
    return dk, dv


def _sum_of_both(x: jax.Array, owner: int, stage, met) -> jax.Array:
    """The sum of both warpgroups' x. Only the owner gets it; the other warpgroup passes it its x."""

    def hand_over():
        stage[...] = x
        plgpu.commit_smem()

    def meet():
        plgpu.barrier_arrive(met)
        plgpu.barrier_wait(met)

    pl.when(jax.lax.axis_index("warpgroup") != owner)(hand_over)
    meet()
    summed = x + hopper.load(stage, (), tile_layout())
    meet()
    return summed


def _write(x: jax.Array, stage, ref) -> None:
    stage[...] = x.astype(stage.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(stage, ref)
