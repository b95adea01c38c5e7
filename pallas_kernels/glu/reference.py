"""Gated units as their formulas stand: the oracle of the tests, in whatever precision it is given."""

import jax
import jax.numpy as jnp


def glu(gate: jax.Array, up: jax.Array, *, activation: str) -> jax.Array:
    """act(gate) · up, with act one of "silu", "gelu" (exact) and "gelu_tanh"."""
    if activation == "silu":
        return gate / (1 + jnp.exp(-gate)) * up
    if activation == "gelu":
        return gate * (1 + jax.scipy.special.erf(gate / jnp.sqrt(2.0))) / 2 * up
    inner = jnp.sqrt(2 / jnp.pi) * (gate + 0.044715 * gate**3)
    return gate * (1 + jnp.tanh(inner)) / 2 * up
