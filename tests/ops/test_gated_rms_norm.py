"""What gated_rms_norm promises."""

import jax.numpy as jnp
import pytest

from liger_jax import gated_rms_norm
from tests.ops import _norms, _oracle
from tests.ops.references import norms as reference

KERNELS = ("xla",)


class TestGatedRMSNorm(_norms.LastAxisPromises):
    op, reference = staticmethod(gated_rms_norm), staticmethod(reference.gated_rms_norm)
    options = {"eps": 1e-6}
    num_rows = 2
    limit = 2.0**-14  # the result is as large as the gate, and the scale's gradient a sum of such

    def test_no_more_than_the_inputs_is_kept_for_the_backward(self, implementation, rng):
        arrays = self.arrays(rng, self.shape)
        _oracle.check_residuals(self.make(implementation)[0], arrays, arrays)

    @pytest.mark.parametrize("eps", [0.0, 1e-38])
    def test_the_smallest_numbers_are_normalised_where_eps_is_zero(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, eps, rng
    ):
        """Only what is normalised is small: the product of two such numbers would be no number of float32."""
        op, reference = self.make("xla", eps=eps)
        x, *others = self.arrays(rng, (5, 70))
        arrays = [x * jnp.array([1e-25, 1.0, 1e-14, 1e30, 1e-32])[:, None], *others]
        cotangents = _oracle.random_cotangents(op, arrays, rng)
        results = _oracle.value_and_gradients(op, arrays, cotangents, range(2))
        for result, true in zip(results, _oracle.truth(reference, arrays, cotangents, range(2)), strict=True):
            for row, true_row in zip(result, true, strict=True):
                assert _oracle.largest_error(row, true_row) <= 5 * _oracle.TOLERANCE


@pytest.mark.parametrize("gate, expected", [(0.0, 0.0), (-200.0, 0.0), (200.0, 200.0)])
def test_the_gate_opens_and_closes(gate, expected):
    y = gated_rms_norm(jnp.ones((1, 3)), jnp.full((1, 3), gate), eps=0.0)
    assert jnp.allclose(y, expected, rtol=1e-6)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((jnp.ones((2, 3)), jnp.ones(3)), r"gate has shape \(3,\), but must have shape \(2, 3\): it multiplies"),
        ((jnp.ones((2, 3)), jnp.ones((2, 3)), jnp.ones(2)), r"scale has shape \(2,\), but must have shape \(3,\)"),
    ],
)
def test_wrong_shapes_say_what_to_do(arguments, message, unchecked_types):
    with pytest.raises(ValueError, match=f"^gated_rms_norm: {message}"):
        gated_rms_norm(*arguments)
