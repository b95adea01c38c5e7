"""The objective of `policy_loss` at a token. Arrays broadcast to the tokens' shape, and are float32."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from liger_jax.losses import _checks
from liger_jax.losses._checks import clamp_exponent
from liger_jax.ops._checks import check_choice

CLIPPING_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSS_TYPES = (*CLIPPING_TYPES, "cispo", "sapo")


@dataclasses.dataclass(frozen=True)
class Objective:
    """The options that act on single tokens, checked. None stands for the default of a type that reads the option."""

    op: str
    loss_type: str
    epsilon_low: float | None
    epsilon_high: float | None
    delta: float | None
    beta: float
    unbiased_kl: bool
    sapo_temperatures: tuple[float, float] | None

    def __post_init__(self) -> None:
        op = self.op
        check_choice(op, "loss_type", self.loss_type, LOSS_TYPES)
        for name, readers in (
            ("epsilon_low", CLIPPING_TYPES),
            ("epsilon_high", (*CLIPPING_TYPES, "cispo")),
            ("delta", CLIPPING_TYPES),
            ("sapo_temperatures", ("sapo",)),
        ):
            _checks.check_is_read(op, name, getattr(self, name) is not None, self.loss_type, readers)
        low, high = self.clip_range
        _checks.check_python_numbers(op, epsilon_low=low, epsilon_high=high, beta=self.beta)
        _checks.check_number(
            op, "epsilon_low", low, 0 <= low < 1, "in [0, 1): ratios are clipped below at 1 − epsilon_low"
        )
        _checks.check_number(op, "epsilon_high", high, 0 <= high < float("inf"), "a finite number >= 0")
        if self.delta is not None:
            _checks.check_python_numbers(op, delta=self.delta)
            law = "> 1, the largest ratio where the advantage is negative; None sets none"
            _checks.check_number(op, "delta", self.delta, self.delta > 1, law)
        law = "a finite number >= 0; 0.0 is no penalty"
        _checks.check_number(op, "beta", self.beta, 0 <= self.beta < float("inf"), law)
        if not isinstance(self.unbiased_kl, bool):
            raise TypeError(f"{op}: unbiased_kl={self.unbiased_kl!r} must be True or False.")
        if len(self.temperatures) != 2:
            raise ValueError(
                f"{op}: sapo_temperatures={self.temperatures} must be two: of positive advantages and of the others."
            )
        positive, negative = self.temperatures
        _checks.check_positive(op, **{"sapo_temperatures[0]": positive, "sapo_temperatures[1]": negative})

    @property
    def clip_range(self) -> tuple[float, float]:
        """epsilon_low and epsilon_high."""
        low = 0.2 if self.epsilon_low is None else self.epsilon_low
        return low, low if self.epsilon_high is None else self.epsilon_high

    @property
    def temperatures(self) -> tuple[float, float]:
        """SAPO's temperatures, for positive advantages and for the others."""
        return (1.0, 1.05) if self.sapo_temperatures is None else self.sapo_temperatures

    def losses(
        self, log_ratio: jax.Array, log_probs: jax.Array, advantages: jax.Array, reference: Any, importance: Any
    ) -> jax.Array:
        """The loss of each token; `log_ratio`, of the function below, may be one for each sequence, (B, 1)."""
        ratio = jnp.exp(log_ratio)
        if importance is not None:
            importance = jnp.where(jnp.isfinite(importance), importance, 1.0)
            advantages = jnp.where(importance == 0.0, 0.0, advantages)  # what is left out may be inf or NaN
        if self.loss_type == "cispo":
            log_probs_or_0 = jnp.where(log_probs == -jnp.inf, 0.0, log_probs)  # the weight 0 times −inf would be NaN
            losses = -jax.lax.stop_gradient(jnp.minimum(ratio, self.clip_range[1])) * advantages * log_probs_or_0
        elif self.loss_type == "sapo":
            positive, negative = self.temperatures
            temperature = jnp.where(advantages > 0, positive, negative)
            losses = -(4.0 / temperature) * jax.nn.sigmoid(temperature * (ratio - 1.0)) * advantages
        else:
            losses = -self._clipped(ratio, advantages)
        losses = losses if importance is None else losses * importance
        if self.beta == 0:
            return losses
        penalty = k3(log_probs, reference)
        return losses + self.beta * (penalty * ratio if self.unbiased_kl else penalty)

    def _clipped(self, ratio: jax.Array, advantages: jax.Array) -> jax.Array:
        """min(min(ρ, δ) A, clip(ρ) A). On a bound, the gradient is the inner one. So ε = 0 trains."""
        low, high = self.clip_range
        clipped = jnp.where(ratio < 1.0 - low, 1.0 - low, jnp.where(ratio > 1.0 + high, 1.0 + high, ratio))
        ratio = ratio if self.delta is None else jnp.where(ratio > self.delta, self.delta, ratio)
        free, bounded = ratio * advantages, clipped * advantages
        return jnp.where(free <= bounded, free, bounded)


def log_ratio(log_probs: jax.Array, old_log_probs: jax.Array) -> jax.Array:
    """log_probs − old_log_probs; 0, with the gradient of a fresh sample, where the sampler has no usable number.

    Samplers write NaN, −inf or a stand-in such as −9999 for a token that they did not score. A token whose probability
    is e^80 times the sampler's is of this kind: of 1e30 draws, none has a probability of e^−80.
    """
    difference = log_probs - old_log_probs
    is_usable = jnp.isfinite(old_log_probs) & ~(difference > _checks.EXPONENT_LIMIT)
    log_probs_or_0 = jnp.where(log_probs == -jnp.inf, 0.0, log_probs)  # of the policy, −inf is a masked logit
    return jnp.where(is_usable, difference, log_probs_or_0 - jax.lax.stop_gradient(log_probs_or_0))


def k3(log_probs: jax.Array, reference: jax.Array) -> jax.Array:
    """e^d − d − 1 with d = reference − log_probs: an estimate of KL(policy ‖ reference) that is never negative."""
    d = clamp_exponent(reference - log_probs)
    return jnp.expm1(d) - d
