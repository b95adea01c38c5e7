"""Gated linear units in plain XLA: one fused pass forward, one backward, if XLA does not fuse them further.

The formulas here are also the bodies of the Triton kernels. The activation is computed in float32 and rounded to
up's dtype, then multiplied by up; both gradients are float32 until they are rounded once. The backward reads gate and
up only: the activation is cheaper to make again than to keep.
"""

import math

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels._tiles import promoted

_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
_LINEAR, _CUBIC = 2 * _SQRT_2_OVER_PI, 2 * _SQRT_2_OVER_PI * 0.044715
_GELU_FAR = 64.0  # from here on the sigmoid is 0 or 1 to the last bit, in float64 too


def unsupported(gate: jax.Array, up: jax.Array | None, *, activation: str) -> str | None:
    """XLA runs every case."""
    return None


def activate(x: jax.Array, activation: str) -> tuple[jax.Array, jax.Array]:
    """act(x) and act'(x), for x in float32 or wider; activation is "silu", "gelu" or "gelu_tanh"."""
    if activation == "gelu":
        # x·Φ(x)      Φ(x) + x·φ(x); erfc keeps the digits of Φ's left tail
        cdf = 0.5 * jax.lax.erfc(-x * math.sqrt(0.5))
        return x * cdf, cdf + x * jnp.exp(-0.5 * x * x) * (0.5 * _SQRT_2_OVER_PI)
    # x·σ(z)      σ(z) + x·σ(z)·(1 − σ(z))·z'; for "gelu_tanh", (1 + tanh(z/2))/2 = σ(z), which keeps the left tail
    z, slope = x, 1.0
    if activation == "gelu_tanh":
        # z = 2·√(2/π)·(x + 0.044715·x³)
        square = jnp.minimum(x * x, _GELU_FAR**2)  # infinity times the 0 of 1 − σ(z) were no slope
        z, slope = x * (_LINEAR + _CUBIC * square), _LINEAR + 3.0 * _CUBIC * square
    sigmoid = jax.lax.logistic(z)
    return x * sigmoid, sigmoid + x * (sigmoid * (1.0 - sigmoid)) * slope


def product(gate: jax.Array, up: jax.Array, *, activation: str) -> jax.Array:
    """act(gate) · up, elementwise, in up's dtype."""
    act, _ = activate(_widened(gate), activation)
    return act.astype(up.dtype) * up


def gradients(dy: jax.Array, gate: jax.Array, up: jax.Array, *, activation: str) -> tuple[jax.Array, jax.Array]:
    """dgate and dup, elementwise, in their primals' dtypes."""
    act, slope = activate(_widened(gate), activation)
    dy = dy.astype(act.dtype)
    return (dy * up.astype(act.dtype) * slope).astype(gate.dtype), (dy * act).astype(up.dtype)


def gradients_and_product(
    dy: jax.Array, gate: jax.Array, up: jax.Array, *, activation: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dgate, dup and act(gate) · up, elementwise: what a feed-forward's backward makes of gate and up."""
    dgate, dup = gradients(dy, gate, up, activation=activation)
    return dgate, dup, product(gate, up, activation=activation)


def _widened(gate: jax.Array) -> jax.Array:
    return gate.astype(promoted(gate.dtype, jnp.float32))


def forward(gate: jax.Array, up: jax.Array | None, *, activation: str) -> jax.Array:
    """gate, up (..., F), or both side by side in gate (..., 2F) → act(gate) · up in up's dtype."""
    if up is None:
        gate, up = jnp.split(gate, 2, axis=-1)
    return product(gate, up, activation=activation)


def backward(
    dy: jax.Array, gate: jax.Array, up: jax.Array | None, *, activation: str
) -> tuple[jax.Array, jax.Array | None]:
    """dy, gate, up (..., F) → dgate, dup in their primals' dtypes; side by side and None as `forward`'s inputs."""
    if up is not None:
        return gradients(dy, gate, up, activation=activation)
    both = gradients(dy, *jnp.split(gate, 2, axis=-1), activation=activation)
    return jnp.concatenate(both, axis=-1), None
