"""Attention of one query of each row to a key-value cache in XLA, on any device: a block of slots at a time.

A loop runs from the first block that a row sees to the last that has a written slot, with an online softmax. So of a
cache that is filled by half, half is read. Scores, softmax, sums and accumulators are float32, or float64 for float64.
"""

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels.attention.formulas import NO_SCORE
from liger_jax.pallas_kernels.tiles import cdiv, full_like

_FEWEST_SLOTS = 128  # of a block
_MOST_BLOCKS = 8  # a balance: an iteration has a fixed cost, and reads up to a block too much


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
) -> jax.Array:
    """q (B, Q, H), keys and values (L, B, S, K, H), positions (B, S), first (B,), sinks (Q,) → (B, Q, H).

    `layer` and `filled` are int32 scalars; a query sees the slots from `first` to `filled` − 1 that hold tokens.
    """
    (batch, _, width), (num_slots, kv_heads), dtype = q.shape, keys.shape[2:4], q.dtype
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
    scale = width**-0.5 if scale is None else scale
    queries = q.reshape(batch, kv_heads, -1, width)
    size = min(num_slots, max(_FEWEST_SLOTS, cdiv(num_slots, _MOST_BLOCKS)))
    zero = jnp.zeros_like(layer)

    def block(x, begin):
        return jax.lax.dynamic_slice(x, (layer, zero, begin, zero, zero), (1, batch, size, kv_heads, width))[0]

    def step(n, carry):
        accumulator, maximum, total = carry
        begin = jnp.minimum(n * size, num_slots - size)  # the last block overlaps the one before it
        number = begin + jnp.arange(size, dtype=jnp.int32)[None]
        k, v = block(keys, begin).astype(dtype), block(values, begin).astype(dtype)
        is_own = (number >= n * size) & (number < filled)
        v = jnp.where(is_own[..., None, None], v, 0)  # a slot that is not written may hold anything
        is_seen = is_own & (jax.lax.dynamic_slice_in_dim(positions, begin, size, axis=1) >= 0)
        if first is not None:
            is_seen &= number >= first[:, None]
        scores = scale * jnp.einsum("bkgh,bskh->bkgs", queries, k, preferred_element_type=wide)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(is_seen[:, None, None], scores, -jnp.inf)
        new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=-1))
        shrink, p = jnp.exp(maximum - new_maximum), jnp.exp(scores - new_maximum[..., None])
        product = jnp.einsum("bkgs,bskh->bkgh", p.astype(dtype), v, preferred_element_type=wide)
        total = total * shrink + jnp.sum(p, axis=-1)
        return accumulator * shrink[..., None] + product, new_maximum, total

    shape = queries.shape[:3]
    if sinks is None:
        maximum, total = full_like(q, shape, NO_SCORE, wide), full_like(q, shape, 0, wide)
    else:
        maximum = full_like(q, shape, 0, wide) + sinks.astype(wide).reshape(1, *shape[1:])
        total = full_like(q, shape, 1, wide)
    start = zero if first is None else jnp.min(first) // size
    end = (jnp.minimum(filled, num_slots) + size - 1) // size
    accumulator = full_like(q, queries.shape, 0, wide)
    accumulator, _, total = jax.lax.fori_loop(start, end, step, (accumulator, maximum, total))
    return (accumulator * jnp.where(total > 0, 1 / total, 0)[..., None]).astype(dtype).reshape(q.shape)
