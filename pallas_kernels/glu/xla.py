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
_CUBIC = 0.044715
_GELU_FAR = 16.0  # from here on the tanh is ±1 to the last bit, in float64 too


def unsupported(gate: jax.Array, up: jax.Array | None, *, activation: str) -> str | None:
    """XLA runs every case."""
    return None


def activate(x: jax.Array, activation: str) -> tuple[jax.Array, jax.Array]:
    """act(x) and act'(x), for x in float32 or wider; activation is "silu", "gelu" or "gelu_tanh"."""
    if activation == "silu":
        # x·σ(x)      σ(x)·(1 + x·(1 − σ(x)))
        sigmoid = jax.lax.logistic(x)
        return x * sigmoid, sigmoid * (1.0 + x * (1.0 - sigmoid))
    if activation == "gelu":
        # x·Φ(x)      Φ(x) + x·φ(x); erfc keeps the digits of Φ's left tail
        cdf = 0.5 * jax.lax.erfc(-x * math.sqrt(0.5))
        return x * cdf, cdf + x * jnp.exp(-0.5 * x * x) * (0.5 * _SQRT_2_OVER_PI)
    # x·(1 + t)/2      (1 + t)/2 + x·(1 − t²)/2·√(2/π)·(1 + 3·0.044715·x²)      t = tanh(√(2/π)·(x + 0.044715·x³))
    near = jnp.clip(x, -_GELU_FAR, _GELU_FAR)  # a square of more could overflow, and 0·∞ is no slope
    tanh = jnp.tanh(_SQRT_2_OVER_PI * (near + _CUBIC * (near * near * near)))
    half = 0.5 * (1.0 + tanh)
    slope = half + 0.5 * near * (1.0 - tanh * tanh) * (_SQRT_2_OVER_PI * (1.0 + 3.0 * _CUBIC * (near * near)))
    return x * half, slope


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
