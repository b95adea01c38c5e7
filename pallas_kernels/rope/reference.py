"""Rotary embedding pair by pair: the oracle of the tests, in whatever precision it is given."""

import jax
import jax.numpy as jnp


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x (B, T, heads, H), cos and sin (B or 1, T, R): elements i and i + R/2 of the first R turn as a pair."""
    width = cos.shape[-1]
    first, second, rest = jnp.split(x, [width // 2, width], axis=-1)
    (c1, c2), (s1, s2) = (jnp.split(table[:, :, None, :], 2, axis=-1) for table in (cos, sin))
    return jnp.concatenate([first * c1 - second * s1, second * c2 + first * s2, rest], axis=-1)
