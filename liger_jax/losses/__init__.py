"""Losses in optax's shapes."""

from liger_jax.losses._classification import (
    softmax_cross_entropy_with_integer_labels as softmax_cross_entropy_with_integer_labels,
)
