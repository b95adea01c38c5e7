"""A model on a mesh of four devices computes what it computes on one, and sends nothing but parameters."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from liger_jax.models import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    KernelOptions,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from liger_jax.planner.sharding import shardings
from tests.ops._oracle import sent

SIZES = dict(
    vocab_size=96, hidden_size=32, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
FAMILIES = {
    "llama": lambda **options: LlamaForCausalLM(LlamaConfig(**SIZES), rngs=nnx.Rngs(0), **options),
    "qwen2": lambda **options: Qwen2ForCausalLM(
        Qwen2Config(tie_word_embeddings=True, **SIZES), rngs=nnx.Rngs(0), **options
    ),
    # Two of each three layers are stacked, and the third is by itself.
    "gemma2": lambda **options: Gemma2ForCausalLM(
        Gemma2Config(**SIZES | dict(num_hidden_layers=3, head_dim=8, sliding_window=5)), rngs=nnx.Rngs(0), **options
    ),
    "gemma3": lambda **options: Gemma3ForCausalLM(
        Gemma3TextConfig(**SIZES | dict(head_dim=8, sliding_window=5, sliding_window_pattern=2)),
        rngs=nnx.Rngs(0),
        **options,
    ),
}
MESHES, REMATS, LOSSES = ((2, 2), (1, 4), (4, 1)), ("none", "full", "dots"), ("fused", "logits")
CASES = [
    pytest.param(*case, marks=[] if case == ("llama", (2, 2), "none", "fused") else [pytest.mark.full])
    for case in (
        *itertools.product(("llama", "qwen2"), MESHES, REMATS, LOSSES),
        *itertools.product(("gemma2", "gemma3"), ((2, 2),), ("none",), LOSSES),
    )
]


def on_mesh(function, params, sizes, *tokens):
    """The function compiled for parameters that are fully sharded and tokens that are split over both axes."""
    mesh = make_mesh(jax.devices()[:4], dict(zip(("data", "fsdp"), sizes, strict=True)))
    of_params, of_tokens = shardings(params, mesh), NamedSharding(mesh, P(("data", "fsdp")))
    with jax.set_mesh(mesh):
        jitted = jax.jit(function, out_shardings=(NamedSharding(mesh, P()), of_params))
        placed = jax.device_put(params, of_params), *jax.device_put(tokens, of_tokens)
        compiled = jitted.lower(*placed).compile()
        return compiled(*placed), compiled.as_text()


@pytest.mark.parametrize("family, sizes, remat, loss", CASES)
def test_sharded_loss_and_gradients_are_those_of_one_device(family, sizes, remat, loss, rng):
    tokens = jnp.asarray(rng.integers(0, SIZES["vocab_size"], (8, 37)))
    labels = jnp.where(jnp.asarray(rng.random((8, 37)) < 0.3), -100, tokens)  # unequal numbers count on each device
    weights = jnp.asarray(rng.random((8, 37)), jnp.float32)

    def value_and_grad(batch_axes):
        kernels = KernelOptions(fused_linear_cross_entropy=loss == "fused", batch_axes=batch_axes)
        graph, params = nnx.split(FAMILIES[family](kernels=kernels, remat=remat))
        call = lambda p, t, y, w: nnx.merge(graph, p)(t, labels=y, loss_weights=w).loss
        return jax.value_and_grad(call), params

    single, params = value_and_grad(None)
    expected = jax.jit(single)(params, tokens, labels, weights)
    (value, grads), text = on_mesh(value_and_grad(("data", "fsdp"))[0], params, sizes, tokens, labels, weights)

    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    for (path, grad), truth in zip(jax.tree.leaves_with_path(grads), jax.tree.leaves(expected[1]), strict=True):
        error = np.max(np.abs(np.asarray(grad) - truth)) / np.max(np.abs(truth))
        assert error < 2e-5, (jax.tree_util.keystr(path), error)
    of_parameters = {1}
    for leaf in jax.tree.leaves(params):
        whole = leaf.size, leaf.size // SIZES["num_hidden_layers"]
        of_parameters |= {size // part for size in whole for part in (1, sizes[1])}
    others = {(kind, size) for kind, size in sent(text) if size not in of_parameters}
    assert not others, f"no parameters: {others}"
    assert not {kind for kind, _ in sent(text)} & {"all-to-all", "collective-permute"}


@pytest.mark.full
def test_metrics_of_a_sharded_batch_are_global(rng):
    tokens = jnp.asarray(rng.integers(0, SIZES["vocab_size"], (8, 11)))

    def metrics(batch_axes):
        graph, params = nnx.split(FAMILIES["llama"](kernels=KernelOptions(batch_axes=batch_axes)))
        return lambda p, t: nnx.merge(graph, p)(t, labels=t, return_metrics=True).metrics, params

    single, params = metrics(None)
    expected = jax.jit(single)(params, tokens)
    mesh = make_mesh(jax.devices()[:4], {"data": 2, "fsdp": 2})
    with jax.set_mesh(mesh):
        found = jax.jit(metrics(("data", "fsdp"))[0])(
            jax.device_put(params, shardings(params, mesh)),
            jax.device_put(tokens, NamedSharding(mesh, P(("data", "fsdp")))),
        )
    for name, value in vars(expected).items():
        np.testing.assert_allclose(getattr(found, name), value, rtol=1e-5, err_msg=name)


def test_batch_axes_must_be_names(unchecked_types):
    with pytest.raises(TypeError, match="batch_axes='data' must be a tuple of mesh axis names"):
        KernelOptions(batch_axes="data")
