"""What the gated feed-forward layers promise."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from liger_jax.layers import GeGLUMLP, SwiGLUMLP

GATES = {
    "swiglu": lambda x: x / (1 + np.exp(-x)),
    "geglu": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "exact geglu": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
}
LAYERS = {
    "swiglu": SwiGLUMLP,
    "geglu": GeGLUMLP,
    "exact geglu": functools.partial(GeGLUMLP, approximate=False),
}
layers = pytest.mark.parametrize("name", LAYERS)


def make(name, **options):
    linear = functools.partial(nnx.Linear, use_bias=False, rngs=nnx.Rngs(0), **options)
    return LAYERS[name](12, 20, linear=linear)


@layers
def test_value_matches_float64(name, rng):
    layer, x = make(name), rng.standard_normal((2, 5, 12))
    gate, up, down = (
        np.asarray(getattr(layer, f"{which}_proj").kernel[...], np.float64) for which in ("gate", "up", "down")
    )
    x = np.float32(x).astype(np.float64)
    expected = (GATES[name](x @ gate) * (x @ up)) @ down
    np.testing.assert_allclose(layer(jnp.asarray(x, jnp.float32)), expected, atol=2e-5 * np.abs(expected).max())


@layers
def test_parameters_are_called_as_in_checkpoints(name):
    state = nnx.to_pure_dict(nnx.state(make(name), nnx.Param))
    shapes = {projection: leaves["kernel"].shape for projection, leaves in state.items()}
    assert shapes == {"gate_proj": (12, 20), "up_proj": (12, 20), "down_proj": (20, 12)}


@layers
def test_every_parameter_has_a_gradient_in_its_own_dtype(name, rng):
    layer = make(name, dtype=jnp.bfloat16, param_dtype=jnp.float32)
    x = jnp.asarray(rng.standard_normal((2, 5, 12)), jnp.bfloat16)
    assert layer(x).dtype == jnp.bfloat16
    gradients = nnx.grad(lambda layer: layer(x).astype(jnp.float32).sum())(layer)
    leaves = jax.tree.leaves(gradients)
    assert len(leaves) == 3 and all(leaf.dtype == jnp.float32 and leaf.any() for leaf in leaves)


def test_implementation_reaches_the_op():
    linear = functools.partial(nnx.Linear, rngs=nnx.Rngs(0))
    for layer, op in ((SwiGLUMLP, "swiglu"), (GeGLUMLP, "geglu")):
        with pytest.raises(ValueError, match=f"^{op}: implementation='cuda' is unknown"):
            layer(12, 20, linear=linear, implementation="cuda")(jnp.ones((2, 12)))


def gradients(layer, x):
    """The gradients of a sum of squares, by x and by all parameters."""
    graph, state = nnx.split(layer)
    total = lambda x, state: (nnx.merge(graph, state)(x).astype(jnp.float32) ** 2).sum()
    return jax.jit(jax.grad(total, argnums=(0, 1)))(x, state)


def composed(layer):
    """A copy of the layer that calls its projections one by one."""
    graph, state = nnx.split(layer)
    layer = nnx.merge(graph, state)
    layer.fused = False
    return layer


@layers
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "float32"), (None, "float32")], ids=str)
def test_one_op_has_the_gradients_of_projections_around_the_gate(name, dtypes, rng):
    layer = make(name, dtype=dtypes[0], param_dtype=dtypes[1])
    assert is_one_op(layer)
    x = jnp.asarray(rng.standard_normal((2, 5, 12)), dtypes[0] or "bfloat16")
    tolerance = 2e-5 if dtypes[0] == "float32" else 2**-6
    for ours, theirs in zip(*map(jax.tree.leaves, (gradients(layer, x), gradients(composed(layer), x))), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(
            ours.astype(jnp.float32), theirs.astype(jnp.float32), atol=tolerance * jnp.abs(theirs).max().item()
        )


def is_one_op(layer):
    """Whether a call goes through `ops.gated_mlp`, by the name in its program."""
    return "gated_mlp" in str(jax.make_jaxpr(layer)(jnp.ones((2, 12))))


def test_a_gate_of_one_s_own_is_called():
    class Doubled(SwiGLUMLP):
        def gated(self, gate, up):
            return 2 * super().gated(gate, up)

    linear = lambda rngs: functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
    plain = SwiGLUMLP(12, 20, linear=linear(nnx.Rngs(0)))
    doubled = Doubled(12, 20, linear=linear(nnx.Rngs(0)), fused=False)
    x = jnp.ones((2, 12))
    assert is_one_op(plain) and not is_one_op(doubled)
    np.testing.assert_allclose(doubled(x), 2 * plain(x), rtol=1e-5)


def test_projections_with_more_than_a_kernel_are_called_one_by_one(rng):
    x = jnp.asarray(rng.standard_normal((2, 5, 12)), jnp.float32)
    biased = SwiGLUMLP(12, 20, linear=functools.partial(nnx.Linear, rngs=nnx.Rngs(0)))
    adapted = make("swiglu")
    adapted.up_proj = nnx.LoRALinear(12, 20, lora_rank=2, use_bias=False, rngs=nnx.Rngs(1))
    half = make("swiglu")
    half.down_proj.dtype = jnp.bfloat16
    for layer in (biased, adapted, half):
        assert not is_one_op(layer) and layer(x).shape == x.shape
    assert gradients(adapted, x)[1]["up_proj"]["lora"]["lora_a"][...].shape == (12, 2)
