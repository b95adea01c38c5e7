"""`jax.export` of the loss, of a model and of a training step, whose batch is symbolic."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import export

from liger_jax import ops
from liger_jax.losses import causal_lm_loss
from liger_jax.models import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM
from liger_jax.pallas_kernels.tiles import least_size
from liger_jax.training import make_step

pytestmark = pytest.mark.usefixtures("unchecked_types")  # which know no symbolic sizes
close: Any = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
SIZES = dict(vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
LLAMA = LlamaForCausalLM, LlamaConfig(**SIZES)
GEMMA = Gemma2ForCausalLM, Gemma2Config(**SIZES, num_key_value_heads=1, head_dim=8, sliding_window=4)  # tied
T = 10


def typed(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def exported(function, *types):
    return export.export(jax.jit(function))(*types).call


@pytest.fixture(scope="module")
def batch():
    return export.symbolic_shape("b")[0]


def tokens(rng, size):
    return jnp.asarray(rng.integers(0, 37, (size, T)), jnp.int32)


def test_a_loss_is_written_and_read_again(batch, rng):
    pytest.importorskip("flatbuffers")
    weight = jnp.asarray(rng.standard_normal((37, 16)), jnp.float32)
    types = [
        jax.ShapeDtypeStruct((batch, T, 16), jnp.float32),
        typed(weight),
        jax.ShapeDtypeStruct((batch, T), "int32"),
    ]
    read = export.deserialize(export.export(jax.jit(causal_lm_loss))(*types).serialize())
    arrays = jnp.asarray(rng.standard_normal((3, T, 16)), jnp.float32), weight, tokens(rng, 3)
    close(read.call(*arrays), causal_lm_loss(*arrays))


@pytest.mark.parametrize("mode", ["fast", "lean"])
def test_a_loss_and_its_gradients_serve_any_batch(mode, batch, rng):
    weight = jnp.asarray(rng.standard_normal((37, 16)), jnp.float32)
    loss = jax.value_and_grad(lambda h, w, y: causal_lm_loss(h, w, y, mode=mode), argnums=(0, 1))
    types = [
        jax.ShapeDtypeStruct((batch, T, 16), jnp.float32),
        typed(weight),
        jax.ShapeDtypeStruct((batch, T), "int32"),
    ]
    call, loss = exported(loss, *types), jax.jit(loss)
    for size in (1, 3):
        arrays = jnp.asarray(rng.standard_normal((size, T, 16)), jnp.float32), weight, tokens(rng, size)
        jax.tree.map(close, call(*arrays), loss(*arrays))


@pytest.mark.parametrize(
    "family, config", [LLAMA, pytest.param(*GEMMA, marks=pytest.mark.full)], ids=["llama", "gemma2"]
)
def test_a_training_step_and_the_model_are_exported(family, config, batch, rng):
    graph, params = nnx.split(family(config, rngs=nnx.Rngs(0)))
    optimizer = optax.adamw(1e-3)
    step, state = make_step(graph, optimizer), (params, optimizer.init(params))
    leaves, tree = jax.tree.flatten(state)  # plain arrays are written without more ado
    run = lambda leaves, tokens: jax.tree.leaves(step(jax.tree.unflatten(tree, leaves), tokens))
    call = exported(run, typed(leaves), jax.ShapeDtypeStruct((batch, T), jnp.int32))
    for size in (1, 3):
        own = tokens(rng, size)
        for found, expected in zip(call(leaves, own), jax.jit(run)(leaves, own), strict=True):
            close(found, expected)
    kept, structure = jax.tree.flatten(params)
    logits = lambda leaves, tokens: nnx.merge(graph, jax.tree.unflatten(structure, leaves))(tokens).logits
    call = exported(logits, typed(kept), jax.ShapeDtypeStruct((batch, T), jnp.int32))
    own = tokens(rng, 2)
    close(call(kept, own), logits(kept, own))


def test_what_cannot_be_planned_is_refused_with_a_sentence(batch):
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    labels, loss = jax.ShapeDtypeStruct((batch,), jnp.int32), ops.fused_linear_cross_entropy
    options = dict(mode="lean", memory_budget_bytes=2**40)
    with pytest.raises(ValueError, match="bounds no batch of the symbolic shape"):
        export.export(jax.jit(lambda h, w, y: loss(h, w, y, **options)))(of(batch, 8), of(37, 8), labels)
    with pytest.raises(ValueError, match="Export it for one batch"):
        distil = jax.jit(lambda h, w: ops.fused_linear_distillation(h, w, h, w))
        export.export(distil)(of(batch, 8), of(37, 8))
    model = nnx.eval_shape(lambda: LLAMA[0](LLAMA[1], rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="symbolic length t; only the batch may be symbolic"):
        jax.eval_shape(model, jax.ShapeDtypeStruct((1, *export.symbolic_shape("t")), jnp.int32))


def test_the_least_size_of_a_dimension_is_found():
    (size,) = export.symbolic_shape("b", constraints=["b >= 5"])
    assert [least_size(x) for x in (7, size, 16 * size, 16 * size + 3)] == [7, 5, 80, 83]
