"""Losses in optax's shapes: of classes, language models, preferences, policies and distillation."""

from liger_jax.losses._classification import (
    softmax_cross_entropy_with_integer_labels as softmax_cross_entropy_with_integer_labels,
)
from liger_jax.losses._language_model import causal_lm_loss as causal_lm_loss
from liger_jax.losses._language_model import shifted_labels as shifted_labels
from liger_jax.losses.distillation import cosine_distance as cosine_distance
from liger_jax.losses.distillation import js_divergence as js_divergence
from liger_jax.losses.distillation import kl_divergence as kl_divergence
from liger_jax.losses.distillation import tv_distance as tv_distance
from liger_jax.losses.policy import PolicyOutput as PolicyOutput
from liger_jax.losses.policy import policy_loss as policy_loss
from liger_jax.losses.policy import policy_token_loss as policy_token_loss
from liger_jax.losses.policy_batch import group_advantages as group_advantages
from liger_jax.losses.policy_batch import policy_weights as policy_weights
from liger_jax.losses.preference import DPOOutput as DPOOutput
from liger_jax.losses.preference import dpo_loss as dpo_loss
from liger_jax.losses.reference_free import cpo_loss as cpo_loss
from liger_jax.losses.reference_free import orpo_loss as orpo_loss
from liger_jax.losses.reference_free import simpo_loss as simpo_loss
from liger_jax.losses.sequences import sequence_log_probs as sequence_log_probs
from liger_jax.losses.sequences import wpo_weights as wpo_weights
from liger_jax.losses.unpaired import KTOOutput as KTOOutput
from liger_jax.losses.unpaired import kto_loss as kto_loss
