"""What layer_norm promises."""

import jax.numpy as jnp
import pytest

from liger_jax import layer_norm
from tests.ops import _norms, _oracle
from tests.ops._oracle import normal
from tests.ops.references import norms as reference


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
