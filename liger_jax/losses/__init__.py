"""Losses in optax's shapes: of classes, language models, preferences, policies and distillation.

All compute in float32. All raise a `TypeError` where a dtype or the type of an option is wrong, and a `ValueError`
where shapes do not fit, a number is out of its range, a choice is unknown, or an argument is missing or would be
ignored. The message names argument, value, rule and cure. What else a function raises is in its own "Raises".
"""

from liger_jax.losses._classification import (
    softmax_cross_entropy_with_integer_labels as softmax_cross_entropy_with_integer_labels,
)
from liger_jax.losses._language_model import causal_lm_loss as causal_lm_loss
from liger_jax.losses._language_model import shifted_labels as shifted_labels
from liger_jax.losses.distillation import cosine_distance as cosine_distance
from liger_jax.losses.distillation import forward_kl as forward_kl
from liger_jax.losses.distillation import gkd_loss as gkd_loss
from liger_jax.losses.distillation import js_divergence as js_divergence
from liger_jax.losses.distillation import kl_divergence as kl_divergence
from liger_jax.losses.distillation import reverse_kl as reverse_kl
from liger_jax.losses.distillation import tv_distance as tv_distance
from liger_jax.losses.policy import PolicyOutput as PolicyOutput
from liger_jax.losses.policy import policy_loss as policy_loss
from liger_jax.losses.policy_batch import group_advantages as group_advantages
from liger_jax.losses.policy_batch import mask_truncated as mask_truncated
from liger_jax.losses.policy_batch import policy_weights as policy_weights
from liger_jax.losses.policy_batch import reinforce_advantages as reinforce_advantages
from liger_jax.losses.policy_batch import reverse_kl_advantages as reverse_kl_advantages
from liger_jax.losses.policy_token import policy_token_loss as policy_token_loss
from liger_jax.losses.preference import DPOOutput as DPOOutput
from liger_jax.losses.preference import dpo_loss as dpo_loss
from liger_jax.losses.reference_free import alphapo_loss as alphapo_loss
from liger_jax.losses.reference_free import cpo_loss as cpo_loss
from liger_jax.losses.reference_free import orpo_loss as orpo_loss
from liger_jax.losses.reference_free import simpo_loss as simpo_loss
from liger_jax.losses.sampler import importance_sampling_ratio as importance_sampling_ratio
from liger_jax.losses.segments import place_segments as place_segments
from liger_jax.losses.segments import spread_segments as spread_segments
from liger_jax.losses.segments import take_segments as take_segments
from liger_jax.losses.sequences import sequence_log_probs as sequence_log_probs
from liger_jax.losses.sequences import wpo_weights as wpo_weights
from liger_jax.losses.unpaired import KTOOutput as KTOOutput
from liger_jax.losses.unpaired import RunningBaseline as RunningBaseline
from liger_jax.losses.unpaired import kto_loss as kto_loss
from liger_jax.losses.unpaired import running_baseline as running_baseline
