"""Losses of policy optimisation: GRPO and its successors."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from liger_jax._tree import tree_dataclass
from liger_jax.losses import _checks
from liger_jax.losses._policy_formulas import CLIPPING_TYPES, Objective, k3, log_ratio
from liger_jax.losses.policy_batch import checked_policy_weights
from liger_jax.ops._checks import check_choice, check_shape

IMPORTANCE_LEVELS = ("token", "sequence")


@tree_dataclass
class PolicyOutput:
    """The results of `policy_loss`. Train on `loss`; no gradient flows through the others.

    Attributes:
        loss: () float32.
        token_losses: (B, T) float32, the tokens' losses before weights and sum; 0 where a token does not count.
        kl: () float32, the mean over counted tokens of the penalty's estimate; 0 without a reference.
        clipped_low: () float32, the share of counted tokens with a ratio below the range and a negative advantage.
        clipped_high: () float32, the share of counted tokens with a ratio above it and a positive advantage.
    """

    loss: jax.Array
    token_losses: jax.Array
    kl: jax.Array
    clipped_low: jax.Array
    clipped_high: jax.Array


def policy_token_loss(
    log_probs: Float[Array, "*N"],
    old_log_probs: Float[Array, "*N"],
    advantages: Float[Array, "*N"],
    reference_log_probs: Float[Array, "*N"] | None = None,
    importance_ratio: Float[Array, "*N"] | None = None,
    *,
    loss_type: str = "dapo",
    importance_level: str = "token",
    epsilon_low: float | None = None,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    unbiased_kl: bool = True,
    sapo_temperatures: tuple[float, float] | None = None,
) -> Float[Array, "*N"]:
    """The policy loss of single tokens, elementwise: `policy_loss` where it is separable by token.

    A loss is separable if a token's loss depends on this token alone. Its gradients can then be made together with the
    logits, chunk by chunk. `policy_weights` gives the weights and the denominator of the sum:
    `sum(weights * policy_token_loss(...)) / denominator`. An entropy bonus −c · entropy is separable, too.

    | loss | separable |
    |---|---|
    | "grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo" with token ratios | yes |
    | the same with `importance_level="sequence"` (GSPO) | no: the ratio of a token depends on its whole sequence |

    Args:
        log_probs: the tokens' log-probabilities under the policy, any float dtype and shape.
        old_log_probs: those under the policy that sampled them, of the same shape, as all other arrays. The ratio is 1
            where they are not finite or more than 80 below, as in `policy_loss`.
        advantages: the advantage at each token.
        reference_log_probs: those under the reference; with `beta` > 0 only.
        importance_ratio: factors of the losses, such as the ratio of `old_log_probs` to the sampler's. A factor that is
            not finite counts as 1; 0 leaves a token out.
        loss_type: a type of `policy_loss`; "grpo", "bnpo", "dr_grpo" and "luspo" are "dapo" at a single token.
        importance_level: "token"; "sequence" is refused.
        epsilon_low: as in `policy_loss`.
        epsilon_high: as in `policy_loss`.
        delta: the largest ratio where the advantage is negative.
        beta: the weight of the reference's penalty.
        unbiased_kl: whether the penalty is multiplied by the ratio.
        sapo_temperatures: the temperatures of "sapo".

    Returns:
        float32, the shape of `log_probs`.

    Raises:
        TypeError: a dtype is wrong, or an option is no Python number.
        ValueError: shapes differ, a number breaks its law, the type is unknown, or does not read an option, the loss is
            not separable, or a reference is missing or not read.

    Example:
        >>> policy_token_loss(jnp.array([-1.0, -2.0]), jnp.array([-1.5, -1.5]), jnp.array([1.0, -1.0])).tolist()
        [-1.2, 0.8]

    References:
        As `policy_loss`.
    """
    op = "policy_token_loss"
    check_choice(op, "importance_level", importance_level, IMPORTANCE_LEVELS)
    if importance_level == "sequence":
        raise ValueError(
            f"{op}: importance_level='sequence' is not separable by token, because a token's ratio depends on its "
            "whole sequence; use policy_loss on the tokens' log-probabilities."
        )
    objective = Objective(op, loss_type, epsilon_low, epsilon_high, delta, beta, unbiased_kl, sapo_temperatures)
    if (reference_log_probs is None) != (beta == 0):
        cure = "pass beta > 0" if beta == 0 else "pass it, or beta=0.0"
        raise ValueError(f"{op}: reference_log_probs belongs to beta > 0, but beta={beta}; {cure}.")
    arrays = dict(
        log_probs=log_probs,
        old_log_probs=old_log_probs,
        advantages=advantages,
        reference_log_probs=reference_log_probs,
        importance_ratio=importance_ratio,
    )
    log_probs, old_log_probs, advantages, reference, importance = _checks.as_float32(op, **arrays)
    for name, x in zip(arrays, (log_probs, old_log_probs, advantages, reference, importance), strict=True):
        check_shape(op, name, x, log_probs.shape, "one number for each token of log_probs")
    return objective.losses(log_ratio(log_probs, old_log_probs), log_probs, advantages, reference, importance)


def policy_loss(
    log_probs: Float[Array, "B T"],
    old_log_probs: Float[Array, "B T"] | None,
    advantages: Float[Array, "B"] | Float[Array, "B T"],
    *,
    mask: Bool[Array, "B T"],
    reference_log_probs: Float[Array, "B T"] | None = None,
    importance_ratio: Float[Array, "B #T"] | None = None,
    entropy: Float[Array, "B T"] | None = None,
    loss_type: str = "dapo",
    importance_level: str = "token",
    epsilon_low: float | None = None,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    unbiased_kl: bool = True,
    sapo_temperatures: tuple[float, float] | None = None,
    entropy_coef: float = 0.0,
    max_length: int | None = None,
    denominator: float | Float[Array, ""] | None = None,
    entropy_denominator: float | Float[Array, ""] | None = None,
) -> PolicyOutput:
    """GRPO's loss and its successors', from the log-probabilities of sampled tokens.

    With ρ = exp(log_probs − old_log_probs), A = advantages, n_i the number of counted tokens of sequence i and
    sg(x) = x without gradient, the loss is the weighted sum of the counted tokens' losses over a denominator:

    | loss_type | loss of a token | weight | denominator |
    |---|---|---|---|
    | "dapo", "bnpo" | −min(min(ρ, δ) A, clip(ρ, 1 − epsilon_low, 1 + epsilon_high) A) | 1 | counted tokens |
    | "grpo" | the same | 1/n_i | B |
    | "dr_grpo" | the same | 1 | B · max_length |
    | "luspo" | the same | 1 | B |
    | "cispo" | −sg(min(ρ, epsilon_high)) A log_probs | 1 | counted tokens |
    | "sapo" | −(4/τ) σ(τ (ρ − 1)) A, τ by the sign of A | 1/n_i | B |

    A token's loss is multiplied by `importance_ratio`. Then `beta` · k3 is added, or `beta` · ρ · k3 with
    `unbiased_kl`, where k3 = e^d − d − 1 and d = reference_log_probs − log_probs. Last, `entropy_coef` times the mean
    entropy is taken off the loss. With `importance_level="sequence"`, ρ is exp of the mean log-ratio of a
    sequence's counted tokens (GSPO).

    Where `old_log_probs` is NaN or infinite, or more than 80 below `log_probs`, the sampler has not scored the token.
    Such a token counts like a fresh sample's: ρ = 1.

    "dapo" and "bnpo" differ only in the `denominator` that is passed: DAPO's is the whole step's on all devices.

    Args:
        log_probs: the sampled tokens' log-probabilities under the policy, any float dtype.
        old_log_probs: those under the policy that sampled them. None stands for log_probs without gradient, which is
            right if the policy has not changed since.
        advantages: one for each sequence, or for each token; `group_advantages` makes them from rewards.
        mask: bool, which tokens count; values at other tokens have no effect.
        reference_log_probs: those under the reference; `beta` > 0 needs them. With 0.0 they only make `kl`.
        importance_ratio: factors of the losses, for each token or (B, 1), such as old policy over sampler, truncated.
            A factor of 0 leaves a token out, whatever its advantage, and keeps it in the denominator and the penalty,
            as masks of stale sequences or of tokens with low entropy do. A factor that is not finite counts as 1.
        entropy: entropies of the policy at the tokens; with `entropy_coef` only.
        loss_type: a type of the table.
        importance_level: "token" or "sequence".
        epsilon_low: in [0, 1), 0.2 if None; for the types that clip.
        epsilon_high: ≥ 0, as epsilon_low if None. "cispo" clips the ratio itself at it: its paper's 5.0 is far above
            this default, TRL's.
        delta: > 1, the largest ratio where the advantage is negative (dual clip); None sets none. For the types
            that clip.
        beta: ≥ 0, the weight of the penalty.
        unbiased_kl: whether the penalty is multiplied by ρ, so that its gradient is the KL's.
        sapo_temperatures: > 0, of positive advantages and of the others; (1.0, 1.05) if None. For "sapo" only.
        entropy_coef: the weight of the entropy bonus.
        max_length: > 0, the longest completion that is sampled; for "dr_grpo" only, which needs it.
        denominator: replaces the table's where micro-batches or devices share a step. Pass the whole step's number of
            counted tokens, of sequences, or of sequences · max_length.
        entropy_denominator: replaces the number of counted tokens in the mean entropy, for the same purpose.

    Returns:
        A `PolicyOutput`. Without any counted token the loss is 0, under jit.

    Raises:
        TypeError: a dtype is wrong, or an option is no Python number.
        ValueError: shapes differ, a number breaks its law, the type is unknown, lacks what it needs or is given what it
            does not read, or the mask counts no token, outside of jit.

    Example:
        >>> log_probs = jnp.array([[-1.0, -2.0, -1.0], [-0.5, -1.0, -1.0]])
        >>> mask = jnp.array([[True, True, True], [True, False, False]])
        >>> policy_loss(log_probs, log_probs - 0.1, jnp.array([1.0, -1.0]), mask=mask).loss
        Array(-0.552, dtype=float32)

    References:
        grpo: Shao et al., arXiv:2402.03300; dr_grpo: arXiv:2503.20783; dapo: arXiv:2503.14476; cispo: arXiv:2506.13585
        and arXiv:2510.13786; sapo: arXiv:2511.20347; sequence ratios: arXiv:2507.18071; luspo: arXiv:2602.05261;
        delta: arXiv:1912.09729 and arXiv:2505.07291; unbiased_kl: arXiv:2512.02556.
    """
    op = "policy_loss"
    check_choice(op, "importance_level", importance_level, IMPORTANCE_LEVELS)
    objective = Objective(op, loss_type, epsilon_low, epsilon_high, delta, beta, unbiased_kl, sapo_temperatures)
    _check_companions(op, beta, reference_log_probs, entropy_coef, entropy, denominator, entropy_denominator)
    (log_probs,) = _checks.as_float32(op, log_probs=log_probs)
    if log_probs.ndim != 2:
        raise ValueError(f"{op}: log_probs has shape {log_probs.shape}, but must be (sequences, tokens).")
    old_log_probs = jax.lax.stop_gradient(log_probs) if old_log_probs is None else old_log_probs
    mask = _checks.as_mask(op, "mask", mask, log_probs.shape)
    weights, default = checked_policy_weights(op, mask, loss_type, max_length)
    old, reference, entropy = _token_arrays(
        op, mask, old_log_probs=old_log_probs, reference_log_probs=reference_log_probs, entropy=entropy
    )
    advantages, importance = _columns(op, mask, advantages, importance_ratio)
    log_probs = jnp.where(mask, log_probs, 0.0)
    log_ratios = log_ratio(log_probs, old)
    if importance_level == "sequence":
        num_tokens = jnp.maximum(jnp.sum(mask, axis=1, keepdims=True), 1).astype(jnp.float32)
        log_ratios = jnp.sum(log_ratios, axis=1, keepdims=True) / num_tokens
    token_losses = jnp.where(mask, objective.losses(log_ratios, log_probs, advantages, reference, importance), 0.0)
    loss = jnp.sum(weights * token_losses) / (default if denominator is None else denominator)
    if entropy is not None:
        tokens = _num_tokens(mask) if entropy_denominator is None else entropy_denominator
        loss = loss - entropy_coef * jnp.sum(entropy) / tokens
    clipped = _clipped(objective, log_ratios, advantages, mask)
    kl = jnp.zeros((), jnp.float32) if reference is None else jnp.sum(k3(log_probs, reference)) / _num_tokens(mask)
    token_losses, kl, clipped = jax.lax.stop_gradient((token_losses, kl, clipped))
    return PolicyOutput(loss=loss, token_losses=token_losses, kl=kl, clipped_low=clipped[0], clipped_high=clipped[1])


def _check_companions(
    op: str, beta: float, reference: Any, entropy_coef: float, entropy: Any, denominator: Any, entropy_denominator: Any
) -> None:
    if beta > 0 and reference is None:
        raise ValueError(f"{op}: beta={beta} needs reference_log_probs; pass them, or beta=0.0.")
    _checks.check_python_numbers(op, entropy_coef=entropy_coef)
    if (entropy is None) != (entropy_coef == 0):
        cure = "pass entropy_coef" if entropy_coef == 0 else "pass the tokens' entropies, or entropy_coef=0.0"
        raise ValueError(f"{op}: entropy belongs to entropy_coef, which is {entropy_coef}; {cure}.")
    if entropy is None and entropy_denominator is not None:
        raise ValueError(f"{op}: entropy_denominator has no meaning without entropy; leave it out, or pass entropy.")
    _checks.check_denominator(op, denominator=denominator, entropy_denominator=entropy_denominator)


def _token_arrays(op: str, mask: jax.Array, **arrays: Any) -> list[Any]:
    """Each array in float32, and 0 where a token does not count: what stands there may be inf or NaN."""
    results = _checks.as_float32(op, **arrays)
    for name, x in zip(arrays, results, strict=True):
        check_shape(op, name, x, mask.shape, "one number for each token of log_probs")
    return [None if x is None else jnp.where(mask, x, 0.0) for x in results]


def _columns(op: str, mask: jax.Array, advantages: Any, importance_ratio: Any) -> tuple[jax.Array, Any]:
    """Advantages and ratios as (B, T) or (B, 1)."""
    advantages, importance = _checks.as_float32(op, advantages=advantages, importance_ratio=importance_ratio)
    columns = (mask.shape[0], 1)
    if advantages.shape not in (columns[:1], mask.shape):
        raise ValueError(
            f"{op}: advantages has shape {advantages.shape}, but must have shape {columns[:1]} or {mask.shape}: one "
            "for each sequence, or for each token of log_probs."
        )
    if importance is not None and importance.shape not in (columns, mask.shape):
        raise ValueError(
            f"{op}: importance_ratio has shape {importance.shape}, but must have shape {columns} or {mask.shape}: one "
            "for each sequence, or for each token of log_probs."
        )
    masked = lambda x: jnp.where(mask, x, 0.0) if x.shape == mask.shape else x
    advantages = masked(advantages if advantages.ndim == 2 else advantages[:, None])
    return advantages, None if importance is None else masked(importance)


def _clipped(objective: Objective, log_ratios: jax.Array, advantages: jax.Array, mask: jax.Array) -> list[jax.Array]:
    """The shares of counted tokens whose ratio the objective has clipped, below and above."""
    low, high = objective.clip_range
    ratio = jnp.exp(log_ratios)
    if objective.loss_type == "cispo":
        below, above = jnp.zeros_like(mask), (ratio > high) & (advantages > 0)
    elif objective.loss_type in CLIPPING_TYPES:
        below, above = (ratio < 1.0 - low) & (advantages < 0), (ratio > 1.0 + high) & (advantages > 0)
    else:
        below = above = jnp.zeros_like(mask)
    return [jnp.sum(mask & x).astype(jnp.float32) / _num_tokens(mask) for x in (below, above)]


def _num_tokens(mask: jax.Array) -> jax.Array:
    return jnp.maximum(jnp.sum(mask), 1).astype(jnp.float32)
