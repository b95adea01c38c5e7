"""Losses of preference pairs that need no reference policy: ORPO, CPO, SimPO and AlphaPO."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from liger_jax.losses import _checks
from liger_jax.losses._dpo_formulas import score, smoothed_sigmoid
from liger_jax.losses.preference import DPOOutput
from liger_jax.ops.checks import check_choice, check_shape

CPO_TYPES = ("sigmoid", "hinge", "ipo")


def orpo_loss(
    chosen: Float[Array, "P"], rejected: Float[Array, "P"], chosen_nll: Float[Array, "*P"], *, beta: float = 0.1
) -> DPOOutput:
    """Odds ratio preference optimisation: the NLL of chosen, plus a loss of the odds of chosen against rejected.

    loss = chosen_nll − β log σ(log odds(chosen) − log odds(rejected)), where log odds(a) = a − log(1 − e^a) of the mean
    log-probability a of a response's tokens.

    Args:
        chosen: mean log-probabilities ≤ 0 of the preferred responses' tokens, any float dtype; `sequence_log_probs`
            with `average=True` makes them. 0, for which the odds are infinite, counts as −1.2e-38.
        rejected: the other responses' log-probabilities, of the same shape.
        chosen_nll: the negative log-likelihood that is added, for each pair or as one mean of all, such as a
            cross-entropy of prompt and response.
        beta: > 0, the weight of the odds ratio; λ in the paper.

    Returns:
        A `DPOOutput`; rewards are β times the mean log-probabilities.

    Example:
        >>> chosen, rejected = jnp.log(jnp.array([0.5, 0.8])), jnp.log(jnp.array([0.2, 0.8]))
        >>> orpo_loss(chosen, rejected, -chosen).losses.tolist()
        [0.715, 0.292]

    References:
        Hong, Lee and Thorne, ORPO: Monolithic Preference Optimization without Reference Model, arXiv:2403.07691.
    """
    op = "orpo_loss"
    _checks.check_positive(op, beta=beta)
    chosen, rejected = _checks.as_sequences(op, chosen=chosen, rejected=rejected)
    logits = _log_odds(chosen) - _log_odds(rejected)
    return _output(_nll(op, chosen_nll, chosen) - beta * jax.nn.log_sigmoid(logits), chosen, rejected, beta)


def _log_odds(mean: jax.Array) -> jax.Array:
    """log(p / (1 − p)) of p = e^mean, finite at p = 1."""
    mean = jnp.minimum(mean, -float(jnp.finfo(jnp.float32).tiny))
    return mean - jnp.log(-jnp.expm1(mean))


def cpo_loss(
    chosen: Float[Array, "P"],
    rejected: Float[Array, "P"],
    chosen_nll: Float[Array, "*P"] | None = None,
    *,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    cpo_alpha: float = 1.0,
) -> DPOOutput:
    """Contrastive preference optimisation: DPO without a reference, plus the negative log-likelihood of chosen.

    loss = preference + cpo_alpha · chosen_nll, where with Δ = chosen − rejected the preference is
    "sigmoid": −(1 − ε) log σ(βΔ) − ε log σ(−βΔ), "hinge": max(0, 1 − βΔ), "ipo": (Δ − 1/2β)².

    Args:
        chosen: log-probabilities of the preferred responses, any float dtype: summed over the tokens, or for "ipo"
            their mean. `sequence_log_probs` makes both.
        rejected: the other responses' log-probabilities, of the same shape.
        chosen_nll: negative log-likelihood of chosen, for each pair or as one mean of all; required unless
            `cpo_alpha=0`.
        beta: > 0, the scale of log-probabilities.
        loss_type: "sigmoid", "hinge" or "ipo".
        label_smoothing: ε in [0, 0.5); for "sigmoid" only.
        cpo_alpha: ≥ 0, the weight of `chosen_nll`.

    Returns:
        A `DPOOutput`; rewards are β times the log-probabilities.

    Example:
        >>> chosen, rejected = jnp.array([-12.0, -20.0]), jnp.array([-15.0, -18.0])
        >>> cpo_loss(chosen, rejected, jnp.array(2.0)).losses.tolist()
        [2.554, 2.798]

    References:
        Xu et al., Contrastive Preference Optimization, arXiv:2401.08417.
    """
    op = "cpo_loss"
    check_choice(op, "loss_type", loss_type, CPO_TYPES)
    _checks.check_positive(op, beta=beta)
    _checks.check_label_smoothing(op, label_smoothing)
    _checks.check_is_read(op, "label_smoothing", label_smoothing != 0, loss_type, ("sigmoid",))
    _checks.check_python_numbers(op, cpo_alpha=cpo_alpha)
    _checks.check_number(op, "cpo_alpha", cpo_alpha, cpo_alpha >= 0, ">= 0; 0.0 trains on preferences alone")
    if (chosen_nll is None) != (cpo_alpha == 0):
        cure = "pass it, or cpo_alpha=0.0" if chosen_nll is None else "leave it out, or pass cpo_alpha > 0"
        raise ValueError(f"{op}: chosen_nll belongs to cpo_alpha > 0, but cpo_alpha={cpo_alpha}; {cure}.")
    chosen, rejected = _checks.as_sequences(op, chosen=chosen, rejected=rejected)
    margin = chosen - rejected
    if loss_type == "sigmoid":
        losses = smoothed_sigmoid(beta * margin, label_smoothing)
    elif loss_type == "hinge":
        losses = jax.nn.relu(1.0 - beta * margin)
    else:
        losses = jnp.square(margin - 0.5 / beta)
    losses = losses if chosen_nll is None else losses + cpo_alpha * _nll(op, chosen_nll, chosen)
    return _output(losses, chosen, rejected, beta)


def simpo_loss(
    chosen: Float[Array, "P"],
    rejected: Float[Array, "P"],
    *,
    beta: float = 0.1,
    gamma: float = 0.5,
    label_smoothing: float = 0.0,
) -> DPOOutput:
    """Simple preference optimisation: mean log-probabilities as rewards, with a target margin.

    loss = −(1 − ε) log σ(x) − ε log σ(−x), x = β (chosen − rejected) − γ.

    The defaults are TRL's; the paper uses β between 2 and 10 and γ between about 0.3 β and 0.5 β.

    Args:
        chosen: mean log-probabilities of the preferred responses' tokens, any float dtype; `sequence_log_probs` with
            `average=True` makes them.
        rejected: the other responses' log-probabilities, of the same shape.
        beta: > 0, the scale of log-probabilities.
        gamma: ≥ 0, the target margin of β chosen over β rejected.
        label_smoothing: ε in [0, 0.5).

    Returns:
        A `DPOOutput`; rewards are β times the mean log-probabilities.

    Example:
        >>> chosen, rejected = jnp.array([-0.5, -1.0]), jnp.array([-1.5, -0.8])
        >>> simpo_loss(chosen, rejected, beta=2.0).losses.tolist()
        [0.201, 1.241]

    References:
        Meng, Xia and Chen, SimPO: Simple Preference Optimization with a Reference-Free Reward, arXiv:2405.14734.
    """
    op = "simpo_loss"
    _checks.check_positive(op, beta=beta)
    _checks.check_label_smoothing(op, label_smoothing)
    _check_gamma(op, gamma)
    chosen, rejected = _checks.as_sequences(op, chosen=chosen, rejected=rejected)
    losses = smoothed_sigmoid(beta * (chosen - rejected) - gamma, label_smoothing)
    return _output(losses, chosen, rejected, beta)


def alphapo_loss(
    chosen: Float[Array, "P"],
    rejected: Float[Array, "P"],
    *,
    reward_alpha: float = 0.0,
    beta: float = 0.1,
    gamma: float = 0.5,
    label_smoothing: float = 0.0,
) -> DPOOutput:
    """Reward shape preference optimisation: SimPO with another function of the mean log-probabilities as rewards.

    loss = −(1 − ε) log σ(x) − ε log σ(−x), x = β (r(chosen) − r(rejected)) − γ, r(a) = (1 − e^(−αa)) / α.

    For α towards 0 it is `simpo_loss`. The larger α is, the more an unlikely response's reward changes with its
    log-probability, and the less a likely one's. −αa is clipped at 80.

    Args:
        chosen: mean log-probabilities of the preferred responses' tokens, any float dtype; `sequence_log_probs` with
            `average=True` makes them.
        rejected: the other responses' log-probabilities, of the same shape.
        reward_alpha: α, any number but 0; TRL calls it `alpha`.
        beta: > 0, the scale of rewards.
        gamma: ≥ 0, the target margin of β r(chosen) over β r(rejected).
        label_smoothing: ε in [0, 0.5).

    Returns:
        A `DPOOutput`; rewards are β r.

    Example:
        >>> chosen, rejected = jnp.array([-0.5, -1.0]), jnp.array([-1.5, -0.8])
        >>> alphapo_loss(chosen, rejected, reward_alpha=0.25, beta=2.0).losses.tolist()
        [0.118, 1.314]

    References:
        Gupta et al., AlphaPO: Reward Shape Matters for LLM Alignment, arXiv:2501.03884.
    """
    op = "alphapo_loss"
    _checks.check_python_numbers(op, reward_alpha=reward_alpha)
    is_shape = 0 < abs(reward_alpha) < float("inf")
    _checks.check_number(op, "reward_alpha", reward_alpha, is_shape, "a finite number other than 0, where it is SimPO")
    _checks.check_positive(op, beta=beta)
    _checks.check_label_smoothing(op, label_smoothing)
    _check_gamma(op, gamma)
    means = _checks.as_sequences(op, chosen=chosen, rejected=rejected)
    chosen, rejected = (score(mean, "alpha_divergence", 1.0 - reward_alpha) for mean in means)  # the same function
    losses = smoothed_sigmoid(beta * (chosen - rejected) - gamma, label_smoothing)
    return _output(losses, chosen, rejected, beta)


def _check_gamma(op: str, gamma: Any) -> None:
    _checks.check_python_numbers(op, gamma=gamma)
    _checks.check_number(op, "gamma", gamma, 0 <= gamma < float("inf"), "a finite number >= 0; 0.0 is no margin")


def _nll(op: str, chosen_nll: Any, chosen: jax.Array) -> jax.Array:
    (chosen_nll,) = _checks.as_float32(op, chosen_nll=chosen_nll)
    if chosen_nll.ndim > 0:
        check_shape(op, "chosen_nll", chosen_nll, chosen.shape, "one number for each pair, or one for all")
    return jnp.broadcast_to(chosen_nll, chosen.shape)


def _output(losses: jax.Array, chosen: jax.Array, rejected: jax.Array, beta: float) -> DPOOutput:
    rewards = jax.lax.stop_gradient((beta * chosen, beta * rejected))
    return DPOOutput(losses=losses, chosen_rewards=rewards[0], rejected_rewards=rewards[1])
