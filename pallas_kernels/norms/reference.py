"""RMSNorm as its formula stands in the paper: the oracle of the tests, in whatever precision it is given."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale: jax.Array | None, *, eps: float, offset: float) -> jax.Array:
    """y = x / sqrt(mean(x²) + eps) · (offset + scale) over the last axis, in x's dtype throughout."""
    y = x / jnp.sqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
    return y if scale is None else y * (offset + scale)
