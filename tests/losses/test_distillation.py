"""Divergences of logits are their definitions, with masks, temperatures, impossible tokens and equal distributions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax.losses import (
    cosine_distance,
    forward_kl,
    gkd_loss,
    js_divergence,
    kl_divergence,
    policy_loss,
    reverse_kl,
    reverse_kl_advantages,
    tv_distance,
)
from tests.losses._oracle import assert_matches, close

N, V = 5, 13
DIVERGENCES = [forward_kl, reverse_kl, js_divergence, tv_distance]


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def oracle(divergence, student, teacher, temperature=1.0, beta=0.5):
    s, t = softmax(student / temperature), softmax(teacher / temperature)
    kl = lambda p, q: (p * np.log(p / q)).sum(-1)
    m = (1 - beta) * s + beta * t
    return {
        "forward_kl": lambda: kl(t, s),
        "reverse_kl": lambda: kl(s, t),
        "js_divergence": lambda: beta * kl(t, m) + (1 - beta) * kl(s, m),
        "tv_distance": lambda: 0.5 * np.abs(s - t).sum(-1),
    }[divergence.__name__]()


@pytest.fixture
def logits(rng):
    return list(2 * rng.standard_normal((2, N, V)))


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_values_and_gradients_are_those_of_the_definition(divergence, reduction, logits):
    reduce = dict(mean=np.mean, sum=np.sum, none=lambda x: x)[reduction]
    ours = lambda *a: divergence(*a, reduction=reduction)
    assert_matches(ours, lambda *a: reduce(oracle(divergence, *a)), logits)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_temperature_divides_both_logits_and_nothing_multiplies_it_back(divergence, logits):
    assert_matches(
        lambda *a: divergence(*a, temperature=2.5), lambda *a: oracle(divergence, *a, temperature=2.5).mean(), logits
    )


@pytest.mark.parametrize("beta", [0.1, 0.9])
def test_beta_moves_the_mixture(beta, logits):
    assert_matches(
        lambda *a: js_divergence(*a, beta=beta), lambda *a: oracle(js_divergence, *a, beta=beta).mean(), logits
    )


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_gkd_is_the_js_divergence_with_the_kl_divergences_as_its_ends(beta, logits):
    def expected(student, teacher):
        if beta == 0.3:
            return oracle(js_divergence, student, teacher, 2.5, beta).mean()
        return oracle(forward_kl if beta == 0 else reverse_kl, student, teacher, 2.5).mean()

    assert_matches(lambda *a: gkd_loss(*a, beta=beta, temperature=2.5), expected, logits)


def test_reverse_kl_advantages_have_the_gradient_of_the_reverse_kl(logits):
    """In the mean over all tokens that the student may sample, each with its probability, at ratio 1."""
    student, teacher = (jnp.asarray(x[:1], jnp.float32) for x in logits)

    def sampled(student):
        log_probs = jax.nn.log_softmax(student)
        advantages = reverse_kl_advantages(log_probs, jax.nn.log_softmax(teacher))
        expected = jax.lax.stop_gradient(jnp.exp(log_probs)) * advantages
        return policy_loss(log_probs, None, expected, mask=jnp.ones((1, V), bool), denominator=1.0).loss

    close(jax.jit(jax.grad(sampled))(student), jax.jit(jax.grad(lambda x: reverse_kl(x, teacher)))(student))
    assert not jax.jit(jax.grad(lambda x: reverse_kl_advantages(x, teacher).sum()))(student).any()


def test_gkd_and_sampled_kl_refuse_what_they_cannot_take(unchecked_types):
    x = jnp.ones((2, 3))
    with pytest.raises(ValueError, match=r"gkd_loss: beta=1.5 must be in \[0, 1\]"):
        gkd_loss(x, x, beta=1.5)
    with pytest.raises(ValueError, match=r"reverse_kl_advantages: teacher_log_probs has shape \(2,\), but must have"):
        reverse_kl_advantages(x, x[:, 0])


def test_the_js_divergence_tends_to_both_kl_divergences(logits):
    """To 2 %, because what is left out is of the order β log β, and float32 leaves 1e-3 of so small a divergence."""
    student, teacher = (jnp.asarray(0.5 * x, jnp.float32) for x in logits)
    close(js_divergence(student, teacher, beta=1e-4) / 1e-4, forward_kl(student, teacher), 2e-2)
    close(js_divergence(student, teacher, beta=1 - 1e-4) / 1e-4, reverse_kl(student, teacher), 2e-2)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_log_probabilities_do_as_well_as_logits(divergence, logits):
    logits = [jnp.asarray(x, jnp.float32) for x in logits]
    found = divergence(*map(jax.nn.log_softmax, logits), temperature=2.0)
    close(found, divergence(*logits, temperature=2.0))


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_tokens_that_do_not_count_may_be_anything_and_have_no_gradient(divergence, logits):
    where = np.array([True, False, True, True, False])
    expected = oracle(divergence, *(x[where] for x in logits)).mean()
    spoiled = [jnp.asarray(np.where(where[:, None], x, np.nan), jnp.float32) for x in logits]
    f = lambda *a: divergence(*a, where=jnp.asarray(where))
    value, gradients = jax.jit(jax.value_and_grad(f, (0, 1)))(*spoiled)
    close(value, expected)
    for gradient in gradients:
        assert np.isfinite(gradient).all() and not gradient[~where].any() and gradient[where].any()
    none = divergence(*spoiled, where=jnp.zeros(N, bool))
    assert none == 0


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_equal_distributions_have_no_divergence_and_no_pull(divergence, logits):
    x = jnp.asarray(40 * logits[0], jnp.float32)
    value, gradients = jax.jit(jax.value_and_grad(divergence, (0, 1)))(x, x)
    assert abs(value) < 1e-6
    assert all(np.abs(g).max() < 1e-6 for g in gradients)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_impossible_tokens_add_nothing(divergence, logits):
    """A teacher's probability of 0, as top-k sampling or a mask makes it, and one that both call impossible."""
    student, teacher = (x.copy() for x in logits)
    (student if divergence is reverse_kl else teacher)[:, 3] = -np.inf
    student[:, 5] = teacher[:, 5] = -np.inf
    possible = np.full((2, N, V), -700.0)  # p = 1e-300 or so in the oracle's float64
    possible = np.maximum([student, teacher], possible)
    arrays = [jnp.asarray(x, jnp.float32) for x in (student, teacher)]
    value, gradients = jax.jit(jax.value_and_grad(divergence, (0, 1)))(*arrays)
    close(value, oracle(divergence, *possible).mean())
    assert all(np.isfinite(g).all() for g in gradients)


def test_what_the_student_calls_impossible_and_the_teacher_does_not_is_infinitely_far(logits):
    student, teacher = (jnp.asarray(x, jnp.float32) for x in logits)
    student = student.at[0, 3].set(-jnp.inf)
    assert forward_kl(student, teacher) == jnp.inf and reverse_kl(teacher, student) == jnp.inf
    assert js_divergence(student, teacher) < np.log(2)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_far_logits_stay_finite(divergence):
    ends = jnp.asarray([[80.0, -80.0, 0.0]])
    value, gradients = jax.jit(jax.value_and_grad(divergence, (0, 1)))(ends, -ends)
    close(value, oracle(divergence, np.asarray(ends, np.float64), -np.asarray(ends, np.float64)).mean())
    assert all(np.isfinite(g).all() for g in gradients)


def test_the_cosine_is_safe_for_zeros_and_far_vectors():
    far, zero = jnp.asarray([[3e30, 4e30]]), jnp.zeros((1, 2))
    close(cosine_distance(far, jnp.asarray([[1e-30, 0.0]])), [0.4])
    value, gradients = jax.jit(jax.value_and_grad(lambda *x: cosine_distance(*x).sum(), (0, 1)))(zero, far)
    assert value == 1 and not any(g.any() for g in gradients)


def test_a_row_of_nan_is_nan_in_every_divergence(logits):
    student, teacher = (jnp.asarray(x, jnp.float32) for x in logits)
    for divergence in (*DIVERGENCES, gkd_loss, lambda x, y, reduction: cosine_distance(x, y)):
        for arrays in ((student.at[1].set(jnp.nan), teacher), (student, teacher.at[1].set(jnp.nan))):
            assert np.flatnonzero(np.isnan(divergence(*arrays, reduction="none"))).tolist() == [1]
    shares = jax.nn.softmax(teacher)
    for arrays in ((student.at[1, 0].set(jnp.nan), shares.at[1, 0].set(0.0)), (student, shares.at[1, 0].set(jnp.nan))):
        assert np.flatnonzero(np.isnan(kl_divergence(*arrays))).tolist() == [1]


def test_half_precision_is_computed_in_float32(logits):
    half = [jnp.asarray(x, jnp.bfloat16) for x in logits]
    exact = [x.astype(jnp.float32) for x in half]
    for divergence in DIVERGENCES:
        assert divergence(*half).dtype == jnp.float32
        np.testing.assert_array_equal(divergence(*half), divergence(*exact))
    found, expected = cosine_distance(*half), cosine_distance(*exact)
    assert found.dtype == jnp.bfloat16  # a drop-in has the dtype of its arguments, rounded once
    np.testing.assert_array_equal(found, expected.astype(jnp.bfloat16))


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_wrong_arguments_are_refused(divergence, unchecked_types):
    x = jnp.ones((2, 3))
    name = divergence.__name__
    with pytest.raises(ValueError, match=rf"{name}: student has shape \(2, 3\) and teacher \(2, 4\).*: v"):
        divergence(x, jnp.ones((2, 4)))
    with pytest.raises(TypeError, match=f"{name}: student has dtype int32"):
        divergence(x.astype(jnp.int32), x)
    with pytest.raises(ValueError, match=f"{name}: reduction='batchmean' is unknown"):
        divergence(x, x, reduction="batchmean")
    with pytest.raises(TypeError, match=f"{name}: where has dtype float32, but must be bool"):
        divergence(x, x, where=jnp.ones(2))
    with pytest.raises(ValueError, match=rf"{name}: where has shape \(2, 3\), but must have shape \(2,\)"):
        divergence(x, x, where=jnp.ones((2, 3), bool))


def test_temperature_and_beta_keep_their_laws(unchecked_types):
    x = jnp.ones((2, 3))
    for divergence in DIVERGENCES:
        with pytest.raises(ValueError, match="temperature=0.0 must be a finite number > 0"):
            divergence(x, x, temperature=0.0)
    for beta in (0, 1.0):
        with pytest.raises(ValueError, match=rf"beta={beta} must be in \(0, 1\); the limits 0 and 1 are forward_kl"):
            js_divergence(x, x, beta=beta)


def test_the_derivative_of_a_divergence_by_a_target_of_zero_is_infinite():
    targets, log_predictions = jnp.array([0.0, 0.3, 0.7]), jnp.log(jnp.array([0.2, 0.3, 0.5]))
    gradient = jax.grad(kl_divergence, argnums=1)(log_predictions, targets)
    np.testing.assert_allclose(gradient, [-np.inf, 1.0, 1.0 + np.log(0.7 / 0.5)], rtol=1e-6)
