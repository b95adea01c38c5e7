"""What relu_squared promises."""

import functools

import jax
import jax.numpy as jnp
import pytest

from liger_jax import relu_squared
from tests.ops import _oracle
from tests.ops._oracle import normal
from tests.ops.references import plain as reference

KERNELS = ("xla",)
HALF = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


def make(implementation):
    return functools.partial(relu_squared, implementation=implementation)


def plain(x):
    """The plain expression that a model would use."""
    return jnp.square(jax.nn.relu(x))


@pytest.mark.parametrize("shape", [(37, 1030), (1, 3000), (1300, 1), (70,), (3, 5, 129), ()], ids=str)
def test_every_shape_matches_float64(shape, implementation, rng):
    _oracle.check_float32(make(implementation), reference.relu_squared, normal(rng, shape), rng)


@HALF
def test_half_precision_is_no_worse_than_the_plain_expression(dtype, implementation, rng):
    arrays = normal(rng, (150, 130), dtype=dtype)
    _oracle.check_half(make(implementation), plain, reference.relu_squared, arrays, rng)


@HALF
def test_gradient_is_finite_where_the_square_is_not(dtype, implementation):
    x = jnp.array([1.0, -1.0], dtype) * jnp.finfo(dtype).max
    y, dx = _oracle.value_and_gradients(make(implementation), [x], jnp.full((2,), 0.25))
    assert jnp.array_equal(y, jnp.array([jnp.inf, 0.0], dtype))
    assert jnp.array_equal(dx, jnp.array([0.5, 0.0], dtype) * x[0])


def test_zero_has_the_gradient_zero(implementation):
    assert not _oracle.value_and_gradients(make(implementation), [jnp.zeros((3, 5))], jnp.ones((3, 5)))[1].any()


@pytest.mark.parametrize("shape", [(0, 64), (3, 0)], ids=str)
def test_nothing_gives_nothing(shape, implementation):
    results = _oracle.value_and_gradients(make(implementation), [jnp.zeros(shape)], jnp.zeros(shape))
    assert [x.shape for x in results] == [shape] * 2


def test_only_the_input_is_kept_for_the_backward(implementation, rng):
    arrays = normal(rng, (37, 70))
    _oracle.check_residuals(make(implementation), arrays, kept=arrays)


def test_vmap_checkpoint_and_scan(implementation, rng):
    arrays = normal(rng, (5, 70))
    _oracle.check_vmap(make(implementation), arrays, rng)
    _oracle.check_checkpoint(make(implementation), arrays, rng, implementation)
    _oracle.check_scan(make(implementation), arrays, rng)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma, implementation, rng):
    _oracle.check_shard_map(make(implementation), normal(rng, (8, 5, 70)), rng, implementation, check_vma)


@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=str)
def test_xla_is_partitioned_without_communication(axis_type, rng):
    _oracle.check_partitioned(relu_squared, normal(rng, (8, 5, 70)), rng, axis_type)


def test_integers_are_refused(unchecked_types):
    with pytest.raises(TypeError, match="^relu_squared: x has dtype int32, but must be floating point; cast it"):
        relu_squared(jnp.ones((2, 3), int))


def test_there_is_no_other_kernel():
    with pytest.raises(ValueError, match=r"^relu_squared: implementation='triton' is unknown; this op has \('xla',\)"):
        relu_squared(jnp.ones(3), implementation="triton")
