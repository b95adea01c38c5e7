"""The short causal convolution beside its sum in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from liger_jax.ops import causal_conv1d

B, T, D, W = 2, 21, 6, 4
run = jax.jit(causal_conv1d)


def draw(rng, dtype=np.float32):
    shapes = (B, T, D), (D, W), (D,), (B, W - 1, D)
    ids = np.array([[1] * 9 + [2] * 2 + [3] * 8 + [0] * 2, [1] * 2 + [2] * 19], np.int32)
    return *[jnp.asarray(rng.standard_normal(s), dtype) for s in shapes], ids


def formula(x, weight, bias, state, ids):
    x, weight, bias, state = (np.asarray(a, np.float64) for a in (x, weight, bias, state))
    tokens, ids = np.concatenate([state, x], axis=1), np.concatenate([ids[:, :1]] * (W - 1) + [ids], axis=1)
    out = np.zeros(x.shape) + bias
    for b, t, j in np.ndindex(B, T, W):
        out[b, t] += weight[:, j] * tokens[b, t + j] * (ids[b, t + j] == ids[b, t + W - 1])
    last = np.where((ids[:, T:] == ids[:, -1:])[..., None], tokens[:, T:], 0.0)
    return out, last


def test_sums_the_tokens_of_a_document(rng):
    x, weight, bias, state, ids = draw(rng)
    for segment_ids, numbers in ((ids, ids), (None, np.ones_like(ids))):
        found = run(x, weight, bias, segment_ids=segment_ids, state=state)
        for y, truth in zip(found, formula(x, weight, bias, state, numbers), strict=True):
            np.testing.assert_allclose(y, truth, atol=2e-6)


def test_float64_is_kept(rng):
    x, weight, bias, state, ids = draw(rng)
    x, weight, bias = (np.asarray(a, np.float64) for a in (x, weight, bias))
    with jax.enable_x64(True):
        y, _ = jax.jit(causal_conv1d)(x, weight, bias, segment_ids=ids, state=np.asarray(state, np.float64))
    np.testing.assert_allclose(y, formula(x, weight, bias, state, ids)[0], rtol=1e-12, atol=1e-12)


def test_a_row_in_two_calls_is_the_row(rng):
    x, weight, bias, *_ = draw(rng)
    first, state = run(x[:, :2], weight, bias)
    second, last = run(x[:, 2:], weight, bias, state=state)
    whole, end = run(x, weight, bias)
    np.testing.assert_allclose(np.concatenate([first, second], axis=1), whole, atol=2e-6)
    np.testing.assert_array_equal(last, end)


def test_gradients_by_differences(rng):
    """The formula is linear in each argument."""
    *arrays, ids = draw(rng)
    weights = [rng.standard_normal(s) for s in ((B, T, D), (B, W - 1, D))]

    def loss(x, weight, bias, state):
        found = causal_conv1d(x, weight, bias, segment_ids=ids, state=state)
        return sum(jnp.sum(a * b) for a, b in zip(found, weights, strict=True))

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*arrays)
    truth = lambda a: sum(np.sum(y * b) for y, b in zip(formula(a[0], a[1], a[2], a[3], ids), weights, strict=True))
    for i, g in enumerate(gradients):
        step = rng.standard_normal(g.shape)
        moved = [np.asarray(a, np.float64) + (step if j == i else 0.0) for j, a in enumerate(arrays)]
        slope = truth(moved) - truth(arrays)
        assert abs(slope - np.sum(np.asarray(g, np.float64) * step)) < 1e-5 * np.linalg.norm(g) * np.linalg.norm(step)


def test_half_precision_rounds_once_and_nan_stays_in_its_document(rng):
    x, weight, bias, state, ids = draw(rng, jnp.bfloat16)
    found, _ = run(x, weight, bias, segment_ids=ids, state=state)
    truth, _ = formula(x, weight, bias, state, ids)
    assert found.dtype == jnp.bfloat16 and np.all(
        np.abs(np.asarray(found, np.float64) - truth) <= 2**-8 * np.abs(truth) + 1e-6
    )
    y, _ = run(x.at[0, 7, 2].set(jnp.nan), weight, bias, segment_ids=ids, state=state)
    assert np.argwhere(np.isnan(y)).tolist() == [[0, 7, 2], [0, 8, 2]]


def test_a_mesh_of_explicit_axes_splits_rows_and_channels(rng, devices):
    x, weight, *_ = draw(rng)
    mesh = jax.make_mesh((len(devices) // 2, 2), ("data", "tensor"), (AxisType.Explicit,) * 2, devices=devices)
    with jax.set_mesh(mesh):
        place = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))
        y, _ = jax.jit(causal_conv1d)(place(x, "data", None, "tensor"), place(weight, "tensor", None))
    np.testing.assert_allclose(y, run(x, weight)[0], atol=1e-6)
    assert jax.typeof(y).sharding.spec == P("data", None, "tensor")


@pytest.mark.usefixtures("unchecked_types")
def test_refusals(rng):
    x, weight, bias, state, ids = draw(rng)
    with pytest.raises(ValueError, match=r"\(D, 1, W\)"):
        causal_conv1d(x, weight[:, None])
    with pytest.raises(ValueError, match="state has shape"):
        causal_conv1d(x, weight, bias, state=state[:, :2])
    with pytest.raises(TypeError, match="integers"):
        causal_conv1d(x, weight, bias, segment_ids=ids.astype(np.float32))
