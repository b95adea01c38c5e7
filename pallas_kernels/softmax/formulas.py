"""The formulas of softmax and sparsemax that every backend runs, over the last axis.

Everything is float32 until it is rounded once. The backward of both reads the output only.
"""

import jax
import jax.numpy as jnp


def softmax_rows(x: jax.Array) -> jax.Array:
    """exp(x_i − max) / Σ exp(x_j − max) over the last axis, float32 or wider."""
    weights = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    return weights / jnp.sum(weights, axis=-1, keepdims=True)


def shifted_rows(x: jax.Array) -> jax.Array:
    """max(x − max(x), −1). Sparsemax's threshold is −1 or more, so values below −1 make no difference."""
    return jnp.maximum(x - jnp.max(x, axis=-1, keepdims=True), -1.0)


def row_gradients(dy: jax.Array, y: jax.Array, *, kind: str) -> jax.Array:
    """dx from dy and the output y, over the last axis, float32 or wider."""
    if kind == "softmax":
        # dx = y·(dy − Σ y·dy / Σ y); rounded, y no longer sums to 1
        return y * (dy - jnp.sum(y * dy, axis=-1, keepdims=True) / jnp.sum(y, axis=-1, keepdims=True))
    # dx = dy − mean(dy) over the support, 0 elsewhere
    support = (y > 0.0).astype(y.dtype)
    mean = jnp.sum(support * dy, axis=-1, keepdims=True) / jnp.sum(support, axis=-1, keepdims=True)
    return support * (dy - mean)
