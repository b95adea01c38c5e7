"""Softmax and sparsemax as their formulas stand: the oracle of the tests, in whatever precision it is given."""

import jax
import jax.numpy as jnp


def softmax(x: jax.Array, axis: int = -1) -> jax.Array:
    """exp(x_i) / Σ exp(x_j)."""
    weights = jnp.exp(x - jax.lax.stop_gradient(jnp.max(x, axis=axis, keepdims=True)))
    return weights / jnp.sum(weights, axis=axis, keepdims=True)


def sparsemax(x: jax.Array, axis: int = -1) -> jax.Array:
    """max(x_i − τ, 0), with τ = (Σ x_j − 1)/k over the k largest x, for the largest k with 1 + k·x₍ₖ₎ > their sum."""
    x = jnp.moveaxis(x, axis, -1)
    descending = jnp.flip(jnp.sort(x, axis=-1), axis=-1)
    sums, ranks = jnp.cumsum(descending, axis=-1), jnp.cumsum(jnp.ones_like(x), axis=-1)
    largest = 1 + ranks * descending > sums
    threshold = jnp.sum(jnp.where(largest, descending, 0), axis=-1, keepdims=True) - 1
    threshold /= jnp.sum(jnp.where(largest, 1.0, 0.0), axis=-1, keepdims=True).astype(x.dtype)
    return jnp.moveaxis(jnp.where(x > threshold, x - threshold, 0), -1, axis)
