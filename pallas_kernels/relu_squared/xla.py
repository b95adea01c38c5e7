"""Squared rectifier in plain XLA: one fused pass forward, one backward, if XLA does not fuse them further.

Both are computed in float32 and rounded once. The backward reads x only.
"""

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels._tiles import promoted


def unsupported(x: jax.Array) -> str | None:
    """XLA runs every case."""
    return None


def forward(x: jax.Array) -> jax.Array:
    """max(x, 0)², elementwise, in x's dtype."""
    positive = jnp.maximum(x.astype(promoted(x.dtype, jnp.float32)), 0.0)
    return (positive * positive).astype(x.dtype)


def backward(dy: jax.Array, x: jax.Array) -> jax.Array:
    """dx = 2·max(x, 0)·dy, elementwise, in x's dtype."""
    positive = jnp.maximum(x.astype(promoted(x.dtype, jnp.float32)), 0.0)
    return (2.0 * (positive * dy.astype(positive.dtype))).astype(x.dtype)
