"""The formulas of gated linear units, element by element, which every backend runs.

Rounding: the activation is computed in float32 and rounded to up's dtype, and then multiplied by up. Both gradients are
float32 until they are rounded once. The backward needs gate and up only: to make the activation again is cheaper than
to keep it.
"""

import math

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels.tiles import in_float32

_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
_LINEAR, _CUBIC = 2 * _SQRT_2_OVER_PI, 2 * _SQRT_2_OVER_PI * 0.044715  # of 2·√(2/π)·(x + 0.044715·x³)
_SHARPNESS, _CLAMP = 1.702, 7.0  # of gpt-oss's unit
_GELU_SATURATION = 64.0  # for |x| from here on, the sigmoid is 0 or 1 to the last bit, in float64 too


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
        # An infinite x² times 1 − σ(z) = 0 would make the slope NaN.
        square = jnp.minimum(x * x, _GELU_SATURATION**2)
        z, slope = x * (_LINEAR + _CUBIC * square), _LINEAR + 3.0 * _CUBIC * square
    sigmoid = jax.lax.logistic(z)
    return x * sigmoid, sigmoid + x * (sigmoid * (1.0 - sigmoid)) * slope


def _clamped_swiglu(gate: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """gpt-oss's g·σ(1.702·g) · (u + 1) with g = min(gate, 7) and u = clip(up, −7, 7), in float32 or wider.

    With it, its derivatives by gate and by up.
    """
    g, u = jnp.minimum(gate, _CLAMP), jnp.clip(up, -_CLAMP, _CLAMP) + 1.0
    sigmoid = jax.lax.logistic(_SHARPNESS * g)
    slope = sigmoid + _SHARPNESS * g * sigmoid * (1.0 - sigmoid)
    by_gate = jnp.where(gate > _CLAMP, 0.0, slope * u)
    return g * sigmoid * u, by_gate, jnp.where(jnp.abs(up) > _CLAMP, 0.0, g * sigmoid)


def product(gate: jax.Array, up: jax.Array, *, activation: str) -> jax.Array:
    """act(gate) · up, elementwise, in up's dtype; gpt-oss's "clamped_swiglu" is rounded once."""
    if activation == "clamped_swiglu":
        return _clamped_swiglu(in_float32(gate), in_float32(up))[0].astype(up.dtype)
    act, _ = activate(in_float32(gate), activation)
    return act.astype(up.dtype) * up


def gradients(dy: jax.Array, gate: jax.Array, up: jax.Array, *, activation: str) -> tuple[jax.Array, jax.Array]:
    """dgate and dup, elementwise, in their primals' dtypes."""
    if activation == "clamped_swiglu":
        _, by_gate, by_up = _clamped_swiglu(in_float32(gate), in_float32(up))
        dy = dy.astype(by_gate.dtype)
        return (dy * by_gate).astype(gate.dtype), (dy * by_up).astype(up.dtype)
    act, slope = activate(in_float32(gate), activation)
    dy = dy.astype(act.dtype)
    return (dy * up.astype(act.dtype) * slope).astype(gate.dtype), (dy * act).astype(up.dtype)


def gradients_and_product(
    dy: jax.Array, gate: jax.Array, up: jax.Array, *, activation: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dgate, dup and act(gate) · up, elementwise: what a feed-forward's backward makes of gate and up."""
    dgate, dup = gradients(dy, gate, up, activation=activation)
    return dgate, dup, product(gate, up, activation=activation)
