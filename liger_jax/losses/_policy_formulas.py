"""The objective of `policy_loss` at a token. Arrays broadcast to the tokens' shape, and are float32."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from liger_jax.losses import _checks
from liger_jax.losses._checks import clamp_exponent
from liger_jax.ops.checks import check_choice

CLIPPING_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
# These make a weight of the whole sequence, each in its own way, from the tokens' ratios.
SEQUENCE_TYPES = ("vespo", "gmpo")
IMPORTANCE_LEVELS = ("token", "sequence")
LOSS_TYPES = (*CLIPPING_TYPES, "cispo", "sapo", *SEQUENCE_TYPES)
_VESPO_LEAST, _VESPO_MOST = math.log(1e-8), 20.0  # of a sequence's log-weight; TRL's


@dataclasses.dataclass(frozen=True)
class Objective:
    """The options that act on single tokens, checked. None stands for the default of a type that reads the option."""

    op: str
    loss_type: str
    epsilon_low: float | None
    epsilon_high: float | None
    delta: float | None
    beta: float
    unbiased_kl: bool | None
    sapo_temperatures: tuple[float, float] | None
    vespo_k: tuple[float, float] | None = None
    vespo_lambda: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        op = self.op
        check_choice(op, "loss_type", self.loss_type, LOSS_TYPES)
        for name, readers in (
            ("epsilon_low", (*CLIPPING_TYPES, "gmpo")),
            ("epsilon_high", (*CLIPPING_TYPES, "cispo", "gmpo")),
            ("delta", CLIPPING_TYPES),
            ("sapo_temperatures", ("sapo",)),
            ("vespo_k", ("vespo",)),
            ("vespo_lambda", ("vespo",)),
        ):
            _checks.check_is_read(op, name, getattr(self, name) is not None, self.loss_type, readers)
        low, high = self.clip_range
        _checks.check_python_numbers(op, epsilon_low=low, epsilon_high=high, beta=self.beta)
        if self.loss_type == "gmpo":
            _checks.check_number(op, "epsilon_low", low, 0 <= low < float("inf"), "a finite number >= 0")
        else:
            law = "in [0, 1): ratios are clipped below at 1 − epsilon_low"
            _checks.check_number(op, "epsilon_low", low, 0 <= low < 1, law)
        _checks.check_number(op, "epsilon_high", high, 0 <= high < float("inf"), "a finite number >= 0")
        if self.delta is not None:
            _checks.check_python_numbers(op, delta=self.delta)
            law = "> 1, the largest ratio where the advantage is negative; None sets none"
            _checks.check_number(op, "delta", self.delta, self.delta > 1, law)
        law = "a finite number >= 0; 0.0 is no penalty"
        _checks.check_number(op, "beta", self.beta, 0 <= self.beta < float("inf"), law)
        if self.unbiased_kl is not None and not isinstance(self.unbiased_kl, bool):
            raise TypeError(f"{op}: unbiased_kl={self.unbiased_kl!r} must be True, False or None.")
        if self.unbiased_kl and self.loss_type == "gmpo":
            raise ValueError(
                f"{op}: unbiased_kl=True has no meaning for loss_type='gmpo', whose ratios are clipped before they are "
                "averaged; leave it out, and the penalty is plain k3."
            )
        for name, both in (
            ("sapo_temperatures", self.temperatures),
            ("vespo_k", self.gamma[0]),
            ("vespo_lambda", self.gamma[1]),
        ):
            if len(both) != 2:
                raise ValueError(f"{op}: {name}={both} must be two: of positive advantages and of the others.")
            _checks.check_positive(op, **{f"{name}[0]": both[0], f"{name}[1]": both[1]})

    @property
    def clip_range(self) -> tuple[float, float]:
        """epsilon_low and epsilon_high; for "gmpo" of the log-ratio."""
        default = 0.4 if self.loss_type == "gmpo" else 0.2
        low = default if self.epsilon_low is None else self.epsilon_low
        return low, low if self.epsilon_high is None else self.epsilon_high

    @property
    def temperatures(self) -> tuple[float, float]:
        """SAPO's temperatures, for positive advantages and for the others."""
        return (1.0, 1.05) if self.sapo_temperatures is None else self.sapo_temperatures

    @property
    def gamma(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """VESPO's k and λ, each for advantages ≥ 0 and for the others."""
        k = (2.0, 3.0) if self.vespo_k is None else self.vespo_k
        return k, (3.0, 2.0) if self.vespo_lambda is None else self.vespo_lambda

    def losses(
        self,
        log_ratio: jax.Array,
        log_probs: jax.Array,
        advantages: jax.Array,
        reference: Any,
        importance: Any,
        log_weight: Any = None,
    ) -> jax.Array:
        """The loss of each token; `log_ratio`, of the function below, may be one for each sequence, (B, 1).

        `log_weight` is a sequence's, for the types that make one: "gmpo" the mean of its clipped log-ratios, "vespo"
        the sum of its log-ratios, to the sampler.
        """
        ratio = jnp.exp(log_ratio)
        log_probs_or_0 = jnp.where(log_probs == -jnp.inf, 0.0, log_probs)  # the weight 0 times −inf would be NaN
        if importance is not None:
            importance = jnp.where(jnp.isfinite(importance), importance, 1.0)
            advantages = jnp.where(importance == 0.0, 0.0, advantages)  # what is left out may be inf or NaN
        if self.loss_type == "cispo":
            losses = -jax.lax.stop_gradient(jnp.minimum(ratio, self.clip_range[1])) * advantages * log_probs_or_0
        elif self.loss_type == "sapo":
            positive, negative = self.temperatures
            temperature = jnp.where(advantages > 0, positive, negative)
            losses = -(4.0 / temperature) * jax.nn.sigmoid(temperature * (ratio - 1.0)) * advantages
        elif self.loss_type == "vespo":
            losses = -self._gamma_weight(jax.lax.stop_gradient(log_weight), advantages) * advantages * log_probs_or_0
        elif self.loss_type == "gmpo":
            losses = -jnp.exp(log_weight) * advantages
        else:
            losses = -self._clipped(ratio, advantages)
        losses = losses if importance is None else losses * importance
        if self.beta == 0:
            return losses
        is_unbiased = self.unbiased_kl or (self.unbiased_kl is None and self.loss_type != "gmpo")
        penalty = weighted_k3(log_ratio, log_probs, reference) if is_unbiased else k3(log_probs, reference)
        return losses + self.beta * penalty

    def clipped_log_ratio(self, log_ratio: jax.Array, advantages: jax.Array) -> jax.Array:
        """GMPO's, clipped on the side to which the advantage pulls. On a bound, the gradient is the inner one."""
        low, high = self.clip_range
        above = jnp.where(log_ratio > high, high, log_ratio)
        return jnp.where(advantages > 0, above, jnp.where(log_ratio < -low, -low, log_ratio))

    def _gamma_weight(self, log_weight: jax.Array, advantages: jax.Array) -> jax.Array:
        """VESPO's e^λ · w^k · e^(−λ w), which is 1 at w = 1."""
        (k_positive, k_negative), (lambda_positive, lambda_negative) = self.gamma
        is_negative = advantages < 0
        k = jnp.where(is_negative, k_negative, k_positive)
        lambda_ = jnp.where(is_negative, lambda_negative, lambda_positive)
        log_weight = jnp.clip(log_weight, _VESPO_LEAST, _VESPO_MOST)
        return jnp.exp(lambda_ + k * log_weight - lambda_ * jnp.exp(log_weight))

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
    d = clamp_exponent(_log_ratio_of_reference(log_probs, reference))
    return jnp.expm1(d) - d


def weighted_k3(log_ratio: jax.Array, log_probs: jax.Array, reference: jax.Array) -> jax.Array:
    """ρ · k3, at most e^80 and then without gradient, as `clamp_exponent` has it; 0 where ρ is."""
    d = _log_ratio_of_reference(log_probs, reference)
    # k3 < e^d above 0, and k3 ≤ −d below.
    exponent = log_ratio + jnp.where(d > 0, d, jnp.log1p(jnp.maximum(-d, 0.0)))
    is_beyond, is_nothing = (exponent > _checks.EXPONENT_LIMIT) & (d > -jnp.inf), jnp.exp(log_ratio) == 0
    is_plain = ~(is_beyond | is_nothing)
    d, log_ratio = (jnp.where(is_plain, x, 0.0) for x in (d, log_ratio))
    product = jnp.exp(log_ratio) * (jnp.expm1(d) - d)
    return jnp.where(is_nothing, 0.0, jnp.where(is_beyond, math.exp(_checks.EXPONENT_LIMIT), product))


def _log_ratio_of_reference(log_probs: jax.Array, reference: jax.Array) -> jax.Array:
    """reference − log_probs; 0 for a token that is impossible under both, as one that a mask forbids."""
    is_impossible = (log_probs == -jnp.inf) & (reference == -jnp.inf)
    return jnp.where(is_impossible, 0.0, reference - log_probs)


def vespo_log_ratio(log_ratio: jax.Array) -> jax.Array:
    """A token's term in its sequence's log-weight, bounded as TRL's."""
    return jnp.clip(log_ratio, -20.0, 20.0)


def vespo_log_importance(importance: jax.Array) -> jax.Array:
    """An importance ratio's term in the log-weight; 0 where it is not finite, and bounded as TRL's."""
    usable = jnp.where(jnp.isfinite(importance), importance, 1.0)
    return jnp.log(jnp.clip(usable, 1e-8, math.exp(20.0)))
