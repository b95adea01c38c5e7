"""What layer_norm promises."""

import dataclasses

import jax.numpy as jnp
import pytest

from liger_jax import layer_norm
from liger_jax.pallas_kernels._rows import config
from liger_jax.pallas_kernels.layer_norm import reference
from tests.ops import _norms, _oracle
from tests.ops._oracle import normal


class TestLayerNorm(_norms.KernelPromises):
    op, reference = staticmethod(layer_norm), staticmethod(reference.layer_norm)
    options = {"eps": 1e-6}
    num_optional = 2

    def parameters(self, rng, shape, dtype):
        return normal(rng, shape[-1:], shape[-1:], dtype=dtype)

    def test_a_bias_needs_no_scale(self, implementation, rng):
        x, _, bias = self.arrays(rng, (37, 70))
        op = lambda x, bias: layer_norm(x, None, bias, implementation=implementation)
        _oracle.check_float32(op, lambda x, bias: reference.layer_norm(x, None, bias, eps=1e-6), [x, bias], rng)

    def test_a_mean_far_above_the_deviation_costs_no_more_than_its_own_rounding(self, implementation, rng):
        """As a difference of mean squares, the variance would be lost altogether."""
        x, *others = self.arrays(rng, (37, 70))
        x = jnp.round(x * 64) / 64  # so that x + 4096 is exact
        lifted = layer_norm(x + 4096, *others, implementation=implementation)
        assert _oracle.largest_error(lifted, layer_norm(x, *others)) < 4 * 4096 * jnp.finfo(x.dtype).eps

    def test_every_statistic_made_at_once_holds_or_is_made_one_by_one(self, implementation, rng, monkeypatch):
        """Beside rows that hold: one whose first element says nothing of its mean, large ones, and one of NaN."""
        if not implementation.startswith("triton"):
            pytest.skip("only Triton's kernel can make them at once")
        of_default, asked = config.triton_config, []

        def at_once(*case):
            asked.append(dataclasses.replace(of_default(*case), at_once=True))
            return asked[-1]

        monkeypatch.setattr(config, "triton_config", at_once)
        op, reference = self.make(implementation)
        x, *others = self.arrays(rng, (8, 2304))
        x = x.at[1, 0].set(1e4).at[2, 7].set(1e4).at[3].add(100.0).at[4].set(3.7).at[5].set(0.0)
        # Squares overflow, and the sum is that of the first element, which is the mean.
        x = x.at[6].multiply(2e20).at[6, 1::2].set(-2e20 * x[6, ::2]).at[6, :2].set(0.0).at[7, 3].set(jnp.nan)
        cotangents = _oracle.random_cotangents(op, [x, *others], rng)
        results = _oracle.value_and_gradients(op, [x, *others], cotangents, wrt=[0])
        for found, expected in zip(results, _oracle.truth(reference, [x, *others], cotangents, wrt=[0]), strict=True):
            for row in range(7):
                assert _oracle.largest_error(found[row], expected[row]) <= _oracle.TOLERANCE, row
            assert jnp.isnan(found[7]).all()
        assert asked

    @pytest.mark.parametrize(
        "arguments, options, error, message",
        [
            ((jnp.ones((2, 3)), jnp.ones(3, int)), {}, TypeError, r"scale has dtype int32, but must be floating point"),
            (
                (jnp.ones((2, 3)), jnp.ones(2)),
                {},
                ValueError,
                r"scale has shape \(2,\), but must have shape \(3,\): one",
            ),
            (
                (jnp.ones((2, 3)), None, jnp.ones(2)),
                {},
                ValueError,
                r"bias has shape \(2,\), but must have shape \(3,\)",
            ),
            ((jnp.ones((2, 3)),), {"eps": "0"}, TypeError, r"eps is a str, but must be a Python number, because"),
            ((jnp.ones((2, 3)),), {"implementation": "cuda"}, ValueError, r"implementation='cuda' is unknown"),
        ],
    )
    def test_wrong_arguments_say_what_to_do(self, arguments, options, error, message, unchecked_types):
        with pytest.raises(error, match=f"^layer_norm: {message}"):
            layer_norm(*arguments, **options)
