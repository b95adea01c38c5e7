"""DPO and its family: losses of preference pairs, against a reference policy or without one."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from liger_jax._tree import tree_dataclass
from liger_jax.losses import _checks, _dpo_formulas
from liger_jax.ops.checks import as_array, check_choice, check_shape

DPO_TYPES, SORTING_TYPES = _dpo_formulas.LOSS_TYPES, _dpo_formulas.SORTING_TYPES
# Which types read an option; for others it must be left out.
READERS = {
    "chosen_tokens": ("ipo", "sigmoid_norm", "sft"),
    "rejected_tokens": ("ipo", "sigmoid_norm"),
    "sft_tokens_per_pair": ("sft",),
    "label_smoothing": _dpo_formulas.SMOOTHED_TYPES,
    "discopop_tau": ("discopop",),
}


@tree_dataclass
class DPOOutput:
    """The results of a loss of preference pairs; train on `losses.mean()`.

    Attributes:
        losses: (P,) float32.
        chosen_rewards: (P,) float32, β times the log-ratio, or log-probability, of chosen; without gradient.
        rejected_rewards: (P,) float32, the same of rejected.
    """

    losses: jax.Array
    chosen_rewards: jax.Array
    rejected_rewards: jax.Array

    @property
    def margins(self) -> jax.Array:
        """(P,) float32, the reward of chosen minus the reward of rejected."""
        return self.chosen_rewards - self.rejected_rewards

    @property
    def accuracy(self) -> jax.Array:
        """() float32, the fraction of pairs whose margin is positive."""
        return jnp.mean((self.margins > 0).astype(jnp.float32))


def dpo_loss(
    chosen: Float[Array, "P"],
    rejected: Float[Array, "P"],
    reference_chosen: Float[Array, "P"] | None = None,
    reference_rejected: Float[Array, "P"] | None = None,
    *,
    chosen_tokens: Integer[Array, "P"] | None = None,
    rejected_tokens: Integer[Array, "P"] | None = None,
    pair_weights: Float[Array, "P"] | None = None,
    beta: float = 0.1,
    loss_type: str | tuple[str, ...] = "sigmoid",
    loss_weights: tuple[float, ...] | None = None,
    label_smoothing: float = 0.0,
    f_divergence: str = "reverse_kl",
    f_alpha: float = 0.5,
    discopop_tau: float = 0.05,
    sft_tokens_per_pair: float | Float[Array, ""] | None = None,
) -> DPOOutput:
    """Direct preference optimisation with TRL's fifteen types of loss, from the log-probabilities of whole responses.

    With r_w = chosen − reference_chosen, r_l = rejected − reference_rejected, s = r for the reverse KL,
    Δ = s_w − s_l, n the numbers of tokens, β = `beta`, ε = `label_smoothing` and σ the logistic function:

    | loss_type | loss of a pair |
    |---|---|
    | "sigmoid" | −log σ(βΔ) |
    | "hinge" | max(0, 1 − βΔ) |
    | "ipo" | (s_w/n_w − s_l/n_l − 1/2β)² |
    | "sigmoid_norm" | −log σ(β (s_w/n_w − s_l/n_l)) |
    | "exo_pair" | σ(βΔ) [log σ(βΔ) − log(1 − ε)] + σ(−βΔ) [log σ(−βΔ) − log ε] |
    | "robust" | [−(1 − ε) log σ(βΔ) + ε log σ(−βΔ)] / (1 − 2ε) |
    | "nca_pair" | −log σ(βr_w) − ½ log σ(−βr_w) − ½ log σ(−βr_l) |
    | "bco_pair" | −log σ(βr_w) − log σ(−βr_l) |
    | "sppo_hard" | (r_w − 1/2β)² + (r_l + 1/2β)² |
    | "apo_zero" | 1 − σ(βr_w) + σ(βr_l) |
    | "apo_down" | σ(βr_w) + 1 − σ(β (r_w − r_l)) |
    | "discopop" | −(1 − q) log σ(βΔ) + q e^(−βΔ), q = σ(βΔ / discopop_tau) |
    | "aot" | −(1 − ε) log σ(βd) − ε log σ(−βd), d the sorted chosen − rejected minus the reference's, sorted |
    | "aot_unpaired" | the same, d the sorted r_w minus the sorted r_l |
    | "sft" | −chosen / mean(chosen_tokens) |

    Without references r is the log-probability itself. `f_divergence` makes s another function of r: "forward_kl" 1 −
    e^(−r), "js_divergence" log 2 + log σ(r), "alpha_divergence" (e^((α−1) r) − 1) / (α − 1). Exponents are clipped at
    80.

    Args:
        chosen: log-probabilities of the preferred responses, summed over their tokens, any float dtype;
            `sequence_log_probs` makes them.
        rejected: the other responses' log-probabilities, of the same shape.
        reference_chosen: the same under the reference policy; None, together with `reference_rejected`, for no
            reference.
        reference_rejected: the same for the other responses.
        chosen_tokens: integers ≥ 1, the number of tokens in each sum; for "ipo", "sigmoid_norm" and "sft" only.
        rejected_tokens: the same for the other responses; for "ipo" and "sigmoid_norm" only.
        pair_weights: factors of the pairs' losses, such as those of `wpo_weights`; not for the types that sort.
        beta: > 0, how strongly the policy is kept near the reference.
        loss_type: a type of the table, or several different ones, whose losses add up.
        loss_weights: a factor for each of several types; None is 1 for each.
        label_smoothing: in [0, 0.5), above 0 for "exo_pair"; for "exo_pair", "robust" and the types that sort only.
        f_divergence: "reverse_kl", "forward_kl", "js_divergence" or "alpha_divergence". "nca_pair", "bco_pair",
            "sppo_hard", "aot", "aot_unpaired", "apo_zero" and "apo_down" need the first.
        f_alpha: α; for "alpha_divergence" only. At 1 it is the reverse KL.
        discopop_tau: > 0; for "discopop" only.
        sft_tokens_per_pair: the denominator of "sft" if the pairs are a micro-batch: the mean of the whole batch's
            `chosen_tokens`. None for the mean of the given ones.

    Returns:
        A `DPOOutput`. With the types that sort, losses are in sorted order.

    Example:
        >>> chosen, rejected = jnp.array([-12.0, -20.0]), jnp.array([-15.0, -18.0])
        >>> output = dpo_loss(chosen, rejected, jnp.array([-13.0, -19.0]), jnp.array([-14.0, -19.0]))
        >>> output.losses.tolist(), output.accuracy.item()
        ([0.598, 0.798], 0.5)

    References:
        Rafailov et al., Direct Preference Optimization, arXiv:2305.18290.
        Types: hinge arXiv:2305.10425, ipo 2310.12036, exo_pair 2402.00856, nca_pair 2402.05369, robust 2403.00409,
        bco_pair 2404.04656, sppo_hard 2405.00675, aot 2406.05882, apo 2408.06266, discopop 2406.08414, sigmoid_norm
        2411.15124, several of them 2411.10442. Divergences: Wang et al., arXiv:2309.16240.
    """
    op = "dpo_loss"
    types = (loss_type,) if isinstance(loss_type, str) else loss_type
    if not isinstance(types, (tuple, list)):
        raise TypeError(f"{op}: loss_type is a {type(types).__name__}, but must be a name or a tuple of names.")
    types = tuple(types)
    _check_dpo_options(op, types, beta, label_smoothing, f_divergence, f_alpha, discopop_tau)
    for name, is_set in dict(
        chosen_tokens=chosen_tokens is not None,
        rejected_tokens=rejected_tokens is not None,
        sft_tokens_per_pair=sft_tokens_per_pair is not None,
        label_smoothing=label_smoothing != 0,
        discopop_tau=discopop_tau != 0.05,
    ).items():
        _checks.check_is_read(op, name, is_set, loss_type, READERS[name])
    _checks.check_denominator(op, sft_tokens_per_pair=sft_tokens_per_pair)
    weights = _loss_weights(op, types, loss_weights)
    chosen, rejected, reference_chosen, reference_rejected, pair_weights = _checks.as_sequences(
        op,
        "reference_chosen",
        "reference_rejected",
        "pair_weights",
        chosen=chosen,
        rejected=rejected,
        reference_chosen=reference_chosen,
        reference_rejected=reference_rejected,
        pair_weights=pair_weights,
    )
    if (reference_chosen is None) != (reference_rejected is None):
        raise ValueError(f"{op}: reference_chosen and reference_rejected belong together; pass both, or neither.")
    if pair_weights is not None and set(types) & set(_dpo_formulas.SORTING_TYPES):
        raise ValueError(
            f"{op}: pair_weights go with no type of {_dpo_formulas.SORTING_TYPES}, which sort the batch and so split "
            f"the pairs; leave them out of loss_type={loss_type!r}."
        )
    tokens = _token_counts(op, types, chosen.shape, chosen_tokens=chosen_tokens, rejected_tokens=rejected_tokens)
    references = (0.0, 0.0) if reference_chosen is None else (reference_chosen, reference_rejected)
    pairs = _pairs(chosen, rejected, references, tokens, sft_tokens_per_pair, f_divergence, f_alpha)
    each = [_dpo_formulas.pair_losses(t, pairs, beta, label_smoothing, discopop_tau) for t in types]
    losses = sum((weight * loss for weight, loss in zip(weights, each, strict=True)), start=jnp.zeros_like(chosen))
    losses = losses if pair_weights is None else pair_weights * losses
    rewards = jax.lax.stop_gradient((beta * pairs.chosen, beta * pairs.rejected))
    return DPOOutput(losses=losses, chosen_rewards=rewards[0], rejected_rewards=rewards[1])


def _check_dpo_options(
    op: str,
    types: tuple[str, ...],
    beta: float,
    label_smoothing: float,
    f_divergence: str,
    f_alpha: float,
    discopop_tau: float,
) -> None:
    if not types:
        raise ValueError(f"{op}: loss_type=() names no type; pass one of {_dpo_formulas.LOSS_TYPES}, or several.")
    for name in types:
        check_choice(op, "loss_type", name, _dpo_formulas.LOSS_TYPES)
        if types.count(name) > 1:
            raise ValueError(
                f"{op}: loss_type={types} names {name!r} twice, whose loss would count twice. Name it once."
            )
    _checks.check_positive(op, beta=beta, discopop_tau=discopop_tau)
    _checks.check_label_smoothing(op, label_smoothing)
    if "exo_pair" in types:
        law = "> 0 for loss_type='exo_pair', whose target is log ε; its paper takes 1e-3"
        _checks.check_number(op, "label_smoothing", label_smoothing, label_smoothing > 0, law)
    check_choice(op, "f_divergence", f_divergence, _dpo_formulas.DIVERGENCES)
    _checks.check_python_numbers(op, f_alpha=f_alpha)
    if f_alpha != 0.5 and f_divergence != "alpha_divergence":
        raise ValueError(
            f"{op}: f_alpha={f_alpha} has no meaning for f_divergence={f_divergence!r}; leave it out, or pass "
            "f_divergence='alpha_divergence'."
        )
    for name in types:
        if f_divergence != "reverse_kl" and name not in _dpo_formulas.TYPES_WITH_DIVERGENCE:
            raise ValueError(
                f"{op}: f_divergence={f_divergence!r} is not defined for loss_type={name!r}, because the prompt's "
                f"constant cancels only in a pair's difference; pass 'reverse_kl', or a type of "
                f"{_dpo_formulas.TYPES_WITH_DIVERGENCE}."
            )


def _loss_weights(op: str, types: tuple[str, ...], weights: Any) -> tuple[float, ...]:
    if weights is None:
        return (1.0,) * len(types)
    if not isinstance(weights, (tuple, list)):
        raise TypeError(f"{op}: loss_weights is a {type(weights).__name__}, but must be a tuple of Python numbers.")
    weights = tuple(weights)
    _checks.check_python_numbers(op, **{f"loss_weights[{i}]": weight for i, weight in enumerate(weights)})
    if len(weights) != len(types):
        raise ValueError(f"{op}: loss_weights={weights} must have a number for each of loss_type={types}.")
    return weights


def _token_counts(op: str, types: tuple[str, ...], shape: tuple[int, ...], **counts: Any) -> list[Any]:
    """The counts in float32. A count that a type needs and that was not passed is an error."""
    result = []
    for name, count in counts.items():
        needy = [t for t in types if t in READERS[name]]
        if count is None and needy:
            raise ValueError(
                f"{op}: loss_type={needy[0]!r} needs {name}, the number of tokens of each response; pass it."
            )
        if count is not None:
            count = as_array(op, name, count)
            check_shape(op, name, count, shape, "one count for each pair")
            _checks.check_counts(op, name, count, "leave such pairs out")
            count = count.astype(jnp.float32)
        result.append(count)
    return result


def _pairs(
    chosen: jax.Array,
    rejected: jax.Array,
    references: tuple[Any, Any],
    tokens: list[Any],
    sft_tokens_per_pair: Any,
    f_divergence: str,
    f_alpha: float,
) -> _dpo_formulas.Pairs:
    ratios = chosen - references[0], rejected - references[1]
    scores = [_dpo_formulas.score(r, f_divergence, f_alpha) for r in ratios]
    means = [None if n is None else s / jnp.maximum(n, 1.0) for s, n in zip(scores, tokens, strict=True)]
    sft = None
    if tokens[0] is not None:
        per_pair = jnp.maximum(jnp.mean(tokens[0]), 1e-6) if sft_tokens_per_pair is None else sft_tokens_per_pair
        sft = -chosen / per_pair
    return _dpo_formulas.Pairs(
        chosen=ratios[0],
        rejected=ratios[1],
        chosen_score=scores[0],
        rejected_score=scores[1],
        policy_margin=chosen - rejected,
        reference_margin=jnp.broadcast_to(jnp.asarray(references[0] - references[1], jnp.float32), chosen.shape),
        chosen_mean=means[0],
        rejected_mean=means[1],
        sft=sft,
    )
