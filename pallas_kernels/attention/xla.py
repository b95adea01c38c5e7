"""Causal attention in XLA, on any device: 256 queries at a time. The backward recomputes their scores.

No (T, T) array exists. Segments are a mask: the scores of other segments' keys are computed and masked.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels.attention.formulas import weights
from liger_jax.pallas_kernels.attention.intervals import Segments

CHUNK = 256  # queries at a time
_SPANS = 8  # groups of chunks, each with its own number of keys: 9/16 of all scores are computed, 8/16 are needed
# The score of a masked key, set after scale and softcap, so that nothing multiplies it. It is finite, so that a row
# without a visible key is not NaN.
MASKED_SCORE = -1e30


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    q_offset: jax.Array | None = None,
    sinks: jax.Array | None = None,
    *,
    window: int | None,
    softcap: float | None,
    scale: float | None,
) -> jax.Array:
    """q (B, Tq, Q, H), k and v (B, Tk, K, H), sinks (Q,) or None → (B, Tq, Q, H).

    The queries are at positions `q_offset` and after in the row of keys, or, with None, at those of the first keys;
    `segments` are those of the keys.
    """
    (batch, q_length, query_heads, width), (k_length, kv_heads), dtype = q.shape, k.shape[1:3], q.dtype
    scale = width**-0.5 if scale is None else scale
    chunk = min(CHUNK, q_length)
    ids = jnp.zeros((batch, k_length), jnp.int32) if segments is None else segments.ids
    is_part = q_offset is not None
    offset = q_offset if is_part else 0
    q_ids = jax.lax.dynamic_slice_in_dim(ids, offset, q_length, axis=1) if is_part else ids
    grouped = q.reshape(batch, q_length, kv_heads, query_heads // kv_heads, width)
    # The gradients of keys and values are summed over chunks in the dtype that the chunks are handed.
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
    k_wide, v_wide = k.astype(wide), v.astype(wide)
    wide_sinks = None if sinks is None else sinks.astype(wide).reshape(grouped.shape[2:4])

    @functools.partial(jax.checkpoint, static_argnums=4)
    def attend_chunk(queries, own_ids, start, first, count):
        """Queries (B, C, K, Q/K, H) from position `start` on, to `count` keys from `first` on."""
        seen = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=count, axis=1)
        seen_k, seen_v = seen(k_wide).astype(dtype), seen(v_wide).astype(dtype)
        scores = scale * jnp.einsum("bckgh,bskh->bkgcs", queries, seen_k, preferred_element_type=wide)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        places = lambda start, n: start + jnp.arange(n, dtype=jnp.int32)
        distance = places(start, queries.shape[1])[:, None] - places(first, count)[None]
        near = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        visible = near[None] & (own_ids[:, :, None] == seen(ids)[:, None])
        shares = weights(jnp.where(visible[:, None, None], scores, MASKED_SCORE), wide_sinks)
        return jnp.einsum("bkgcs,bskh->bckgh", shares.astype(dtype), seen_v)

    def num_keys(end: int, queries: int) -> int:
        """How many keys the queries of a chunk may see, if the last of them is number `end - 1`."""
        reach = k_length if is_part else end  # only the running program knows where the chunk begins
        return reach if window is None else min(reach, queries + window - 1)

    def span(first_query: int, chunks: int) -> Any:
        """Attends whole chunks of queries one after the other, each to as many keys as the last chunk needs."""
        end = first_query + chunks * chunk
        keys = num_keys(end, chunk)
        in_chunks = lambda x: x[:, first_query:end].reshape(batch, chunks, chunk, *x.shape[2:]).swapaxes(0, 1)
        first_key = lambda start: 0 if window is None else jnp.maximum(start + chunk - keys, 0)
        starts = offset + first_query + chunk * jnp.arange(chunks, dtype=jnp.int32)
        out = jax.lax.map(
            lambda x: attend_chunk(*x, first_key(x[2]), keys), (in_chunks(grouped), in_chunks(q_ids), starts)
        )
        return out.swapaxes(0, 1).reshape(batch, chunks * chunk, *grouped.shape[2:])

    whole = q_length // chunk
    step = math.ceil(whole / (1 if is_part else _SPANS))
    chunks = [span(i * chunk, min(step, whole - i)) for i in range(0, whole, step)]
    if q_length % chunk:
        rest = whole * chunk
        keys = num_keys(q_length, q_length - rest)
        first_key = 0 if window is None else jnp.maximum(offset + q_length - keys, 0)
        chunks.append(attend_chunk(grouped[:, rest:], q_ids[:, rest:], offset + rest, first_key, keys))
    return jnp.concatenate(chunks, axis=1).reshape(q.shape)
