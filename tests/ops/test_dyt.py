"""What dyt promises."""

import jax.numpy as jnp
import pytest

from liger_jax import dyt
from tests.ops import _norms
from tests.ops._oracle import normal
from tests.ops.references import plain as reference

KERNELS = ("xla",)


class TestDyT(_norms.LastAxisPromises):
    op, reference = staticmethod(dyt), staticmethod(reference.dyt)
    num_optional = 2
    shapes = [shape for shape in _norms.Promises.shapes if shape != (1, 1)]  # 1 − tanh² of one large x has few digits

    def parameters(self, rng, shape, dtype):
        return normal(rng, (), shape[-1:], shape[-1:], dtype=dtype)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((jnp.ones((2, 3)), jnp.ones(1)), ValueError, r"alpha has shape \(1,\), but must have shape \(\): one number"),
        (
            (jnp.ones((2, 3)), jnp.ones(()), jnp.ones(2)),
            ValueError,
            r"scale has shape \(2,\), but must have shape \(3,\)",
        ),
        ((jnp.ones((2, 3)), jnp.ones((), int)), TypeError, r"alpha has dtype int32, but must be floating point"),
    ],
)
def test_wrong_arguments_say_what_to_do(arguments, error, message, unchecked_types):
    with pytest.raises(error, match=f"^dyt: {message}"):
        dyt(*arguments)


@pytest.mark.parametrize("name", ["triton", "mosaic_tpu"])
def test_there_is_no_other_kernel(name):
    with pytest.raises(ValueError, match=rf"^dyt: implementation='{name}' is unknown; this op has \('xla',\)"):
        dyt(jnp.ones((2, 3)), jnp.ones(()), implementation=name)
