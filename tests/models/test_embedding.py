"""The embedding's gradient loses no small terms to rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax.models.embedding import embed


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_gradient_is_the_float64_sum_rounded_once(dtype, rng):
    table = jnp.asarray(rng.standard_normal((37, 8)), dtype)
    ids = jnp.asarray(np.where(rng.random((4, 300)) < 0.5, 5, rng.integers(0, 37, (4, 300))))  # one is frequent
    dx = jnp.asarray(1 + rng.random((4, 300, 8)), dtype)
    x, back = jax.vjp(lambda table: embed(table, ids, dtype), table)
    assert jnp.array_equal(x, table[ids])
    expected = np.zeros(table.shape)
    np.add.at(expected, np.asarray(ids), np.asarray(dx, np.float64))
    np.testing.assert_allclose(
        np.asarray(jax.jit(back)(dx)[0], np.float64), expected, rtol=max(1e-5, float(jnp.finfo(dtype).eps))
    )


def test_ids_outside_the_table_are_nan_and_have_no_gradient():
    ids = jnp.array([[0, 3, -1, 2]])
    x, back = jax.vjp(lambda table: embed(table, ids, jnp.float32), jnp.ones((3, 2)))
    assert jnp.isnan(x).any(axis=-1).tolist() == [[False, True, True, False]]
    assert back(jnp.ones((1, 4, 2)))[0].tolist() == [[1, 1], [0, 0], [1, 1]]
