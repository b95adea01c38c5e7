"""Causal attention as its formula stands, all scores at once: the tests' oracle, in the precision it is given."""

import jax
import jax.numpy as jnp


def visible(length: int, segment_ids: jax.Array | None = None, window: int | None = None) -> jax.Array:
    """(B or 1, T, T): query t sees key s where s ≤ t, t − s < window, and both have one id."""
    distance = jnp.arange(length)[:, None] - jnp.arange(length)[None]
    near = (distance >= 0) & (distance < (length if window is None else window))
    if segment_ids is None:
        return near[None]
    return near[None] & (segment_ids[:, :, None] == segment_ids[:, None])


def causal_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """q (B, T, Q, H), k and v (B, T, K, H) → softmax(cap(scale·q·kᵀ), over what is visible)·v (B, T, Q, H).

    With sinks (Q,) the softmax has one more column, which has no value.
    """
    batch, length, query_heads, width = q.shape
    grouped = q.reshape(batch, length, k.shape[2], query_heads // k.shape[2], width)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k) * (width**-0.5 if scale is None else scale)
    scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
    seen = visible(length, segment_ids, window)[:, None, None]
    scores = jnp.where(seen, scores, -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks.reshape(1, *scores.shape[1:3], 1, 1), (*scores.shape[:4], 1))
        scores = jnp.concatenate([scores, column.astype(scores.dtype)], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :length]
    return jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(q.shape)
