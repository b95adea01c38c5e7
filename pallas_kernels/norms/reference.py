"""The norms as their formulas stand in the papers: the oracle of the tests, in whatever precision it is given."""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale: jax.Array | None, *, eps: float, offset: float) -> jax.Array:
    """y = x / sqrt(mean(x²) + eps) · (offset + scale) over the last axis, in x's dtype throughout."""
    y = x / jnp.sqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)
    return y if scale is None else y * (offset + scale)


def fused_add_rms_norm(
    x: jax.Array, residual: jax.Array, scale: jax.Array | None, *, eps: float, offset: float
) -> tuple[jax.Array, jax.Array]:
    """s = x + residual → rms_norm(s), s."""
    added = x + residual
    return rms_norm(added, scale, eps=eps, offset=offset), added


def layer_norm(x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, *, eps: float) -> jax.Array:
    """y = (x − mean(x)) / sqrt(var(x) + eps) · scale + bias over the last axis, in x's dtype throughout."""
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    y = centred / jnp.sqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps)
    y = y if scale is None else y * scale
    return y if bias is None else y + bias


def dyt(x: jax.Array, alpha: jax.Array, scale: jax.Array | None, bias: jax.Array | None) -> jax.Array:
    """y = tanh(alpha · x) · scale + bias, in x's dtype throughout."""
    y = jnp.tanh(alpha * x)
    y = y if scale is None else y * scale
    return y if bias is None else y + bias


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


def poly_norm(x: jax.Array, weight: jax.Array, bias: jax.Array | None, *, eps: float) -> jax.Array:
    """y = Σ_p weight[3 − p] · x^p / sqrt(mean(x^2p) + eps) + bias for p = 3, 2, 1, in x's dtype throughout."""
    powers = (x**3, x**2, x)
    normed = [u / jnp.sqrt(jnp.mean(jnp.square(u), axis=-1, keepdims=True) + eps) for u in powers]
    y = weight[0] * normed[0] + weight[1] * normed[1] + weight[2] * normed[2]
    return y if bias is None else y + bias
