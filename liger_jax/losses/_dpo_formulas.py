"""The formulas of `dpo_loss`, one loss for each pair. All arrays are (P,) float32."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from liger_jax.losses._checks import clamp_exponent

DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
LOSS_TYPES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot",
    "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
)  # fmt: skip
# Other divergences leave a β·log Z of the prompt in each score. It cancels only in the difference of a pair's scores.
TYPES_WITH_DIVERGENCE = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft")
SORTING_TYPES = ("aot", "aot_unpaired")
SMOOTHED_TYPES = ("exo_pair", "robust", *SORTING_TYPES)


class Pairs(NamedTuple):
    """What the formulas read of each pair."""

    chosen: jax.Array  # log-ratios r of policy to reference
    rejected: jax.Array
    chosen_score: jax.Array  # r, or its function for another divergence
    rejected_score: jax.Array
    policy_margin: jax.Array  # log-probability of chosen − rejected, under the policy
    reference_margin: jax.Array  # the same under the reference
    chosen_mean: Any  # score over the number of tokens, where a type needs it
    rejected_mean: Any
    sft: Any  # negative log-likelihood of chosen, where a type needs it


def score(log_ratio: jax.Array, divergence: str, alpha: float) -> jax.Array:
    """f'(π/π_ref) of an f-divergence, plus the constant that makes it 0 for equal policies."""
    if divergence == "forward_kl":
        return -jnp.expm1(clamp_exponent(-log_ratio))
    if divergence == "js_divergence":
        return jnp.log(2.0) + jax.nn.log_sigmoid(log_ratio)
    if divergence == "alpha_divergence" and abs(alpha - 1.0) >= 1e-6:  # at 1 its limit is log_ratio
        return jnp.expm1(clamp_exponent((alpha - 1.0) * log_ratio)) / (alpha - 1.0)
    return log_ratio


def smoothed_sigmoid(logits: jax.Array, label_smoothing: float) -> jax.Array:
    """−(1 − ε) log σ(x) − ε log σ(−x)."""
    right, wrong = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
    return -right if label_smoothing == 0 else -(1.0 - label_smoothing) * right - label_smoothing * wrong


def pair_losses(loss_type: str, p: Pairs, beta: float, label_smoothing: float, discopop_tau: float) -> jax.Array:
    """The loss of each pair."""
    sigmoid, log_sigmoid = jax.nn.sigmoid, jax.nn.log_sigmoid
    chosen, rejected = beta * p.chosen, beta * p.rejected
    logits = beta * (p.chosen_score - p.rejected_score)
    match loss_type:
        case "sigmoid":
            return -log_sigmoid(logits)
        case "hinge":
            return jax.nn.relu(1.0 - logits)
        case "ipo":
            return jnp.square(p.chosen_mean - p.rejected_mean - 0.5 / beta)
        case "sigmoid_norm":
            return -log_sigmoid(beta * (p.chosen_mean - p.rejected_mean))
        case "exo_pair":
            right = sigmoid(logits) * (log_sigmoid(logits) - jnp.log1p(-label_smoothing))
            return right + sigmoid(-logits) * (log_sigmoid(-logits) - jnp.log(label_smoothing))
        case "nca_pair":
            return -log_sigmoid(chosen) - 0.5 * log_sigmoid(-chosen) - 0.5 * log_sigmoid(-rejected)
        case "robust":
            clean, flipped = -log_sigmoid(logits), -log_sigmoid(-logits)
            if label_smoothing == 0:
                return clean  # 0 · inf would be NaN
            return ((1.0 - label_smoothing) * clean - label_smoothing * flipped) / (1.0 - 2.0 * label_smoothing)
        case "bco_pair":
            return -log_sigmoid(chosen) - log_sigmoid(-rejected)
        case "sppo_hard":
            return jnp.square(p.chosen - 0.5 / beta) + jnp.square(p.rejected + 0.5 / beta)
        case "aot":
            return smoothed_sigmoid(beta * (jnp.sort(p.policy_margin) - jnp.sort(p.reference_margin)), label_smoothing)
        case "aot_unpaired":
            return smoothed_sigmoid(beta * (jnp.sort(p.chosen) - jnp.sort(p.rejected)), label_smoothing)
        case "apo_zero":
            return sigmoid(-chosen) + sigmoid(rejected)
        case "apo_down":
            return sigmoid(chosen) + sigmoid(rejected - chosen)
        case "discopop":
            share = sigmoid(logits / discopop_tau)
            exponential = jnp.exp(clamp_exponent(-logits))
            return -(1.0 - share) * log_sigmoid(logits) + share * exponential
        case "sft":
            return p.sft
        case _:  # a name in LOSS_TYPES without a formula must not train on another one's
            return jnp.full_like(p.chosen, jnp.nan)
