"""The unfused formula: the oracle of the tests, in whatever precision it is given."""

import jax
import jax.numpy as jnp

from tests.ops.references import cross_entropy as reference


def linear_cross_entropy(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    token_weights: jax.Array,
    bias: jax.Array | None = None,
    class_weights: jax.Array | None = None,
    **options: str | float | bool | None,
) -> jax.Array:
    """`cross_entropy(hidden · weightᵀ + bias)`; hidden (N, D), weight (V, D), labels and token_weights (N,)."""
    logits = hidden @ weight.T
    logits = logits if bias is None else logits + bias[None, :]
    return reference.cross_entropy(logits, labels, token_weights, class_weights, **options)


def linear_log_probs(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """log p_y, −Σ p·log p and log Σ p², each (N,); hidden (N, D), weight (V, D), labels (N,)."""
    logits = hidden @ weight.T
    logits = logits if bias is None else logits + bias[None, :]
    logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    log_p = jax.nn.log_softmax(scale * logits, axis=1)
    p = jnp.exp(log_p)
    of_labels = jnp.take_along_axis(log_p, labels[:, None], axis=1)[:, 0]
    return of_labels, -jnp.sum(p * log_p, axis=1), jnp.log(jnp.sum(p * p, axis=1))
