"""Attention of one query of each row to a key-value cache, in Pallas-Triton (NVIDIA, Ampere and newer).

One program computes the query heads that share a key head of one row. It walks over blocks of the cache's slots, from
the first that the query sees to the last that is written, with an online softmax. So it reads a key or a value once,
from where it is in the whole cache, and no slots that are not written. A product has at least 16 rows: fewer heads
are padded with zeros, which costs no memory traffic.
Where rows and key heads are few, several programs share the slots. Each then writes its sums in float32, and XLA joins
them: 4·H + 8 bytes of each query head for a program, that reads some 128 slots of 4·H bytes or more.
Rounding: scores, softmax, sums and accumulators are float32; weights are rounded to q's dtype for their product.
Why this backend: XLA copies a layer's keys and values out of the cache, transposes them, and reads all slots.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _triton as pltriton
from liger_jax.pallas_kernels.attention.config import TRITON_DECODE, DecodeBlocks, Typed
from liger_jax.pallas_kernels.attention.formulas import LOG2_E, NO_SCORE, Scores, product
from liger_jax.pallas_kernels.tiles import cdiv, in_bounds, next_power_of_2, out_like, round_up, with_absent

_PROGRAMS = 512  # programs to reach by sharing slots: 132 multiprocessors with about four programs each
_FEWEST_BLOCKS = 2  # of slots for each of the programs that share them, if all slots are written
_LEAST_TILE = 16  # rows or columns of a product
_MOST_HEADS = 64  # of queries that share a key head


def unsupported(q: Typed, keys: Typed, values: Typed, *_: Any, **__: Any) -> str | None:
    """Why the kernel cannot run: it takes 16-bit operands of one dtype, and heads that fit the registers."""
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the kernel supports bfloat16 and float16, and the queries are {q.dtype}; use 'xla'."
    if not keys.dtype == values.dtype == q.dtype:
        return f"the kernel supports caches of the queries' dtype {q.dtype}, and the keys are {keys.dtype}; use 'xla'."
    if q.shape[2] > (widest := max(TRITON_DECODE)):
        return f"the kernel supports head widths up to {widest}, and the width is {q.shape[2]}; use 'xla'."
    if (group := q.shape[1] // keys.shape[3]) > _MOST_HEADS:
        return f"the kernel supports up to {_MOST_HEADS} query heads for a key head, and there are {group}; use 'xla'."
    return None


def number_of_splits(programs: int, slots: int, blocks: DecodeBlocks) -> int:
    """How many programs share the slots of a row and a key head, given the number of rows times key heads."""
    return max(1, min(_PROGRAMS // programs, cdiv(slots, _FEWEST_BLOCKS * blocks.slots)))


def _kernel(*refs, has_first, has_sinks, tile, group, width, kv_heads, num_slots, slots, splits, scores):
    """The tile is (rows, columns) of a program's queries: at least `group` and `width`."""
    present = [True, True, has_first, has_sinks, *[True] * (len(refs) - 2 - has_first - has_sinks)]
    layer_ref, filled_ref, first_ref, sinks_ref, q_ref, k_ref, v_ref, positions_ref, *out_refs = with_absent(
        refs, present
    )
    (rows, columns), split = tile, pl.program_id(1)
    batch, head = jax.lax.div(pl.program_id(0), kv_heads), jax.lax.rem(pl.program_id(0), kv_heads)
    layer, first = layer_ref[0], 0 if first_ref is None else first_ref[batch]
    filled = jnp.minimum(filled_ref[0], num_slots)  # a cache that is too short is refused elsewhere
    is_head, is_column = in_bounds(0, rows, group, axis=0), in_bounds(0, columns, width, axis=1)
    q = pltriton.load(q_ref.at[batch, head, :, :], mask=is_head & is_column, other=0.0)

    def step(n, carry):
        accumulator, maximum, total = carry
        begin = n * slots
        own, is_filled = pl.ds(begin, slots), in_bounds(begin, slots, filled, axis=0)
        is_there = is_filled if width == columns else is_filled & is_column
        k, v = (pltriton.load(ref.at[layer, batch, own, head, :], mask=is_there, other=0.0) for ref in (k_ref, v_ref))
        is_filled = in_bounds(begin, slots, filled, axis=0, rank=1)
        is_seen = pltriton.load(positions_ref.at[batch, own], mask=is_filled, other=-1) >= 0
        if has_first:
            is_seen &= begin + jax.lax.broadcasted_iota(jnp.int32, (slots,), 0) >= first
        s = jnp.where(is_seen[None, :], scores.factor * scores.capped(product(q, k, (1, 1))), -jnp.inf)
        new_maximum = jnp.maximum(maximum, jnp.max(s, axis=1))
        shrink = jnp.exp2(maximum - new_maximum)
        p = jnp.exp2(s - new_maximum[:, None])
        total = total * shrink + jnp.sum(p, axis=1)
        return accumulator * shrink[:, None] + product(p.astype(v.dtype), v, (1, 0)), new_maximum, total

    nothing = jnp.zeros((rows,), jnp.float32)
    maximum, total = nothing + NO_SCORE, nothing
    if sinks_ref is not None:  # the first program has the sink among its scores
        sink = pltriton.load(sinks_ref.at[head, :], mask=in_bounds(0, rows, group, axis=0, rank=1), other=0.0)
        maximum = jnp.where(split == 0, LOG2_E * sink.astype(jnp.float32), maximum)
        total = jnp.where(split == 0, nothing + 1.0, total)
    start, end = first // slots if first_ref is None else jax.lax.div(first, slots), pl.cdiv(filled, slots)
    if splits > 1:
        share = pl.cdiv(jnp.maximum(end - start, 0), splits)
        start += split * share
        end = jnp.minimum(end, start + share)
    accumulator = jnp.zeros((rows, columns), jnp.float32)
    accumulator, maximum, total = jax.lax.fori_loop(start, end, step, (accumulator, maximum, total))
    if splits == 1:
        _store(out_refs[0].at[batch, head, :, :], _shares(accumulator, total), is_head & is_column)
        return
    _store(out_refs[0].at[split, batch, head, :, :], accumulator, is_head & is_column)
    for ref, x in zip(out_refs[1:], (maximum, total), strict=True):
        _store(ref.at[split, batch, head, :], x, in_bounds(0, rows, group, axis=0, rank=1))


def _store(ref: Any, value: jax.Array, mask: jax.Array) -> None:
    pltriton.store(ref, value.astype(ref.dtype), mask=mask)


def _shares(accumulator: jax.Array, total: jax.Array) -> jax.Array:
    """Σ p·v and Σ p → the weighted mean; zeros for a query that sees nothing."""
    return accumulator * jnp.where(total > 0.0, 1.0 / total, 0.0)[..., None]


def _joined(accumulators: jax.Array, maxima: jax.Array, totals: jax.Array) -> jax.Array:
    """The sums (splits, …) of programs that share slots → the result of a single program."""
    shrink = jnp.exp2(maxima - jnp.max(maxima, axis=0, keepdims=True))
    return _shares(jnp.sum(shrink[..., None] * accumulators, axis=0), jnp.sum(shrink * totals, axis=0))


def _whole(x: Any, *last: int) -> pl.BlockSpec:
    """An array as one block, whose last axes have these sizes: whole tiles, masked past the end."""
    shape = (*x.shape[: x.ndim - len(last)], *last)
    return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))


def attend(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    layer: jax.Array,
    filled: jax.Array,
    first: jax.Array | None,
    sinks: jax.Array | None,
    *,
    softcap: float | None,
    scale: float | None,
    interpret: bool,
) -> jax.Array:
    """q (B, Q, H), keys and values (L, B, S, K, H), positions (B, S), first (B,), sinks (Q,) → (B, Q, H).

    `layer` and `filled` are int32 scalars; a query sees the slots from `first` to `filled` − 1 that hold tokens.
    """
    (batch, heads, width), (num_slots, kv_heads) = q.shape, keys.shape[2:4]
    group, blocks = heads // kv_heads, TRITON_DECODE[next(size for size in TRITON_DECODE if size >= width)]
    tile = tuple(max(_LEAST_TILE, next_power_of_2(size)) for size in (group, width))
    splits = number_of_splits(batch * kv_heads, num_slots, blocks)
    slots = round_up(num_slots, blocks.slots)
    inputs = [layer.reshape(1), filled.reshape(1), first, None if sinks is None else sinks.reshape(kv_heads, group)]
    inputs += [q.reshape(batch, kv_heads, group, width), keys, values, positions]
    last = [(), (), (), tile[:1], tile, (slots, kv_heads, tile[1]), (slots, kv_heads, tile[1]), (slots,)]
    sizes = (batch, kv_heads, group) if splits == 1 else (splits, batch, kv_heads, group)
    out_shape = [out_like(q, (*sizes, width), q.dtype if splits == 1 else jnp.float32)]
    out_specs = [_whole(out_shape[0], *tile)]
    if splits > 1:
        out_shape += [out_like(q, sizes, jnp.float32)] * 2
        out_specs += [_whole(out_shape[1], tile[0])] * 2
    kernel = functools.partial(
        _kernel, has_first=first is not None, has_sinks=sinks is not None, tile=tile, group=group, width=width,
        kv_heads=kv_heads, num_slots=num_slots, slots=blocks.slots, splits=splits,
        scores=Scores(softcap, width**-0.5 if scale is None else scale),
    )  # fmt: skip
    outputs = pl.pallas_call(
        kernel,
        grid=(batch * kv_heads, splits),
        in_specs=[_whole(x, *sizes) for x, sizes in zip(inputs, last, strict=True) if x is not None],
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=pltriton.CompilerParams(num_warps=blocks.num_warps, num_stages=blocks.num_stages),
        interpret=interpret,
        name="decode_attention",
    )(*[x for x in inputs if x is not None])
    return (outputs[0] if splits == 1 else _joined(*outputs).astype(q.dtype)).reshape(q.shape)
