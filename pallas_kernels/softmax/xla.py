"""Softmax and sparsemax of the last axis in plain XLA.

Sparsemax finds its threshold by a sort. The sort is exact. It needs no loop, so the devices of a mesh need not agree
on when one ends.
"""

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels._tiles import promoted
from liger_jax.pallas_kernels.softmax import formulas


def unsupported(x: jax.Array, *, kind: str) -> str | None:
    """XLA runs every case."""
    return None


def _sparsemax_rows(x: jax.Array) -> jax.Array:
    """max(x − τ, 0) over the last axis, float32 or wider; τ = (Σ x_j − 1)/k over the k largest, by sorting."""
    x = formulas.shifted_rows(x)
    descending = jnp.sort(x, axis=-1, stable=False, descending=True)
    ranks = jax.lax.broadcasted_iota(x.dtype, x.shape, x.ndim - 1) + 1.0
    # x₍ₖ₎ is in the support if Σ_{j ≤ k} (x₍ⱼ₎ − x₍ₖ₎) < 1. Where x₍ₖ₎ = −1 the sum is 1 or more, in any rounding.
    inside = (1.0 + ranks * descending > jnp.cumsum(descending, axis=-1)) & (descending > -1.0)
    total = jnp.sum(jnp.where(inside, descending, 0.0), axis=-1, keepdims=True)
    threshold = (total - 1.0) / jnp.sum(inside.astype(x.dtype), axis=-1, keepdims=True)
    return jnp.maximum(x - threshold, 0.0)


def forward(x: jax.Array, *, kind: str) -> jax.Array:
    """x (..., F) → y (..., F) in x's dtype; kind is "softmax" or "sparsemax"."""
    if not x.size:
        return x
    rows_of = formulas.softmax_rows if kind == "softmax" else _sparsemax_rows
    return rows_of(x.astype(promoted(x.dtype, jnp.float32))).astype(x.dtype)


def backward(dy: jax.Array, y: jax.Array, *, kind: str) -> jax.Array:
    """dy, y (..., F) → dx (..., F) in y's dtype."""
    dtype = promoted(y.dtype, jnp.float32)
    return formulas.row_gradients(dy.astype(dtype), y.astype(dtype), kind=kind).astype(y.dtype)
