"""Rotary embedding in plain XLA: one fused pass for q and one for k, in each direction.

Rounding: the rotation in float32, rounded once to q's and k's dtypes.
"""

import jax
import jax.numpy as jnp


def unsupported(q: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array) -> str | None:
    """XLA runs every case."""
    return None


def _rotated(x: jax.Array, cos: jax.Array, sin: jax.Array, *, inverse: bool) -> jax.Array:
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    width = cos.shape[-1]
    first, second, rest = jnp.split(x, [width // 2, width], axis=-1)
    a, b = first.astype(dtype), second.astype(dtype)
    (c1, c2), (s1, s2) = (jnp.split(table[:, :, None, :].astype(dtype), 2, axis=-1) for table in (cos, sin))
    if inverse:  # the transpose: a' = c1·a + s2·b, b' = c2·b − s1·a
        s1, s2 = -s2, -s1
    rotated = [a * c1 - b * s1, b * c2 + a * s2]
    return jnp.concatenate([*(half.astype(x.dtype) for half in rotated), rest], axis=-1)


def rotate(
    q: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array, *, inverse: bool
) -> tuple[jax.Array, jax.Array]:
    """q (B, T, Q, H), k (B, T, K, H), cos and sin (B or 1, T, R) → rotated q and k; inverse for the gradient."""
    return _rotated(q, cos, sin, inverse=inverse), _rotated(k, cos, sin, inverse=inverse)
