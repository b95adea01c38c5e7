"""The correction against the sampler is TRL's, in its four modes, of rows and of packed segments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax.losses import importance_sampling_ratio
from liger_jax.losses.sampler import MODES
from tests.losses._oracle import close

IDS = np.array([[1, 1, 2, 2, 2], [1, 1, 1, 0, 0]])
MASK = np.array([[1, 1, 1, 0, 1], [1, 0, 1, 1, 1]], bool)


@pytest.mark.parametrize("is_packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("mode", MODES)
def test_a_ratio_beyond_its_bounds_is_cut_or_0(mode, is_packed, rng):
    old = rng.standard_normal((2, 5)).astype(np.float32)
    sampling = (old + rng.standard_normal((2, 5))).astype(np.float32)
    sampling[0, 1] = np.nan  # not scored: it adds nothing
    logs = np.nan_to_num(old.astype(np.float64) - sampling) * MASK
    ids = IDS if is_packed else np.ones_like(IDS)
    if mode.startswith("sequence"):
        logs = np.stack([(logs * (ids == s)).sum(1) for s in range(1, ids.max() + 1)], axis=1)
    else:
        logs = logs * (ids > 0)
    ratio = np.exp(logs)
    outside = (ratio < 0.6) | (ratio > 1.5)
    expected = np.where(outside, 0.0, ratio) if mode.endswith("mask") else np.clip(ratio, 0.6, 1.5)
    segments = dict(segment_ids=jnp.asarray(ids), num_segments=2) if is_packed else {}
    f = lambda old, sampling: importance_sampling_ratio(
        old, sampling, mask=jnp.asarray(MASK), mode=mode, clip_min=0.6, clip_max=1.5, **segments
    )
    old, sampling = jnp.asarray(old), jnp.asarray(sampling)
    close(jax.jit(f)(old, sampling), expected)
    assert not jax.grad(lambda x: f(x, sampling).sum())(old).any()
    if is_packed:  # too few places
        few = lambda ids: importance_sampling_ratio(
            old, sampling, mask=jnp.asarray(MASK), mode=mode, segment_ids=ids, num_segments=1
        )
        found = jax.jit(few)(jnp.asarray(IDS))
        assert np.isnan(found[0]).all() and np.isfinite(found[1]).all()


def test_sums_that_overflow_stay_finite():
    old, sampling = jnp.full((1, 4), -1.0), jnp.full((1, 4), -60.0)
    options = dict(mask=jnp.ones((1, 4), bool), clip_max=None, mode="sequence_truncate")
    assert np.isfinite(importance_sampling_ratio(old, sampling, **options)).all()


X, ALL = jnp.ones((2, 3)), jnp.ones((2, 3), bool)


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(mode="token"), ValueError, "mode='token' is unknown; pass one of"),
        (dict(clip_max=0.0), ValueError, "clip_max=0.0 must be a finite number > 0"),
        (dict(clip_min=3.0), ValueError, "clip_min=3.0 must be >= 0 and below clip_max=3.0"),
        (dict(clip_min=X), TypeError, "clip_min is a .*, but must be a Python number"),
        (
            dict(sampling_log_probs=X[0]),
            ValueError,
            r"sampling_log_probs has shape \(3,\), but must",
        ),
        (dict(old_log_probs=X[0]), ValueError, r"old_log_probs has shape \(3,\), but must be \(rows, tokens\)"),
        (dict(mask=X), TypeError, "mask has dtype float32, but must be bool"),
    ],
)
def test_wrong_arguments_are_refused(options, error, message, unchecked_types):
    with pytest.raises(error, match=f"importance_sampling_ratio: {message}"):
        importance_sampling_ratio(**dict(old_log_probs=X, sampling_log_probs=X, mask=ALL) | options)
