"""What the benchmarks of policy and preference losses compare with: the truth, and the losses themselves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import policy_loss, preference
from benchmarks._token_losses import exact_log_probs, make_data, make_truth

TOKENS, D, V = 64, 16, 96


@pytest.fixture(scope="module")
def measured():
    """Inputs with their log-probabilities, and by module: the formula, and the loss that is timed."""
    data = make_data(TOKENS, D, V)
    exact = exact_log_probs(data)
    rollouts = policy_loss.make_rollouts(exact.log_probs)
    reference = rollouts.reference
    losses = {
        "policy": (
            functools.partial(policy_loss.exact_loss, rollouts),
            lambda log_probs: jnp.mean(policy_loss.by_token(log_probs, *map(jnp.asarray, rollouts))),
        ),
        "preference": (
            functools.partial(preference.exact_loss, reference.astype(np.float64)),
            lambda log_probs: preference.dpo(log_probs, jnp.asarray(reference)),
        ),
    }
    return data, exact, losses


@pytest.mark.parametrize("kind", ["policy", "preference"])
def test_the_truth_is_what_all_logits_in_float64_give(kind, measured):
    data, exact, losses = measured
    formula = losses[kind][0]
    truth = make_truth(data, exact, formula)
    with jax.enable_x64(True):
        hidden, weight = (x.astype(jnp.float64) for x in data[:2])

        def loss(weight):
            log_p = jax.nn.log_softmax(hidden @ weight.T)
            return formula(jnp.take_along_axis(log_p, data.labels[:, None], axis=1)[:, 0])

        value, gradient = jax.jit(jax.value_and_grad(loss))(weight)
    np.testing.assert_allclose(truth.loss, value, rtol=1e-12)
    np.testing.assert_allclose(truth.weight_gradient, gradient[truth.rows], rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("kind", ["policy", "preference"])
def test_the_formula_is_the_loss_that_is_timed(kind, measured):
    _, exact, losses = measured
    formula, timed = losses[kind]
    log_probs = jnp.asarray(exact.log_probs.astype(np.float32))
    found, expected = (jax.jit(jax.value_and_grad(loss))(log_probs) for loss in (timed, formula))
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-5)
    np.testing.assert_allclose(found[1], expected[1], atol=2e-5 * np.max(np.abs(expected[1])))
