"""ORPO, CPO, SimPO and AlphaPO are their papers' formulas, and stay finite where a response is certain."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax.losses import alphapo_loss, cpo_loss, orpo_loss, simpo_loss
from tests.losses._oracle import assert_matches, close

BETA, EPSILON = 0.3, 0.1
P = 5


def log_sigmoid(x):
    return -np.logaddexp(0, -x)


@pytest.fixture
def means(rng):
    """Mean log-probabilities of chosen and rejected, and a negative log-likelihood."""
    return [*-rng.gamma(1.0, 1.0, (2, P)), rng.gamma(2.0, 1.0, P)]


@pytest.fixture
def sums(rng):
    return [*(-30 + 10 * rng.standard_normal((2, P))), rng.gamma(2.0, 1.0, P)]


def test_orpo_is_likelihood_and_odds_ratio(means):
    def oracle(w, x, nll):
        odds = lambda a: np.exp(a) / (1 - np.exp(a))
        return nll - BETA * log_sigmoid(np.log(odds(w) / odds(x)))

    ours = lambda w, x, nll: orpo_loss(w, x, nll, beta=BETA).losses
    assert_matches(ours, oracle, means)
    assert_matches(lambda w, x: ours(w, x, jnp.asarray(0.5)), lambda w, x: oracle(w, x, 0.5), means[:2])


def test_orpo_is_finite_and_exact_near_certainty():
    """log(1 − e^a) by its own definition is −inf from a = −6e-8 on."""
    certain = np.float32([-1e-3, -1e-7, -1e-20, -1e-35])
    truth = np.log(-np.expm1(certain.astype(np.float64)))
    odds = lambda a: a.astype(np.float64) - truth
    found = orpo_loss(jnp.full(4, -1.0), jnp.asarray(certain), jnp.zeros(()), beta=1.0).losses
    close(found, -log_sigmoid(-1 - np.log(-np.expm1(-1.0)) - odds(certain)))


def test_orpo_is_finite_at_certainty():
    ends = jnp.asarray([0.0, -1.0, 0.0, -1000.0]), jnp.asarray([-1.0, 0.0, 0.0, 0.0])
    value, pullback = jax.vjp(lambda w, x: orpo_loss(w, x, jnp.zeros(())).losses, *ends)
    assert np.isfinite(value).all()
    assert all(np.isfinite(g).all() for g in pullback(jnp.ones(4)))


@pytest.mark.parametrize("loss_type", ["sigmoid", "hinge", "ipo"])
def test_cpo_is_dpo_without_reference_beside_likelihood(loss_type, sums):
    def oracle(w, x, nll):
        d = w - x
        smoothed = -(1 - EPSILON) * log_sigmoid(BETA * d) - EPSILON * log_sigmoid(-BETA * d)
        hinge, ipo = np.maximum(0, 1 - BETA * d), (d - 1 / (2 * BETA)) ** 2
        return dict(sigmoid=smoothed, hinge=hinge, ipo=ipo)[loss_type] + 0.7 * nll

    options = dict(loss_type=loss_type, label_smoothing=EPSILON if loss_type == "sigmoid" else 0.0)
    ours = lambda w, x, nll: cpo_loss(w, x, nll, beta=BETA, cpo_alpha=0.7, **options).losses
    assert_matches(ours, oracle, sums)


def test_cpo_without_likelihood_is_the_preference_alone(sums):
    ours = lambda w, x: cpo_loss(w, x, beta=BETA, cpo_alpha=0.0).losses
    assert_matches(ours, lambda w, x: -log_sigmoid(BETA * (w - x)), sums[:2])


def test_simpo_asks_for_a_margin(means):
    def oracle(w, x):
        margin = 2.5 * w - 2.5 * x - 1.2
        return -(1 - EPSILON) * log_sigmoid(margin) - EPSILON * log_sigmoid(-margin)

    ours = lambda w, x: simpo_loss(w, x, beta=2.5, gamma=1.2, label_smoothing=EPSILON).losses
    assert_matches(ours, oracle, means[:2])


@pytest.mark.parametrize("alpha", [0.25, -0.5])
def test_alphapo_rewards_powers_of_probabilities(alpha, means):
    reward = lambda mean: (1 - np.exp(mean) ** -alpha) / alpha

    def oracle(w, x):
        margin = 2.5 * reward(w) - 2.5 * reward(x) - 1.2
        return -(1 - EPSILON) * log_sigmoid(margin) - EPSILON * log_sigmoid(-margin)

    loss = functools.partial(alphapo_loss, reward_alpha=alpha, beta=2.5, gamma=1.2, label_smoothing=EPSILON)
    assert_matches(lambda w, x: loss(w, x).losses, oracle, means[:2])
    output = loss(*(jnp.asarray(x, jnp.float32) for x in means[:2]))
    close(output.chosen_rewards, 2.5 * reward(means[0]))
    close(output.rejected_rewards, 2.5 * reward(means[1]))


def test_alphapo_of_a_small_alpha_is_simpo(means):
    chosen, rejected = (jnp.asarray(x, jnp.float32) for x in means[:2])
    for alpha in (1e-30, -1e-7, 1e-5):
        close(alphapo_loss(chosen, rejected, reward_alpha=alpha).losses, simpo_loss(chosen, rejected).losses)


def test_alphapo_is_finite_where_a_response_is_impossible():
    ends = jnp.asarray([-1000.0, -1.0, -1e30]), jnp.asarray([-1.0, -1000.0, -1e30])
    loss = lambda w, x: alphapo_loss(w, x, reward_alpha=2.0, beta=1.0).losses
    value, pullback = jax.vjp(loss, *ends)
    assert np.isfinite(value).all() and all(np.isfinite(g).all() for g in pullback(jnp.ones(3)))


def test_rewards_are_scaled_log_probabilities_without_gradient(means):
    chosen, rejected, nll = (jnp.asarray(x, jnp.float32) for x in means)
    for loss in (functools.partial(orpo_loss, chosen_nll=nll), functools.partial(cpo_loss, chosen_nll=nll), simpo_loss):
        output = loss(chosen, rejected, beta=BETA)
        close(output.chosen_rewards, BETA * means[0])
        close(output.rejected_rewards, BETA * means[1])
        assert not jax.grad(lambda x, loss=loss: loss(x, rejected).chosen_rewards.sum())(chosen).any()


ONES = jnp.ones(3)


@pytest.mark.parametrize(
    "loss, options, error, message",
    [
        (orpo_loss, dict(chosen_nll=ONES, beta=0.0), ValueError, "beta=0.0 must be a finite number > 0"),
        (
            orpo_loss,
            dict(chosen_nll=jnp.ones(2)),
            ValueError,
            r"chosen_nll has shape \(2,\), but must have shape \(3,\)",
        ),
        (orpo_loss, dict(chosen_nll=ONES, rejected=jnp.ones(4)), ValueError, r"rejected has shape \(4,\)"),
        (
            cpo_loss,
            {},
            ValueError,
            r"chosen_nll belongs to cpo_alpha > 0, but cpo_alpha=1.0; pass it, or cpo_alpha=0.0",
        ),
        (cpo_loss, dict(chosen_nll=ONES, cpo_alpha=0.0), ValueError, "chosen_nll belongs to cpo_alpha > 0"),
        (cpo_loss, dict(chosen_nll=ONES, cpo_alpha=-1.0), ValueError, "cpo_alpha=-1.0 must be >= 0"),
        (cpo_loss, dict(loss_type="simpo"), ValueError, "loss_type='simpo' is unknown"),
        (
            cpo_loss,
            dict(loss_type="ipo", label_smoothing=0.1),
            ValueError,
            "label_smoothing is given, but loss_type='ipo'",
        ),
        (cpo_loss, dict(label_smoothing=0.5), ValueError, r"label_smoothing=0.5 must be in \[0, 0.5\)"),
        (simpo_loss, dict(gamma=-0.5), ValueError, "gamma=-0.5 must be a finite number >= 0"),
        (alphapo_loss, dict(), ValueError, "reward_alpha=0.0 must be a finite number other than 0"),
        (alphapo_loss, dict(reward_alpha=float("inf")), ValueError, "reward_alpha=inf must be a finite number"),
        (alphapo_loss, dict(reward_alpha=ONES), TypeError, "reward_alpha is "),
        (alphapo_loss, dict(reward_alpha=0.25, gamma=-0.5), ValueError, "gamma=-0.5 must be a finite number >= 0"),
        (simpo_loss, dict(chosen=jnp.ones((3, 7))), ValueError, r"chosen has shape \(3, 7\), but must have one axis"),
        (simpo_loss, dict(beta="1"), TypeError, "beta is a str, but must be a Python number"),
    ],
)
def test_wrong_arguments_are_refused(loss, options, error, message, unchecked_types):
    with pytest.raises(error, match=f"{loss.__name__}: {message}"):
        loss(**dict(chosen=ONES, rejected=ONES) | options)
