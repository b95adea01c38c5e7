"""Softmax and sparsemax of the last axis in plain XLA.

Everything is float32 until it is rounded once. The backward of both reads the output only.
Sparsemax finds its threshold by a sort. The sort is exact. It needs no loop, so the devices of a mesh need not agree
on when one ends.
"""

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels._tiles import promoted


def unsupported(x: jax.Array, *, kind: str) -> str | None:
    """XLA runs every case."""
    return None


def _softmax_rows(x: jax.Array) -> jax.Array:
    """exp(x_i − max) / Σ exp(x_j − max) over the last axis, float32 or wider."""
    weights = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    return weights / jnp.sum(weights, axis=-1, keepdims=True)


def _shifted_rows(x: jax.Array) -> jax.Array:
    """max(x − max(x), −1). Sparsemax's threshold is −1 or more, so values below −1 make no difference."""
    return jnp.maximum(x - jnp.max(x, axis=-1, keepdims=True), -1.0)


def _row_gradients(dy: jax.Array, y: jax.Array, *, kind: str) -> jax.Array:
    """dx from dy and the output y, over the last axis, float32 or wider."""
    if kind == "softmax":
        # dx = y·(dy − Σ y·dy / Σ y); rounded, y no longer sums to 1
        return y * (dy - jnp.sum(y * dy, axis=-1, keepdims=True) / jnp.sum(y, axis=-1, keepdims=True))
    # dx = dy − mean(dy) over the support, 0 elsewhere
    support = (y > 0.0).astype(y.dtype)
    mean = jnp.sum(support * dy, axis=-1, keepdims=True) / jnp.sum(support, axis=-1, keepdims=True)
    return support * (dy - mean)


def _sparsemax_rows(x: jax.Array) -> jax.Array:
    """max(x − τ, 0) over the last axis, float32 or wider; τ = (Σ x_j − 1)/k over the k largest, by sorting."""
    x = _shifted_rows(x)
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
    rows_of = _softmax_rows if kind == "softmax" else _sparsemax_rows
    return rows_of(x.astype(promoted(x.dtype, jnp.float32))).astype(x.dtype)


def backward(dy: jax.Array, y: jax.Array, *, kind: str) -> jax.Array:
    """dy, y (..., F) → dx (..., F) in y's dtype."""
    dtype = promoted(y.dtype, jnp.float32)
    return _row_gradients(dy.astype(dtype), y.astype(dtype), kind=kind).astype(y.dtype)
