"""The formulas under the losses, at their edges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax.losses import causal_lm_loss, shifted_labels
from liger_jax.losses._checks import EXPONENT_LIMIT, clamp_exponent
from liger_jax.losses._dpo_formulas import DIVERGENCES, score, smoothed_sigmoid
from liger_jax.losses._policy_formulas import k3
from tests.losses._oracle import assert_matches, close


@pytest.mark.parametrize("x, slope", [(-200.0, 1.0), (0.0, 1.0), (79.0, 1.0), (81.0, 0.0), (np.inf, 0.0)])
def test_an_exponent_ends_at_the_limit_and_has_no_gradient_beyond_even_of_inf(x, slope):
    value, pullback = jax.vjp(clamp_exponent, jnp.float32(x))
    assert value == min(x, EXPONENT_LIMIT) and jnp.isfinite(jnp.exp(value))
    assert pullback(jnp.float32(3.0))[0] == 3.0 * slope
    if slope == 0:
        assert pullback(jnp.float32(jnp.inf))[0] == 0.0


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0])
def test_a_score_is_0_for_equal_policies_and_rises_with_the_ratio(divergence, alpha):
    ratios = jnp.linspace(-3.0, 3.0, 13)
    scores = score(ratios, divergence, alpha)
    assert jnp.abs(scores[6]) < 1e-6 and jnp.all(jnp.diff(scores) > 0)


def test_alpha_near_1_is_the_reverse_kl():
    ratios = jnp.linspace(-2.0, 2.0, 9)
    for alpha in (1.0, 1.0 - 1e-3, 1.0 + 1e-3):
        close(score(ratios, "alpha_divergence", alpha), score(ratios, "reverse_kl", alpha), tolerance=2e-3)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.49])
def test_smoothing_mixes_both_labels_and_stays_finite_far_out(smoothing):
    oracle = lambda x: (1 - smoothing) * np.logaddexp(0, -x) + smoothing * np.logaddexp(0, x)
    assert_matches(lambda x: smoothed_sigmoid(x, smoothing), oracle, [np.array([-500.0, -3.0, 0.0, 3.0, 500.0])])


def test_k3_is_never_negative_and_0_only_for_equal_probabilities():
    log_probs = jnp.zeros(5)
    values = k3(log_probs, jnp.array([-4.0, -1e-3, 0.0, 1e-3, 4.0]))
    assert values[2] == 0 and jnp.all(values[jnp.array([0, 1, 3, 4])] > 0)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32"])
def test_a_label_is_that_of_the_next_token_of_its_segment(dtype, rng):
    labels = rng.integers(0, 100, (3, 9)).astype(dtype)
    segments = np.sort(rng.integers(1, 4, (3, 9)), axis=1).astype(np.int32)
    segments[0, 6:] = segments[2] = 0
    found = shifted_labels(labels, segments)
    for b, t in np.ndindex(3, 9):
        goes_on = t + 1 < 9 and segments[b, t] == segments[b, t + 1] > 0
        assert found[b, t] == (int(labels[b, t + 1]) if goes_on else -100)


def test_labels_of_a_row_with_padding_before_a_segment_make_every_loss_nan(rng):
    hidden, head = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((2, 3, 4), (5, 4)))
    labels, ids = jnp.ones((2, 3), jnp.int32), jnp.asarray([[1, 1, 0], [0, 0, 1]])
    call = lambda ids: causal_lm_loss(hidden, head, labels, segment_ids=ids, reduction="none")
    found = jax.jit(call)(ids)
    assert np.isfinite(found[0]).all() and np.isnan(found[1]).all()
    with pytest.raises(ValueError, match="segment_ids hold a 0 at position 1 and 1 after it, but 0 is padding"):
        call(ids)


def test_a_sequence_of_one_token_has_nothing_to_score():
    assert shifted_labels(np.array([[7], [8]])).tolist() == [[-100], [-100]]
