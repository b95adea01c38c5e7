"""Losses in optax's shapes, and a language model's from hidden states and head."""

from liger_jax.losses._classification import (
    softmax_cross_entropy_with_integer_labels as softmax_cross_entropy_with_integer_labels,
)
from liger_jax.losses._language_model import causal_lm_loss as causal_lm_loss
from liger_jax.losses._language_model import shifted_labels as shifted_labels
