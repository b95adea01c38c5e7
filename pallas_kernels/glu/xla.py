"""Gated units in plain XLA: one fused pass in each direction, from the two inputs alone.

The formulas here are also the bodies of the Triton kernels. Rounding: act(gate) in float32, rounded to up's dtype,
times up; the gradients are float32 until they are written.
"""

import math

import jax
import jax.numpy as jnp

_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
_CUBIC = 0.044715


def unsupported(gate: jax.Array, up: jax.Array) -> str | None:
    """XLA runs every case."""
    return None


def activate(a: jax.Array, activation: str) -> tuple[jax.Array, jax.Array]:
    """act(a) and act'(a), in a's dtype."""
    if activation == "silu":
        # silu(a) = a·σ(a);  silu'(a) = σ(a)·(1 + a·(1 − σ(a)))
        s = jax.nn.sigmoid(a)
        return a * s, s * (1.0 + a * (1.0 - s))
    if activation == "gelu":
        # gelu(a) = a·Φ(a);  gelu'(a) = Φ(a) + a·φ(a)
        cdf = 0.5 * (1.0 + jax.lax.erf(a * math.sqrt(0.5)))
        return a * cdf, cdf + a * jnp.exp(-0.5 * a * a) / math.sqrt(2 * math.pi)
    # gelu_tanh(a) = a/2·(1 + t), t = tanh(√(2/π)·(a + c·a³))
    t = jnp.tanh(_SQRT_2_OVER_PI * (a + _CUBIC * a * a * a))
    dt = (1.0 - t * t) * _SQRT_2_OVER_PI * (1.0 + 3.0 * _CUBIC * a * a)
    return 0.5 * a * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * a * dt


def forward(gate: jax.Array, up: jax.Array, *, activation: str) -> jax.Array:
    """gate, up (N, F) → act(gate) · up in up's dtype."""
    act, _ = activate(gate.astype(jnp.promote_types(gate.dtype, jnp.float32)), activation)
    return act.astype(up.dtype) * up


def backward(dy: jax.Array, gate: jax.Array, up: jax.Array, *, activation: str) -> tuple[jax.Array, jax.Array]:
    """dy, gate, up (N, F) → dgate, dup in their dtypes."""
    dtype = jnp.promote_types(gate.dtype, jnp.float32)
    act, slope = activate(gate.astype(dtype), activation)
    dy = dy.astype(dtype)
    dgate = dy * up.astype(dtype) * slope
    return dgate.astype(gate.dtype), (dy * act).astype(up.dtype)
