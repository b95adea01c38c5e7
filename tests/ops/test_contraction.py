"""Products and sums that become fused multiply-adds: which do, and with which values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax.pallas_kernels._contraction import contracted

# In float32 x·y rounds to 1, so x·y + z is 0. A fused multiply-add keeps the part that rounding loses.
TINY = 2.0**-13
X, Y, Z = (jnp.full((2, 3), value, jnp.float32) for value in (1 + TINY, 1 - TINY, -1.0))
LEFT = -(TINY**2)  # of x·y + z


def exact(x, y, z):
    """The instruction, on a CPU."""
    assert x.shape == y.shape == z.shape and x.dtype == y.dtype == z.dtype == jnp.float32
    with jax.enable_x64(True):
        return (x.astype(jnp.float64) * y.astype(jnp.float64) + z.astype(jnp.float64)).astype(jnp.float32)


def computed(formula, *args):
    return np.unique(jax.tree.leaves(contracted(formula, exact)(*args))[0])


@pytest.mark.parametrize(
    "formula",
    [
        lambda x, y, z: x * y + z,
        lambda x, y, z: z + x * y,
        lambda x, y, z: x * y - -z,
        lambda x, y, z: -(-z - x * y),
        lambda x, y, z: jnp.where(x > 0, x * y + z, 0.0),
        lambda x, y, z: jax.jit(lambda x, y: x * y + z)(x, y),
        lambda x, y, z: x * y[0, 0] + z,
        lambda x, y, z: x * y + -1.0,
        lambda x, y, z: (x * y + z, x + y)[:1],
        lambda x, y, z: x * y + z * 1.0,
    ],
)
def test_a_product_that_is_used_once_is_made_by_its_sum(formula):
    np.testing.assert_array_equal(computed(formula, X, Y, Z), [LEFT])


def test_a_square_is_a_product():
    x = X[:1]
    np.testing.assert_array_equal(computed(lambda x: jnp.square(x) - (1 + 2 * TINY), x), [TINY**2])
    np.testing.assert_array_equal(computed(lambda x: x**2 - (1 + 2 * TINY), x), [TINY**2])


def used_twice(x, y, z):
    product = x * y
    return product + z, product


def used_and_returned(x, y, z):
    product = x * y
    return (product + z) * product


@pytest.mark.parametrize(
    "formula",
    [used_twice, used_and_returned, lambda x, y, z: jnp.abs(x * y) + z, lambda x, y, z: jax.lax.neg(x * y) - z],
)
def test_any_other_product_is_rounded(formula):
    np.testing.assert_array_equal(computed(formula, X, Y, Z), [0.0])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int32])
def test_other_types_stay_as_they_are(dtype):
    rng = np.random.default_rng()
    x, y, z = (jnp.asarray(rng.integers(-9, 9, (4, 5)), dtype) for _ in range(3))
    np.testing.assert_array_equal(contracted(lambda x, y, z: x * y + z, exact)(x, y, z), x * y + z)


def test_arguments_and_results_are_trees():
    formula = lambda pair, none: {"sum": pair[0] * pair[1] + 1.0, "none": none, "other": pair[1]}
    found = contracted(formula, exact)((X, Y), None)
    assert found["none"] is None and np.all(np.asarray(found["other"]) == Y)
    np.testing.assert_array_equal(found["sum"], formula((X, Y), None)["sum"])
