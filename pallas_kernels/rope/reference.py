"""Rotary position embedding as its formula stands: the oracle of the tests, in whatever precision it is given."""

import jax
import jax.numpy as jnp


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x (B, T, heads, H), cos and sin (1|B, T, R): x·cos + (−x₂, x₁)·sin for the first R columns (x₁, x₂)."""
    rotary_width = cos.shape[-1]
    x, rest = x[..., :rotary_width], x[..., rotary_width:]
    first, second = jnp.split(x, 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    rotated = x * cos[:, :, None, :] + turned * sin[:, :, None, :]
    return jnp.concatenate([rotated, rest], axis=-1)


def apply_rope(q: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rotates q (B, T, Q, H) and k (B, T, K, H)."""
    return rotate(q, cos, sin), rotate(k, cos, sin)
