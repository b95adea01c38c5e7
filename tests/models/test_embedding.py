"""The embedding's gradient, and that of a head tied to it, lose no small terms to rounding."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from liger_jax.models.embedding import embed
from tests.models._llama import CONFIG, make_model


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


def test_the_two_gradients_of_a_tied_head_meet_in_one_array():
    """Of the table's shape the program stores one bfloat16 array: no gradient is rounded before it meets the other."""
    config = dataclasses.replace(CONFIG, tie_word_embeddings=True, num_hidden_layers=1)
    model = nnx.eval_shape(lambda: make_model(config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, scan_layers=False))
    graph, params = nnx.split(model)
    tokens = jax.ShapeDtypeStruct((2, 24), jnp.int32)
    loss = lambda params, tokens: nnx.merge(graph, params)(tokens, labels=tokens).loss
    program = jax.jit(jax.grad(loss)).lower(params, tokens).compile().as_text()
    stored = re.findall(r"= bf16\[61,32\]\S* (\S+?)\(", program[program.index("ENTRY") :])
    assert sum(shape == (61, 32) for shape in (x.shape for x in jax.tree.leaves(params))) == 1
    assert len([operation for operation in stored if operation != "parameter"]) == 1, stored
