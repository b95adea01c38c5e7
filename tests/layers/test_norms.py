"""What the normalisation layers promise."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from liger_jax import layers

RNGS = nnx.Rngs(0)
# Ours, Flax's of the same meaning, and the shape of an input.
PAIRS = [
    (layers.RMSNorm(12), nnx.RMSNorm(12, rngs=RNGS), (5, 7, 12)),
    (layers.LayerNorm(12), nnx.LayerNorm(12, rngs=RNGS), (5, 7, 12)),
    (layers.LayerNorm(12, use_bias=False), nnx.LayerNorm(12, use_bias=False, rngs=RNGS), (5, 12)),
    (layers.GroupNorm(12, 3, channel_axis=-1), nnx.GroupNorm(12, 3, rngs=RNGS), (5, 7, 12)),
]
ALL = [*(ours for ours, _, _ in PAIRS), layers.GroupNorm(12, 3), layers.DyT(12), layers.PolyNorm()]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: type(pair[0]).__name__)
def test_has_flax_parameters_and_values(pair, rng):
    ours, theirs, shape = pair
    their_graph, params = nnx.split(theirs)
    params = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), params)
    x = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    our_graph, _ = nnx.split(ours)
    assert jnp.allclose(nnx.merge(our_graph, params)(x), nnx.merge(their_graph, params)(x), atol=1e-5)


@pytest.mark.parametrize("layer", ALL, ids=lambda x: type(x).__name__)
def test_keeps_the_inputs_dtype_and_gives_every_parameter_a_gradient(layer, rng):
    x = jnp.asarray(rng.standard_normal((5, 12)), jnp.bfloat16)
    weights = jnp.asarray(rng.standard_normal((5, 12)), jnp.float32)
    assert layer(x).dtype == jnp.bfloat16
    gradients = nnx.grad(lambda layer: (layer(x) * weights).sum())(layer)
    leaves = jax.tree.leaves(gradients)
    assert leaves and all(g.dtype == jnp.float32 and g.any() for g in leaves)


def test_an_offset_scale_starts_at_the_identity(rng):
    x = jnp.asarray(rng.standard_normal((5, 12)), jnp.float32)
    gemma = layers.RMSNorm(12, offset=1.0, casting_mode="gemma")
    assert not gemma.scale[...].any()
    assert jnp.allclose(gemma(x), layers.RMSNorm(12)(x))


def test_a_named_implementation_runs_or_says_why_not():
    with pytest.raises(ValueError, match="layer_norm: implementation='cuda' is unknown"):
        layers.LayerNorm(4, implementation="cuda")(jnp.ones((2, 4)))
