"""KTO is its paper's formula against a baseline that is never negative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax.losses import kto_loss, running_baseline
from tests.losses._oracle import assert_matches, close

BETA = 0.3
DESIRABLE = np.array([True, False, True, True, False])


@pytest.fixture
def arrays(rng):
    policy = -30 + 10 * rng.standard_normal(5)
    return [policy, policy + 3 * rng.standard_normal(5)]


def oracle(log_probs, reference, z):
    v = lambda x: 1 / (1 + np.exp(-BETA * x))
    r = log_probs - reference
    return np.where(DESIRABLE, 1.3 * (1 - v(r - z)), 0.8 * (1 - v(z - r)))


def ours(log_probs, reference, **options):
    options = dict(beta=BETA, desirable_weight=1.3, undesirable_weight=0.8) | options
    return kto_loss(log_probs, reference, jnp.asarray(DESIRABLE), **options).losses


@pytest.mark.parametrize("kl", [[0.5, 3.5, 1.0], [-4.0, 1.0, 0.0]])
def test_kto_compares_with_the_mean_of_other_log_ratios_clamped_at_0(kl, arrays):
    z = max(0, np.mean(kl))
    assert_matches(lambda *a: ours(*a, kl=jnp.asarray(kl)), lambda *a: oracle(*a, z=z), arrays)
    log_probs, reference = (jnp.asarray(x, jnp.float32) for x in arrays)
    output = kto_loss(log_probs, reference, jnp.asarray(DESIRABLE), kl=jnp.asarray(kl))
    close(output.kl, z)


def test_a_number_is_a_baseline_and_parts_of_a_batch_share_it(arrays):
    arrays = [jnp.asarray(x, jnp.float32) for x in arrays]
    kl = jnp.asarray([0.5, 3.5, 1.0])
    whole = ours(*arrays, kl=kl)
    mean = float(kl.mean())
    part = lambda rows: (
        kto_loss(
            *(x[rows] for x in arrays),
            desirable=jnp.asarray(DESIRABLE)[rows],
            kl=mean,
            beta=BETA,
            desirable_weight=1.3,
            undesirable_weight=0.8,
        ).losses
    )
    close(jnp.concatenate([part(slice(0, 2)), part(slice(2, 5))]), whole)


def test_the_unpaired_apo_has_no_baseline(arrays):
    assert_matches(lambda *a: ours(*a, loss_type="apo_zero_unpaired"), lambda *a: oracle(*a, z=0.0), arrays)


def test_baseline_and_rewards_have_no_gradient(arrays):
    arrays = [jnp.asarray(x, jnp.float32) for x in arrays]
    assert jax.grad(lambda kl: ours(*arrays, kl=kl).sum())(jnp.asarray(2.0)) == 0
    rewards = lambda x: kto_loss(x, arrays[1], jnp.asarray(DESIRABLE), kl=0.0).rewards
    close(rewards(arrays[0]), 0.1 * (arrays[0] - arrays[1]))
    assert not jax.grad(lambda x: rewards(x).sum())(arrays[0]).any()


@pytest.mark.parametrize("decay", [0.0, 0.7, 1.0])
def test_a_running_baseline_is_the_decayed_mean_of_all_that_counted(decay, rng):
    state, seen, baseline = None, [], None
    step = jax.jit(lambda x, state, where: running_baseline(x, state, decay=decay, where=where))
    for number in range(4):
        values, where = rng.standard_normal(3) + 2, np.array([True, number != 1, True])
        values = values.astype(np.float32)
        baseline, state = step(jnp.asarray(np.where(where, values, np.nan)), state, jnp.asarray(where))
        seen = [(decay * weight, x) for weight, x in seen] + [(1.0, x) for x in values[where]]
        close(baseline, sum(weight * float(x) for weight, x in seen) / sum(weight for weight, _ in seen))
    nothing = jnp.zeros(3, bool)
    close(step(jnp.full(3, jnp.nan), state, nothing)[0], baseline)
    assert step(jnp.full(3, jnp.nan), None, nothing)[0] == 0
    assert not jax.grad(lambda x: running_baseline(x, state)[0])(jnp.ones(3)).any()


def test_kto_takes_the_running_baseline(arrays):
    baseline, _ = running_baseline(jnp.asarray([0.5, 1.5]))
    assert_matches(lambda *a: ours(*a, kl=baseline), lambda *a: oracle(*a, z=1.0), arrays)


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(decay=1.5), ValueError, r"decay=1.5 must be in \[0, 1\]"),
        (dict(decay=jnp.ones(())), TypeError, "decay is a .*, but must be a Python number"),
        (dict(where=jnp.ones(2, bool)), ValueError, r"where has shape \(2,\), but must have shape \(3,\)"),
        (dict(log_ratios=jnp.ones(3, int)), TypeError, "log_ratios has dtype int32, but must be floating point"),
    ],
)
def test_a_wrong_baseline_is_refused(options, error, message, unchecked_types):
    with pytest.raises(error, match=f"running_baseline: {message}"):
        running_baseline(**dict(log_ratios=jnp.ones(3)) | options)


ONES, GOOD = jnp.ones(3), jnp.ones(3, bool)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({}, ValueError, "loss_type='kto' needs kl; pass log-ratios of mismatched responses, or 0.0"),
        (dict(kl=0.0, loss_type="apo_zero_unpaired"), ValueError, "kl belongs to loss_type='kto', but.*leave it out"),
        (dict(kl=0.0, beta=0.0), ValueError, "beta=0.0 must be a finite number > 0"),
        (dict(kl=0.0, desirable_weight=-1.0), ValueError, "desirable_weight=-1.0 must be >= 0"),
        (dict(kl=0.0, loss_type="bco"), ValueError, "loss_type='bco' is unknown"),
        (dict(kl=0.0, desirable=ONES), TypeError, "desirable has dtype float32, but must be bool"),
        (dict(kl=0.0, desirable=GOOD[:2]), ValueError, r"desirable has shape \(2,\), but must have shape \(3,\)"),
        (dict(kl=0.0, reference_log_probs=ONES[:2]), ValueError, r"reference_log_probs has shape \(2,\)"),
        (dict(kl=jnp.ones(3, int)), TypeError, "kl has dtype int32, but must be floating point"),
    ],
)
def test_wrong_arguments_are_refused(options, error, message, unchecked_types):
    with pytest.raises(error, match=f"kto_loss: {message}"):
        kto_loss(**dict(log_probs=ONES, reference_log_probs=ONES, desirable=GOOD) | options)
