"""Gated linear units as their formulas stand: the oracle of the tests, in whatever precision it is given."""

import jax
import jax.numpy as jnp


def gated(gate: jax.Array, up: jax.Array | None = None, *, activation: str) -> jax.Array:
    """act(gate) · up; act is x·σ(x), x·Φ(x), or x·Φ(x) with Φ(x) ≈ (1 + tanh(√(2/π)·(x + 0.044715·x³)))/2.

    Without `up`, gate holds both side by side.
    """
    if up is None:
        gate, up = jnp.split(gate, 2, axis=-1)
    if activation == "silu":
        return gate / (1 + jnp.exp(-gate)) * up
    if activation == "gelu":
        return gate * (1 + jax.scipy.special.erf(gate / jnp.sqrt(2.0).astype(gate.dtype))) / 2 * up
    inner = (2 / jnp.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    return gate * (1 + jnp.tanh(inner)) / 2 * up
