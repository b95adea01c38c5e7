"""What group_norm promises."""

import functools

import jax.numpy as jnp
import pytest

from liger_jax import group_norm, layer_norm
from tests.ops import _norms, _oracle
from tests.ops._oracle import normal
from tests.ops.references import plain as reference

KERNELS = ("xla",)


class TestGroupNorm(_norms.Promises):
    op, reference = staticmethod(group_norm), staticmethod(reference.group_norm)
    options = {"eps": 1e-6, "num_groups": 2, "channel_axis": 1}
    num_optional = 2
    shape = (8, 6, 5, 7)
    shapes = [(37, 18), (1, 300), (33, 2), (1, 2, 1), (3, 6, 129), (2, 4, 3, 5, 1)]

    def parameters(self, rng, shape, dtype):
        channels = shape[self.options["channel_axis"]]
        return normal(rng, (channels,), (channels,), dtype=dtype)

    def arrays(self, rng, shape, dtype=jnp.float32, parameter_dtype=None):
        shape = (30, 6, 70) if shape == (30, 5, 70) else shape  # an even number of channels
        return super().arrays(rng, shape, dtype, parameter_dtype)


class TestGroupNormOfTheLastAxis(TestGroupNorm):
    options = {"eps": 1e-6, "num_groups": 7, "channel_axis": -1}
    shape = (8, 5, 7)
    shapes = [(37, 21), (3, 5, 2, 14), (1, 3, 7)]

    def arrays(self, rng, shape, dtype=jnp.float32, parameter_dtype=None):
        return _norms.Promises.arrays(self, rng, shape, dtype, parameter_dtype)


def test_one_group_of_one_position_is_layer_norm(rng):
    arrays = normal(rng, (5, 12), (12,), (12,))
    assert _oracle.largest_error(group_norm(*arrays, num_groups=1), layer_norm(*arrays, implementation="xla")) < 1e-6


@pytest.mark.parametrize("channel_axis", [1, 2, -1])
@pytest.mark.parametrize("num_groups", [1, 3, 6])
def test_every_layout_and_number_of_groups_matches_float64(num_groups, channel_axis, rng):
    shape = [4, 5, 7, 2]
    shape[channel_axis] = 6
    options = {"eps": 1e-6, "num_groups": num_groups, "channel_axis": channel_axis}
    ours, oracle = (functools.partial(f, **options) for f in (group_norm, reference.group_norm))
    _oracle.check_float32(ours, oracle, normal(rng, tuple(shape), (6,), (6,)), rng)


@pytest.mark.parametrize(
    "arguments, options, error, message",
    [
        ((jnp.ones((2, 4), int),), {}, TypeError, r"x has dtype int32, but must be floating point"),
        (
            (jnp.ones((2, 4)), jnp.ones(3)),
            {},
            ValueError,
            r"scale has shape \(3,\), but must have shape \(4,\): one entry",
        ),
        ((jnp.ones(4),), {}, ValueError, r"x has shape \(4,\), but must be \(B, C, …\); add the missing axis"),
        ((jnp.ones((2, 4, 0)),), {}, ValueError, r"x has shape \(2, 4, 0\), whose groups must have elements"),
        ((jnp.ones((2, 5)),), {}, ValueError, r"num_groups=2 does not divide the 5 channels on x's axis 1; pass a"),
        ((jnp.ones((2, 4)),), {"num_groups": 2.0}, TypeError, r"num_groups=2.0 must be a Python int"),
        ((jnp.ones((2, 4)),), {"num_groups": 0}, ValueError, r"num_groups=0 does not divide the 4 channels"),
        ((jnp.ones((2, 4)),), {"channel_axis": 0}, ValueError, r"channel_axis=0 is unknown; pass one of \(1, -1\)"),
        ((jnp.ones((2, 4)),), {"eps": "0"}, TypeError, r"eps is a str, but must be a Python number"),
        ((jnp.ones((2, 4)),), {"implementation": "triton"}, ValueError, r"implementation='triton' is unknown"),
    ],
)
def test_wrong_arguments_say_what_to_do(arguments, options, error, message, unchecked_types):
    with pytest.raises(error, match=f"^group_norm: {message}"):
        group_norm(*arguments, **({"num_groups": 2} | options))
