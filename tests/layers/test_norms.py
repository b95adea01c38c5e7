"""What the normalisation layers promise."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from liger_jax import layers

RNGS = nnx.Rngs(0)
# Ours, Flax's of the same meaning, and the shape of an input.
PAIRS = [
    (layers.RMSNorm(12, rngs=RNGS), nnx.RMSNorm(12, rngs=RNGS), (5, 7, 12)),
    (layers.LayerNorm(12, rngs=RNGS), nnx.LayerNorm(12, rngs=RNGS), (5, 7, 12)),
    (layers.LayerNorm(12, use_bias=False, rngs=RNGS), nnx.LayerNorm(12, use_bias=False, rngs=RNGS), (5, 12)),
    (layers.GroupNorm(12, 3, rngs=RNGS), nnx.GroupNorm(12, 3, rngs=RNGS), (5, 7, 12)),
]
ALL = [
    *(ours for ours, _, _ in PAIRS),
    layers.GroupNorm(12, 3, channel_axis=1, rngs=RNGS),
    layers.DyT(12),
    layers.PolyNorm(),
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: type(pair[0]).__name__)
def test_has_flax_parameters_and_values(pair, rng):
    ours, theirs, shape = pair
    their_graph, params = nnx.split(theirs)
    params = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), params)
    x = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    our_graph, _ = nnx.split(ours)
    found, expected = jax.jit(lambda p: [nnx.merge(graph, p)(x) for graph in (our_graph, their_graph)])(params)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("layer", ALL, ids=lambda x: type(x).__name__)
def test_keeps_the_inputs_dtype_and_gives_every_parameter_a_gradient(layer, rng):
    x = jnp.asarray(rng.standard_normal((5, 12)), jnp.bfloat16)
    weights = jnp.asarray(rng.standard_normal((5, 12)), jnp.float32)
    layer.dtype = jnp.bfloat16  # DyT and PolyNorm always have the input's
    assert layer(x).dtype == jnp.bfloat16
    gradients = nnx.jit(nnx.grad(lambda layer: (layer(x) * weights).sum()))(layer)
    leaves = jax.tree.leaves(gradients)
    assert leaves and all(g.dtype == jnp.float32 and np.asarray(g).any() for g in leaves)


def test_an_offset_scale_starts_at_the_identity(rng):
    x = jnp.asarray(rng.standard_normal((5, 12)), jnp.float32)
    gemma = layers.RMSNorm(12, offset=1.0, rngs=RNGS)
    assert not gemma.scale[...].any()
    assert jnp.allclose(gemma(x), layers.RMSNorm(12, rngs=RNGS)(x))


def test_a_named_implementation_runs_or_says_why_not():
    with pytest.raises(ValueError, match="layer_norm: implementation='cuda' is unknown"):
        layers.LayerNorm(4, implementation="cuda", rngs=RNGS)(jnp.ones((2, 4)))


def oracle_of_dyt(layer, x):
    alpha, scale, bias = (np.asarray(v[...], np.float64) for v in (layer.alpha, layer.scale, layer.bias))
    return np.tanh(alpha * x) * scale + bias


def oracle_of_poly_norm(layer, x):
    weight, bias = (np.asarray(v[...], np.float64) for v in (layer.weight, layer.bias))
    normed = lambda p: x**p / np.sqrt(np.mean(x ** (2 * p), axis=-1, keepdims=True) + layer.epsilon)
    return sum(w * normed(p) for w, p in zip(weight, (3, 2, 1), strict=True)) + bias


@pytest.mark.parametrize(
    "make, oracle",
    [(lambda: layers.DyT(12), oracle_of_dyt), (layers.PolyNorm, oracle_of_poly_norm)],
    ids=["dyt", "poly"],
)
def test_layers_that_flax_lacks_match_float64_at_any_parameters(make, oracle, rng):
    graph, params = nnx.split(make())
    layer = nnx.merge(graph, jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape), p.dtype), params))
    x = rng.standard_normal((5, 12)).astype(np.float32)
    expected = oracle(layer, x.astype(np.float64))
    np.testing.assert_allclose(layer(jnp.asarray(x)), expected, atol=2e-5 * np.abs(expected).max())


def test_a_group_norm_with_channels_last_is_the_transposed_one(rng):
    x = jnp.asarray(rng.standard_normal((2, 6, 4, 5)), jnp.float32)
    first, last = layers.GroupNorm(6, 3, channel_axis=1, rngs=RNGS), layers.GroupNorm(6, 3, rngs=RNGS)
    moved = jnp.moveaxis(last(jnp.moveaxis(x, 1, -1)), -1, 1)
    np.testing.assert_allclose(first(x), moved, atol=1e-5)


def test_a_layer_without_bias_has_no_such_parameter():
    for layer in (layers.LayerNorm(4, use_bias=False, rngs=RNGS), layers.DyT(4, use_bias=False)):
        assert layer.bias is None and "bias" not in nnx.to_pure_dict(nnx.state(layer, nnx.Param))


@pytest.mark.parametrize("layer", ALL, ids=lambda x: type(x).__name__)
def test_a_layer_runs_alike_under_jit_and_as_a_stack(layer, rng):
    x = jnp.asarray(rng.standard_normal((5, 12)), jnp.float32)
    graph, params = nnx.split(layer)
    stacked = jax.tree.map(lambda p: np.stack([p, 2 * p]), params)
    one_by_one = [nnx.merge(graph, jax.tree.map(lambda p, i=i: p[i], stacked))(x) for i in range(2)]
    found = jax.jit(jax.vmap(lambda params: nnx.merge(graph, params)(x)))(stacked)
    chex.assert_trees_all_close(found, np.stack(one_by_one), atol=1e-5)
