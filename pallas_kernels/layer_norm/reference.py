"""LayerNorm as its formula stands in the paper: the oracle of the tests, in whatever precision it is given."""

import jax
import jax.numpy as jnp


def layer_norm(x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, *, eps: float) -> jax.Array:
    """y = (x − mean(x)) / sqrt(var(x) + eps) · scale + bias over the last axis, in x's dtype throughout."""
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    y = centred / jnp.sqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps)
    y = y if scale is None else y * scale
    return y if bias is None else y + bias
