"""GroupNorm as its formula stands in the paper: the oracle of the tests, in whatever precision it is given."""

import jax
import jax.numpy as jnp


def group_norm(
    x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, *, num_groups: int, eps: float, channel_axis: int
) -> jax.Array:
    """x (B, ..., C, ...): (x − mean) / sqrt(var + eps) of each example's groups of channels, then scale and bias."""
    last = jnp.moveaxis(x, channel_axis, -1)
    groups = last.reshape(len(x), -1, num_groups, last.shape[-1] // num_groups)
    centred = groups - jnp.mean(groups, axis=(1, 3), keepdims=True)
    y = centred / jnp.sqrt(jnp.mean(jnp.square(centred), axis=(1, 3), keepdims=True) + eps)
    y = y.reshape(last.shape)
    y = y if scale is None else y * scale
    return jnp.moveaxis(y if bias is None else y + bias, -1, channel_axis)
