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


def gated_rms_norm(x: jax.Array, gate: jax.Array, scale: jax.Array | None = None, *, eps: float) -> jax.Array:
    """rms_norm(x) · gate · sigmoid(gate), in x's dtype throughout."""
    return rms_norm(x, scale, eps=eps, offset=0.0) * jax.nn.silu(gate)


def layer_norm(x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, *, eps: float) -> jax.Array:
    """y = (x − mean(x)) / sqrt(var(x) + eps) · scale + bias over the last axis, in x's dtype throughout."""
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    y = centred / jnp.sqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps)
    y = y if scale is None else y * scale
    return y if bias is None else y + bias
