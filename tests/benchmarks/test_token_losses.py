"""What the benchmark of losses of log-probabilities compares with: the truth, and the losses themselves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks._token_losses import make_data, make_exact, make_truth
from benchmarks.token_losses import CASES, Numbers, by_token, dpo, make_numbers

TOKENS, D, V = 64, 16, 96
TIMED = {
    "grpo": lambda numbers, log_probs, _: jnp.mean(by_token(log_probs, *numbers)),
    "dpo": lambda numbers, log_probs, _: dpo(log_probs, numbers.reference),
}


@pytest.fixture(scope="module")
def measured():
    """Inputs, their log-probabilities and entropies, and what a step knows of its tokens."""
    data = make_data(TOKENS, D, V)
    exact = make_exact(data)
    return data, exact, make_numbers(exact.log_probs)


@pytest.mark.parametrize("kind", CASES)
def test_the_truth_is_what_all_logits_in_float64_give(kind, measured):
    data, exact, numbers = measured
    formula = functools.partial(CASES[kind].formula, numbers)
    truth = make_truth(data, exact, formula)
    with jax.enable_x64(True):
        hidden, weight = (x.astype(jnp.float64) for x in data[:2])

        def loss(weight):
            log_p = jax.nn.log_softmax(hidden @ weight.T)
            of_labels = jnp.take_along_axis(log_p, data.labels[:, None], axis=1)[:, 0]
            return formula(of_labels, -jnp.sum(jnp.exp(log_p) * log_p, axis=1))

        value, gradient = jax.jit(jax.value_and_grad(loss))(weight)
    np.testing.assert_allclose(truth.loss, value, rtol=1e-12)
    np.testing.assert_allclose(truth.weight_gradient, gradient[truth.rows], rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("kind", ["grpo", "dpo"])
def test_the_formula_is_the_loss_that_is_timed(kind, measured):
    _, exact, numbers = measured
    log_probs, on_device = jnp.asarray(exact.log_probs.astype(np.float32)), Numbers(*map(jnp.asarray, numbers))
    found, expected = (
        jax.jit(jax.value_and_grad(functools.partial(loss, on_device)))(log_probs, log_probs)
        for loss in (TIMED[kind], CASES[kind].formula)
    )
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-5)
    np.testing.assert_allclose(found[1], expected[1], atol=2e-5 * np.max(np.abs(expected[1])))
