"""The unfused formula: the oracle of the tests, in whatever precision it is given."""

import jax

from liger_jax.pallas_kernels.cross_entropy import reference


def linear_cross_entropy(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    token_weights: jax.Array,
    bias: jax.Array | None = None,
    class_weights: jax.Array | None = None,
    **options: str | float | None,
) -> jax.Array:
    """`cross_entropy(hidden · weightᵀ + bias)`; hidden (N, D), weight (V, D), labels and token_weights (N,)."""
    logits = hidden @ weight.T
    logits = logits if bias is None else logits + bias[None, :]
    return reference.cross_entropy(logits, labels, token_weights, class_weights, **options)
