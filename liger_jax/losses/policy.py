"""Losses of policy optimisation: GRPO and its successors."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer

from liger_jax._tree import tree_dataclass
from liger_jax.losses import _checks
from liger_jax.losses._policy_formulas import (
    CLIPPING_TYPES,
    IMPORTANCE_LEVELS,
    SEQUENCE_TYPES,
    Objective,
    k3,
    log_ratio,
    vespo_log_importance,
    vespo_log_ratio,
)
from liger_jax.losses._sequences import Sequences, sequences_of
from liger_jax.losses.policy_batch import checked_policy_weights
from liger_jax.ops.checks import ArrayLike, check_choice, check_shape


@tree_dataclass
class PolicyOutput:
    """The results of `policy_loss`. Train on `loss`; no gradient flows through the others.

    Attributes:
        loss: () float32.
        token_losses: (B, T) float32, the tokens' losses before they are weighted and summed; 0 where a token does not
            count.
        kl: () float32, the mean over counted tokens of the penalty's estimate; 0 without a reference.
        clipped_low: () float32, the fraction of counted tokens with a ratio below the range and a negative advantage.
        clipped_high: () float32, the fraction of counted tokens with a ratio above it and a positive advantage.
    """

    loss: jax.Array
    token_losses: jax.Array
    kl: jax.Array
    clipped_low: jax.Array
    clipped_high: jax.Array


def policy_loss(
    log_probs: Float[Array, "B T"],
    old_log_probs: Float[Array, "B T"] | None,
    advantages: Float[Array, "B"] | Float[Array, "B _"],
    *,
    mask: Bool[Array, "B T"],
    segment_ids: Integer[ArrayLike, "B T"] | None = None,
    num_segments: int | None = None,
    reference_log_probs: Float[Array, "B T"] | None = None,
    importance_ratio: Float[Array, "B _"] | None = None,
    entropy: Float[Array, "B T"] | None = None,
    loss_type: str = "dapo",
    importance_level: str = "token",
    epsilon_low: float | None = None,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    unbiased_kl: bool | None = None,
    sapo_temperatures: tuple[float, float] | None = None,
    vespo_k: tuple[float, float] | None = None,
    vespo_lambda: tuple[float, float] | None = None,
    entropy_coef: float = 0.0,
    max_length: int | None = None,
    denominator: float | Float[Array, ""] | None = None,
    entropy_denominator: float | Float[Array, ""] | None = None,
) -> PolicyOutput:
    """The loss of GRPO and its successors, from the log-probabilities of sampled tokens.

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
    | "vespo" | −sg(e^λ w^k e^(−λw)) A log_probs, k and λ by the sign of A | 1 | counted tokens |
    | "gmpo" | −g A | 1/n_i | B |

    In "vespo", w is the product of a sequence's ratios and of its importance ratios. In "gmpo", g is the geometric mean
    of a sequence's ratios, whose logarithms are clipped, from above at epsilon_high if A > 0, and otherwise from below
    at −epsilon_low.

    A token's loss is multiplied by `importance_ratio`, except for "vespo". Then `beta` · k3 is added, or `beta` · ρ ·
    k3 with `unbiased_kl`, where k3 = e^d − d − 1 and d = reference_log_probs − log_probs. Last, `entropy_coef` times
    the mean entropy is subtracted from the loss. With `importance_level="sequence"`, ρ is exp of the mean log-ratio of
    a sequence's counted tokens (GSPO).

    A row is a sequence. With `segment_ids` rows are packed, and each segment is a sequence: B in the table is then the
    number of segments, and arrays with one number per sequence have the shape (rows, num_segments), as returned by
    `place_segments`. The loss is the same as without packing.

    Where `old_log_probs` is NaN or infinite, or more than 80 below `log_probs`, the token is taken as not scored by the
    sampler. It is treated as on-policy: ρ = 1.

    Only `log_probs` and `entropy` have gradients; all other arrays are constants.

    "dapo" and "bnpo" differ only in the `denominator` that you pass: that of DAPO is the whole step's, over all
    devices.

    Args:
        log_probs: the sampled tokens' log-probabilities under the policy, any float dtype.
        old_log_probs: those under the policy that sampled the tokens. None for log_probs, which is correct if the
            policy has not changed since.
        advantages: one for each sequence, or for each token; `group_advantages` makes them from rewards. Those of a
            packed row's sequences are (B, num_segments).
        mask: bool, which tokens count; values at other tokens have no effect.
        segment_ids: integers that number a packed row's segments from 1, and are 0 at padding, which never counts.
        num_segments: the largest number of segments in a row, a Python int; with `segment_ids` only.
        reference_log_probs: those under the reference; required if `beta` > 0. With 0.0 they are only used for `kl`.
        importance_ratio: factors of the losses, for each token or (B, 1), or (B, num_segments) for packed rows, such as
            the ratio of old policy to sampler, which `importance_sampling_ratio` returns. With a factor of 0, a token
            has no policy loss, but still counts in the denominator and the penalty, as for masks of stale sequences or
            of tokens with low entropy; except for "vespo", where it makes w small. A factor that is not finite counts
            as 1.
        entropy: entropies of the policy at the tokens; with `entropy_coef` only.
        loss_type: a type of the table.
        importance_level: "token" or "sequence"; "vespo" and "gmpo", with their own weights, need "token".
        epsilon_low: in [0, 1), 0.2 if None; for the types that clip. For "gmpo" of the log-ratio, ≥ 0, 0.4 if None.
        epsilon_high: ≥ 0, the value of epsilon_low if None. "cispo" clips the ratio itself at it; the paper uses 5.0,
            far above this default, which is TRL's.
        delta: > 1, the largest ratio if the advantage is negative (dual clip); None for no limit. For the types that
            clip.
        beta: ≥ 0, the weight of the penalty.
        unbiased_kl: whether the penalty is multiplied by ρ, so that its gradient is that of the KL; None for True,
            except for "gmpo", which supports only False.
        sapo_temperatures: > 0, for positive advantages and for the others; (1.0, 1.05) if None. For "sapo" only.
        vespo_k: k > 0, for advantages ≥ 0 and for the others; (2.0, 3.0) if None. For "vespo" only.
        vespo_lambda: λ > 0, for the same; (3.0, 2.0) if None. For "vespo" only.
        entropy_coef: the weight of the entropy bonus.
        max_length: > 0, the largest number of tokens in a completion; for "dr_grpo" only, which requires it.
        denominator: replaces that of the table if micro-batches or devices share a step. Pass the whole step's number
            of counted tokens, of sequences, or of sequences · max_length.
        entropy_denominator: replaces the number of counted tokens in the mean entropy, for the same purpose.

    Returns:
        A `PolicyOutput`. Under jit, the loss is 0 if no token counts, and NaN, like its gradient, if a row has more
        segments than `num_segments`.

    Raises:
        ValueError: outside of jit, the mask counts no token.

    Example:
        >>> log_probs = jnp.array([[-1.0, -2.0, -1.0], [-0.5, -1.0, -1.0]])
        >>> mask = jnp.array([[True, True, True], [True, False, False]])
        >>> policy_loss(log_probs, log_probs - 0.1, jnp.array([1.0, -1.0]), mask=mask).loss
        Array(-0.552, dtype=float32)

    References:
        grpo: Shao et al., arXiv:2402.03300; dr_grpo: arXiv:2503.20783; dapo: arXiv:2503.14476; cispo: arXiv:2506.13585
        and arXiv:2510.13786; sapo: arXiv:2511.20347; sequence ratios: arXiv:2507.18071; luspo: arXiv:2602.05261;
        vespo: arXiv:2602.10693; gmpo: arXiv:2507.20673; delta: arXiv:1912.09729 and arXiv:2505.07291; unbiased_kl:
        arXiv:2512.02556.
    """
    op = "policy_loss"
    check_choice(op, "importance_level", importance_level, IMPORTANCE_LEVELS)
    objective = Objective(
        op, loss_type, epsilon_low, epsilon_high, delta, beta, unbiased_kl, sapo_temperatures, vespo_k, vespo_lambda
    )
    _check_companions(op, beta, reference_log_probs, entropy_coef, entropy, denominator, entropy_denominator)
    if loss_type in SEQUENCE_TYPES and importance_level == "sequence":
        raise ValueError(
            f"{op}: importance_level='sequence' does not go with loss_type={loss_type!r}, which makes a weight of a "
            "sequence from its tokens' ratios; leave it out."
        )
    (log_probs,) = _checks.as_float32(op, log_probs=log_probs)
    if log_probs.ndim != 2:
        raise ValueError(f"{op}: log_probs has shape {log_probs.shape}, but must be (sequences, tokens).")
    old_log_probs = log_probs if old_log_probs is None else old_log_probs
    sequences = sequences_of(op, segment_ids, num_segments, log_probs.shape)
    mask = sequences.tokens(_checks.as_mask(op, "mask", mask, log_probs.shape))
    weights, default = checked_policy_weights(op, mask, loss_type, max_length, sequences)
    old, reference, entropy = _token_arrays(
        op, mask, old_log_probs=old_log_probs, reference_log_probs=reference_log_probs, entropy=entropy
    )
    advantages, importance = _numbers(op, mask, sequences, advantages, importance_ratio)
    old, reference, advantages, importance = jax.lax.stop_gradient((old, reference, advantages, importance))
    log_probs = jnp.where(mask, log_probs, 0.0)
    log_ratios, log_weights = log_ratio(log_probs, old), None
    if importance_level == "sequence":
        log_ratios = sequences.spread(sequences.mean(log_ratios, mask))
    advantages = _to_tokens(sequences, advantages)
    if loss_type in SEQUENCE_TYPES:
        log_weights = _log_weights(objective, sequences, mask, log_ratios, advantages, importance)
    # The weight of a "vespo" sequence has its importance ratios in it.
    importance = None if importance is None or loss_type == "vespo" else _to_tokens(sequences, importance)
    losses = objective.losses(log_ratios, log_probs, advantages, reference, importance, log_weights)
    token_losses = jnp.where(mask, losses, 0.0)
    denominator = default if denominator is None else denominator
    nothing = ~jnp.any(mask) & (denominator == 0)  # a loss of 0, and not 0 / 0
    loss = jnp.sum(weights * token_losses) / jnp.where(nothing, 1.0, denominator)
    if entropy is not None:
        tokens = _num_tokens(mask) if entropy_denominator is None else entropy_denominator
        loss = loss - entropy_coef * jnp.sum(entropy) / tokens
    kl = jnp.zeros((), jnp.float32) if reference is None else jnp.sum(k3(log_probs, reference)) / _num_tokens(mask)
    figures = kl, *_clipped(objective, log_ratios, advantages, mask)
    return _result(loss, token_losses, figures, sequences)


def _result(
    loss: jax.Array, token_losses: jax.Array, figures: Sequence[jax.Array], sequences: Sequences
) -> PolicyOutput:
    """The result, of which the loss alone has a gradient. A row that does not fit makes all numbers NaN."""
    if sequences.ids is not None:
        token_losses = token_losses * sequences.fits()
        figures = [x * jnp.min(sequences.fits()) for x in figures]
    token_losses, (kl, low, high) = jax.lax.stop_gradient((token_losses, figures))
    return PolicyOutput(loss=loss, token_losses=token_losses, kl=kl, clipped_low=low, clipped_high=high)


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
    """Each array that is given in float32, and 0 where a token does not count: what stands there may be inf or NaN."""
    results = _checks.as_float32(op, *arrays, **arrays)
    for name, x in zip(arrays, results, strict=True):
        check_shape(op, name, x, mask.shape, "one number for each token of log_probs")
    return [None if x is None else jnp.where(mask, x, 0.0) for x in results]


def _numbers(
    op: str, mask: jax.Array, sequences: Sequences, advantages: Any, importance_ratio: Any
) -> tuple[jax.Array, Any]:
    """Advantages and ratios as (B, T), or (B, S) of sequences; 0 at tokens that do not count."""
    advantages, importance = _checks.as_float32(
        op, "importance_ratio", advantages=advantages, importance_ratio=importance_ratio
    )
    of_sequences = mask.shape[0], sequences.count
    if of_sequences == mask.shape and sequences.ids is not None:
        raise ValueError(
            f"{op}: num_segments={sequences.count} is the number of tokens in a row, so that numbers of sequences and "
            f"of tokens have one shape; pass num_segments={sequences.count + 1}, and sequences' numbers of that shape."
        )
    short = of_sequences[:1] if sequences.ids is None else of_sequences
    for name, x, shape in (("advantages", advantages, short), ("importance_ratio", importance, of_sequences)):
        if x is not None and x.shape not in (shape, mask.shape):
            raise ValueError(
                f"{op}: {name} has shape {x.shape}, but must have shape {shape} or {mask.shape}: one "
                "for each sequence, or for each token of log_probs."
            )
    masked = lambda x: jnp.where(mask, x, 0.0) if x.shape == mask.shape else x
    advantages = masked(advantages if advantages.ndim == 2 else advantages[:, None])
    return advantages, None if importance is None else masked(importance)


def _to_tokens(sequences: Sequences, x: jax.Array) -> jax.Array:
    """Numbers of sequences or of tokens in a shape that broadcasts to the tokens'."""
    is_of_segments = sequences.ids is not None and x.shape != sequences.ids.shape
    return sequences.spread(x) if is_of_segments else x


def _log_weights(
    objective: Objective, sequences: Sequences, mask: jax.Array, log_ratios: jax.Array, advantages: Any, importance: Any
) -> jax.Array:
    """(B, T), the logarithm of the weight that a sequence's tokens share, of a type of `SEQUENCE_TYPES`."""
    if objective.loss_type == "vespo":
        return sequences.spread(_vespo_log_weights(sequences, mask, log_ratios, importance))
    clipped = jnp.where(mask, objective.clipped_log_ratio(log_ratios, advantages), 0.0)
    return sequences.spread(sequences.mean(clipped, mask))


def _vespo_log_weights(sequences: Sequences, mask: jax.Array, log_ratios: jax.Array, importance: Any) -> jax.Array:
    """(B, S), the logarithm of w: of each sequence's ratios to the sampler, or to the old policy."""
    of_ratios = sequences.sum(jnp.where(mask, vespo_log_ratio(log_ratios), 0.0))
    if importance is None:
        return of_ratios
    logs = vespo_log_importance(importance)
    return of_ratios + (sequences.sum(jnp.where(mask, logs, 0.0)) if logs.shape == mask.shape else logs)


def _clipped(objective: Objective, log_ratios: jax.Array, advantages: jax.Array, mask: jax.Array) -> list[jax.Array]:
    """The shares of counted tokens whose ratio the objective has clipped, below and above."""
    low, high = objective.clip_range
    ratio = jnp.exp(log_ratios)
    if objective.loss_type == "cispo":
        below, above = jnp.zeros_like(mask), (ratio > high) & (advantages > 0)
    elif objective.loss_type == "gmpo":
        below, above = (log_ratios < -low) & (advantages < 0), (log_ratios > high) & (advantages > 0)
    elif objective.loss_type in CLIPPING_TYPES:
        below, above = (ratio < 1.0 - low) & (advantages < 0), (ratio > 1.0 + high) & (advantages > 0)
    else:
        below = above = jnp.zeros_like(mask)
    return [jnp.sum(mask & x).astype(jnp.float32) / _num_tokens(mask) for x in (below, above)]


def _num_tokens(mask: jax.Array) -> jax.Array:
    return jnp.maximum(jnp.sum(mask), 1).astype(jnp.float32)
