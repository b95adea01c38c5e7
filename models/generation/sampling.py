"""How the next token is chosen, greedily or at random, and its log-probability."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def chosen(count: Any, rows: Any, logits: Any, ended: Any, choice: Any, ends: Any) -> tuple[jax.Array, jax.Array]:
    """Token number `count` of each row, and whether the row has ended.

    A row's random numbers come from its number among all rows and from `count`, so they do not depend on the other
    rows.

    `choice`: None for the likeliest token, or (key, temperature, top_p or None, top_k or None). Returns (B,) int32, −1
    where the logits have no softmax: one is NaN or inf, or all are −inf; and (B,) bool.
    """
    stops, pad = ends
    if choice is None:
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    else:
        key, temperature, top_p, top_k = choice
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, count), rows)
        token = draw(keys, logits, temperature, top_p, top_k)
    is_finite = jnp.isfinite(jnp.max(logits, axis=-1))  # not so if one is NaN or inf, or all are −inf
    token = jnp.where(is_finite, token, -1)
    token = jnp.where(ended, pad, token)
    return token, ended | jnp.any(token[:, None] == stops[None], axis=1)


def log_probs_of(tokens: Any, logits: Any, temperature: Any) -> jax.Array:
    """The log-probabilities (B,) of tokens (B,) by softmax(logits/temperature), logits (B, V); NaN where these are.

    Without a temperature, None, it counts as 1.
    """
    scaled = logits if temperature is None else _scaled(logits, temperature)
    target = jnp.take_along_axis(scaled, jnp.maximum(tokens, 0)[:, None], axis=-1)[:, 0]
    return target - jax.nn.logsumexp(scaled, axis=-1)


def draw(
    keys: Any,
    logits: Float[Array, "B V"],
    temperature: Float[Array, ""],
    top_p: Float[Array, ""] | None,
    top_k: Int[Array, ""] | None = None,
) -> Int[Array, " B"]:
    """Draws tokens from softmax(logits/temperature), or from the likeliest of them.

    Tokens that are exactly as likely as the last of the likeliest are drawn from, too. Nothing is sorted: the least
    probability that is drawn from is found in 15 passes over the probabilities, two of its 30 bits in each.

    `top_p`: in (0, 1): the fewest likeliest whose probabilities, among those of top_k, reach it; `None` for all.
    """
    scaled = _scaled(logits, temperature)
    if top_p is not None or top_k is not None:
        p = jnp.exp(scaled)  # in [0, 1], the likeliest has 1
        if top_k is not None:
            p = jnp.where(p >= _least(p, jnp.ones_like(p), jnp.minimum(top_k, p.shape[-1])), p, 0.0)
        if top_p is not None:
            p = jnp.where(p >= _least(p, p, top_p * jnp.sum(p, axis=-1)), p, 0.0)
        scaled = jnp.where(p > 0, scaled, -jnp.inf)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, scaled.shape[1:], scaled.dtype))(keys)
    return jnp.argmax(scaled + noise, axis=-1).astype(jnp.int32)


def _scaled(logits, temperature):
    """(logits − their largest)/temperature: at a low temperature the largest does not overflow, and others are −inf."""
    return (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature


def _least(p, weights, target):
    """The largest number (B, 1) of which Σ weights[p ≥ number] ≥ target, in p (B, V) of numbers in [0, 1]."""
    bits = jax.lax.bitcast_convert_type(p, jnp.int32)  # in the order of the numbers; 1.0 is below 2³⁰

    def narrowed(step, least):
        unit = jnp.left_shift(jnp.int32(1), 28 - 2 * step)
        reached = [
            jnp.sum(jnp.where(bits >= (least + n * unit)[:, None], weights, 0.0), axis=-1) >= target for n in (1, 2, 3)
        ]
        return least + unit * sum(more.astype(jnp.int32) for more in reached)

    least = jax.lax.fori_loop(0, 15, narrowed, jnp.zeros(p.shape[0], jnp.int32))
    return jax.lax.bitcast_convert_type(least, jnp.float32)[:, None]
