"""The embedding's gradient keeps its small terms. With a tied head the sum of both gradients is rounded once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax.models.core.embedding import embed, embed_tied

V, D = 37, 8


def draw(rng, dtype, tokens=(4, 300)):
    """A table, ids (one is frequent, some are missing), and the gradient of the rows."""
    table = jnp.asarray(rng.standard_normal((V, D)), dtype)
    ids = jnp.asarray(np.where(rng.random(tokens) < 0.5, 5, rng.integers(0, V - 9, tokens)))
    return table, ids, jnp.asarray(1 + rng.random((*tokens, D)), dtype)


def summed(ids, dx):
    """The embedding's gradient in float64."""
    total = np.zeros((V, D))
    np.add.at(total, np.asarray(ids), np.asarray(dx, np.float64))
    return total


def rounding_steps(x, exact, dtype):
    """The distance from x to `exact`, counted in neighbouring numbers of `dtype`."""
    step = 2.0 ** np.floor(np.log2(np.abs(exact))) * float(jnp.finfo(dtype).eps)
    return np.abs(np.asarray(x, np.float64) - exact) / step


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_gradient_is_the_float64_sum_rounded_once(dtype, rng):
    table, ids, dx = draw(rng, dtype)
    x, back = jax.vjp(lambda table: embed(table, ids, dtype), table)
    assert jnp.array_equal(x, table[ids])
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(jax.jit(back)(dx)[0], np.float64), summed(ids, dx), rtol=max(1e-5, eps))


@pytest.mark.parametrize("tokens", [(4, 300), (2, 5), (1, 1)], ids=str)
@pytest.mark.parametrize("dtype, most", [(jnp.bfloat16, 0.51), (jnp.float16, 1.6), (jnp.float32, 20)])
def test_a_tied_head_s_gradient_and_the_rows_are_summed_before_they_are_rounded(tokens, dtype, most, rng):
    """Half a step from the float64 sum in bfloat16; float16 is rounded twice more, float32 as its sums are."""
    table, ids, dx = draw(rng, dtype, tokens)
    dhead = rng.standard_normal((V, D)).astype(np.float32)
    dhead = dhead if dtype == jnp.bfloat16 else np.abs(dhead)  # where terms cancel, the steps are small

    def loss(table, dx, dhead):
        rows, head = embed_tied(table, ids, dtype)
        return jnp.sum(rows * dx, dtype=jnp.float32) + jnp.sum(head.astype(jnp.float32) * dhead)

    for gradient in (jax.grad(loss), jax.jit(jax.grad(loss))):
        steps = rounding_steps(gradient(table, dx, dhead), dhead.astype(np.float64) + summed(ids, dx), dtype)
        assert steps.max() < most


def test_a_tied_table_is_handed_on_as_it_is(rng):
    table, ids, _ = draw(rng, jnp.bfloat16)
    rows, head = embed_tied(table, ids, jnp.float32)
    assert jnp.array_equal(rows, table[ids].astype(jnp.float32)) and rows.dtype == jnp.float32
    assert jnp.array_equal(head, table.astype(jnp.float32)) and head.dtype == jnp.float32


def test_ids_outside_the_table_are_nan_and_have_no_gradient():
    ids = jnp.array([[0, 3, -1, 2, 7]])
    x, back = jax.vjp(lambda table: embed(table, ids, jnp.float32), jnp.ones((3, 2)))
    assert jnp.isnan(x).any(axis=-1).tolist() == [[False, True, True, False, True]]
    assert back(jnp.ones((1, 5, 2)))[0].tolist() == [[1, 1], [0, 0], [1, 1]]
