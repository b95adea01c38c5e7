"""Gated linear units in plain XLA: one fused pass forward, one backward, if XLA does not fuse them further."""

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels.glu import formulas


def forward(gate: jax.Array, up: jax.Array | None, *, activation: str) -> jax.Array:
    """gate, up (..., F), or both side by side in gate (..., 2F) → act(gate) · up in up's dtype."""
    if up is None:
        gate, up = jnp.split(gate, 2, axis=-1)
    return formulas.product(gate, up, activation=activation)


def backward(
    dy: jax.Array, gate: jax.Array, up: jax.Array | None, *, activation: str
) -> tuple[jax.Array, jax.Array | None]:
    """dy, gate, up (..., F) → dgate, dup in their primals' dtypes; where up is None, both side by side, and None."""
    if up is not None:
        return formulas.gradients(dy, gate, up, activation=activation)
    both = formulas.gradients(dy, *jnp.split(gate, 2, axis=-1), activation=activation)
    return jnp.concatenate(both, axis=-1), None
