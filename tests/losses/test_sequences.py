"""Log-probabilities of sequences: sums and means over the tokens that count, LD-DPO's tail, WPO's weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax.losses import sequence_log_probs, wpo_weights
from tests.losses._oracle import assert_matches, close

B, T = 4, 7


@pytest.fixture
def log_probs(rng):
    return -rng.gamma(1.0, 2.0, (B, T))


@pytest.fixture
def where(rng):
    where = rng.uniform(size=(B, T)) < 0.6
    where[:, 2] = True
    return where


@pytest.mark.parametrize("average", [False, True])
def test_sums_and_means_run_over_counted_tokens(average, log_probs, where):
    ours = functools.partial(sequence_log_probs, where=jnp.asarray(where), average=average)
    oracle = lambda x: (x * where).sum(1) / (where.sum(1) if average else 1)
    assert_matches(ours, oracle, [log_probs])


@pytest.mark.parametrize("ld_alpha", [0.0, 0.4, 1.0])
def test_tokens_beyond_the_shared_length_weigh_ld_alpha(ld_alpha, log_probs, where):
    shared = np.array([1, 2, 100, 0])

    def oracle(x):
        total = []
        for row, mask, length in zip(x, where, shared, strict=True):
            counted = row[mask]
            total.append(counted[:length].sum() + ld_alpha * counted[length:].sum())
        return np.array(total)

    ours = functools.partial(
        sequence_log_probs, where=jnp.asarray(where), ld_alpha=ld_alpha, shared_tokens=jnp.asarray(shared)
    )
    assert_matches(ours, oracle, [log_probs])


def test_an_impossible_token_of_weight_0_has_no_part(log_probs, where):
    shared = jnp.ones(log_probs.shape[0], jnp.int32)
    spoilt = jnp.where(jnp.cumsum(where, -1) > 1, -jnp.inf, jnp.asarray(log_probs, jnp.float32))
    of = lambda x: sequence_log_probs(x, jnp.asarray(where), ld_alpha=0.0, shared_tokens=shared)
    close(of(spoilt), of(jnp.asarray(log_probs, jnp.float32)))
    assert np.isfinite(jax.grad(lambda x: of(x).sum())(spoilt)).all()


def test_tokens_that_do_not_count_may_be_anything(log_probs, where):
    spoiled = jnp.asarray(np.where(where, log_probs, [np.nan, np.inf, -np.inf, np.nan, 0, 1, 2]), jnp.float32)
    f = lambda x: sequence_log_probs(x, jnp.asarray(where)).sum()
    close(f(spoiled), (log_probs * where).sum())
    np.testing.assert_array_equal(jax.grad(f)(spoiled), where.astype(np.float32))


def test_a_sequence_without_tokens_is_0_under_jit_and_its_mean_is_refused_outside(log_probs, where):
    where[1] = False
    mean = lambda x, where: sequence_log_probs(x, where, average=True)
    x, mask = jnp.asarray(log_probs, jnp.float32), jnp.asarray(where)
    assert jax.jit(mean)(x, mask)[1] == 0
    assert not jax.jit(jax.grad(lambda *a: mean(*a)[1]))(x, mask).any()
    assert sequence_log_probs(x, mask)[1] == 0
    with pytest.raises(ValueError, match="where counts no token for sequence 1; its mean is undefined"):
        mean(x, mask)


def test_wpo_weighs_by_alignment_without_gradient(rng, where):
    logits = rng.standard_normal((B, T, 11))
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    log_probs, squares = np.log(p[..., 3]), np.log((p**2).sum(-1))
    expected = np.exp(((log_probs - squares) * where).sum(1) / where.sum(1))
    arrays = [jnp.asarray(x, jnp.float32) for x in (log_probs, squares)]
    f = jax.jit(lambda *arrays: wpo_weights(*arrays, where=jnp.asarray(where)))
    close(f(*arrays), expected)
    assert not any(g.any() for g in jax.grad(lambda x: f(*x).sum())(arrays))


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(where=jnp.ones((B, T))), TypeError, "where has dtype float32, but must be bool; pass where != 0"),
        (dict(where=jnp.ones(T, bool)), ValueError, r"where has shape \(7,\), but must have shape \(4, 7\)"),
        (dict(average=jnp.ones((B, T), int)), TypeError, "average is a ArrayImpl, but must be True or False"),
        (dict(ld_alpha=0.5), ValueError, "ld_alpha and shared_tokens belong together"),
        (dict(ld_alpha=1.5, shared_tokens=jnp.ones(B, int)), ValueError, r"ld_alpha=1.5 must be in \[0, 1\]"),
        (dict(ld_alpha=0.5, shared_tokens=jnp.ones(3, int)), ValueError, r"shared_tokens has shape \(3,\)"),
        (dict(log_probs=jnp.ones((B, T), int)), TypeError, "log_probs has dtype int32, but must be floating point"),
    ],
)
def test_wrong_arguments_are_refused(options, error, message, unchecked_types):
    with pytest.raises(error, match=f"sequence_log_probs: {message}"):
        sequence_log_probs(**dict(log_probs=jnp.ones((B, T))) | options)


def test_wpo_refuses_other_shapes(unchecked_types):
    with pytest.raises(ValueError, match=r"wpo_weights: log_sum_of_squares has shape \(4, 6\)"):
        wpo_weights(jnp.ones((B, T)), jnp.ones((B, T - 1)), jnp.ones((B, T), bool))
