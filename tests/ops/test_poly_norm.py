"""What poly_norm promises."""

import jax.numpy as jnp
import pytest

from liger_jax import poly_norm
from tests.ops import _norms
from tests.ops._oracle import normal
from tests.ops.references import plain as reference

KERNELS = ("xla",)


class TestPolyNorm(_norms.LastAxisPromises):
    op, reference = staticmethod(poly_norm), staticmethod(reference.poly_norm)
    options = {"eps": 1e-6}

    def parameters(self, rng, shape, dtype):
        return normal(rng, (3,), (), dtype=dtype)

    def many(self, arrays):
        """A single number's gradient is a sum of three terms, which may cancel by chance."""
        return [] if arrays[0].size == 1 else super().many(arrays)


@pytest.mark.parametrize(
    "arguments, options, error, message",
    [
        ((jnp.ones((2, 3)), jnp.ones(2)), {}, ValueError, r"weight has shape \(2,\), but must have shape \(3,\): one"),
        (
            (jnp.ones((2, 3)), jnp.ones(3), jnp.ones(1)),
            {},
            ValueError,
            r"bias has shape \(1,\), but must have shape \(\)",
        ),
        ((jnp.ones((2, 3)), jnp.ones(3)), {"eps": None}, TypeError, r"eps is a NoneType, but must be a Python number"),
    ],
)
def test_wrong_arguments_say_what_to_do(arguments, options, error, message, unchecked_types):
    with pytest.raises(error, match=f"^poly_norm: {message}"):
        poly_norm(*arguments, **options)
