"""A model on a mesh of several devices computes what it computes on one, and sends nothing but parameters."""

import functools
import itertools
import os
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from liger_jax.models import (
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    KernelOptions,
    Layout,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)
from liger_jax.ops import YarnRope
from liger_jax.planner import mesh as meshes
from liger_jax.training import make_step
from tests.ops._oracle import each_by_itself, every_second, sent

SIZES = dict(
    vocab_size=96, hidden_size=32, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
MIXED = ("sliding_attention", "full_attention")
GEMMA_4 = dict(
    num_hidden_layers=4, num_kv_shared_layers=2, head_dim=8, global_head_dim=16, sliding_window=5,
    hidden_size_per_layer_input=8, vocab_size_per_layer_input=96,
)  # fmt: skip
FAMILIES = {
    "llama": lambda **options: LlamaForCausalLM(LlamaConfig(**SIZES), rngs=nnx.Rngs(0), **options),
    "qwen2": lambda **options: Qwen2ForCausalLM(
        Qwen2Config(tie_word_embeddings=True, **SIZES), rngs=nnx.Rngs(0), **options
    ),
    "olmo2": lambda **options: Olmo2ForCausalLM(Olmo2Config(**SIZES), rngs=nnx.Rngs(0), **options),
    "olmo3": lambda **options: Olmo3ForCausalLM(
        Olmo3Config(sliding_window=5, layer_types=MIXED, **SIZES), rngs=nnx.Rngs(0), **options
    ),
    "exaone4": lambda **options: Exaone4ForCausalLM(
        Exaone4Config(sliding_window=5, layer_types=MIXED, **SIZES), rngs=nnx.Rngs(0), **options
    ),
    "hunyuan": lambda **options: HunYuanDenseV1ForCausalLM(HunYuanDenseV1Config(**SIZES), rngs=nnx.Rngs(0), **options),
    "glm4": lambda **options: Glm4ForCausalLM(Glm4Config(**SIZES | dict(head_dim=8)), rngs=nnx.Rngs(0), **options),
    "ministral3": lambda **options: Ministral3ForCausalLM(
        Ministral3Config(**SIZES | dict(head_dim=8, rope_scaling=YarnRope(4.0, 4))), rngs=nnx.Rngs(0), **options
    ),
    "granite": lambda **options: GraniteForCausalLM(
        GraniteConfig(residual_multiplier=0.22, **SIZES), rngs=nnx.Rngs(0), **options
    ),
    "smollm3": lambda **options: SmolLM3ForCausalLM(
        SmolLM3Config(no_rope_layer_interval=2, **SIZES), rngs=nnx.Rngs(0), **options
    ),
    "phi3": lambda **options: Phi3ForCausalLM(Phi3Config(sliding_window=5, **SIZES), rngs=nnx.Rngs(0), **options),
    # Two of each three layers are stacked, and the third is by itself.
    "gemma2": lambda **options: Gemma2ForCausalLM(
        Gemma2Config(**SIZES | dict(num_hidden_layers=3, head_dim=8, sliding_window=5)), rngs=nnx.Rngs(0), **options
    ),
    "gemma4": lambda **options: Gemma4ForCausalLM(
        Gemma4TextConfig(layer_types=MIXED + MIXED, **SIZES | GEMMA_4), rngs=nnx.Rngs(0), **options
    ),
    "gemma3": lambda **options: Gemma3ForCausalLM(
        Gemma3TextConfig(**SIZES | dict(head_dim=8, sliding_window=5, sliding_window_pattern=2)),
        rngs=nnx.Rngs(0),
        **options,
    ),
}
AXES = ("data", "fsdp")
MESHES, REMATS, LOSSES = ("both", "fsdp", "data"), ("none", "full", "dots", "offload"), ("fused", "logits")
AXIS_TYPES = (AxisType.Auto, AxisType.Explicit)
BY_DEFAULT = [("llama", "both", "none", "fused", kind) for kind in AXIS_TYPES]
CASES = [
    pytest.param(*case, marks=[] if case in BY_DEFAULT else [pytest.mark.full])
    for case in (
        *((*case, AxisType.Auto) for case in every_second(("llama", "qwen2"), MESHES, REMATS, LOSSES)),
        *itertools.product(
            (
                "olmo2",
                "olmo3",
                "exaone4",
                "glm4",
                "granite",
                "hunyuan",
                "ministral3",
                "phi3",
                "smollm3",
                "gemma2",
                "gemma3",
                "gemma4",
            ),
            ("both",),
            ("none",),
            LOSSES,
            AXIS_TYPES[:1],
        ),
        *itertools.product(("llama",), MESHES, ("none",), LOSSES, AXIS_TYPES[1:]),
        *itertools.product(("llama", "gemma3"), ("both",), (1,), ("fused",), AXIS_TYPES),
        *itertools.product(("qwen2", "gemma2", "gemma3"), ("both",), ("full",), ("fused",), AXIS_TYPES[1:]),
    )
]


@pytest.fixture
def make_mesh(devices):
    """Makes meshes of all devices, along one axis or both."""

    def make(split, axis_type=AxisType.Auto):
        data = {"both": len(devices) // 2, "fsdp": 1, "data": len(devices)}[split]
        return meshes.make_mesh(devices, dict(zip(AXES, (data, len(devices) // data), strict=True)), axis_type)

    return make


def on_mesh(function, params, mesh, *tokens):
    """The function compiled for parameters that are fully sharded and tokens that are split over both axes."""
    of_params, of_tokens = Layout().shardings(params, mesh), NamedSharding(mesh, P(AXES))
    with jax.set_mesh(mesh):
        jitted = jax.jit(function, out_shardings=(NamedSharding(mesh, P()), of_params))
        placed = jax.device_put(params, of_params), *jax.device_put(tokens, of_tokens)
        compiled = jitted.lower(*placed).compile(each_by_itself(mesh.devices.flat))
        return compiled(*placed), compiled.as_text()


def value_and_grad(family, **options):
    """The function of parameters and a batch, and the parameters' types."""
    graph, params = nnx.split(nnx.eval_shape(lambda: FAMILIES[family](**options)))
    call = lambda p, t, y, w, s: nnx.merge(graph, p)(t, labels=y, loss_weights=w, segment_ids=s).loss
    return jax.value_and_grad(call), params


@functools.cache
def on_one_device(family):
    """Parameters, a batch, and loss and gradients, which every mesh, loss and remat is compared with."""
    rng = np.random.default_rng([int(os.environ["TEST_SEED"]), zlib.crc32(family.encode())])
    single, _ = value_and_grad(family)
    params = jax.jit(lambda: nnx.split(FAMILIES[family]())[1])()
    tokens = rng.integers(0, SIZES["vocab_size"], (8, 37)).astype(np.int32)
    labels = np.where(rng.random((8, 37)) < 0.3, -100, tokens)  # unequal numbers count on each device
    weights = rng.random((8, 37)).astype(np.float32)
    segments = (1 + np.cumsum(rng.random((8, 37)) < 0.1, axis=1)).astype(np.int32)
    batch = tokens, labels.astype(np.int32), weights, segments
    return params, batch, jax.tree.map(np.asarray, jax.jit(single)(params, *batch))


@pytest.mark.parametrize("family, split, remat, loss, axis_type", CASES)
def test_sharded_loss_and_gradients_are_those_of_one_device(family, split, remat, loss, axis_type, make_mesh):
    mesh = make_mesh(split, axis_type)
    params, batch, expected = on_one_device(family)
    kernels = KernelOptions(fused_linear_cross_entropy=loss == "fused", batch_axes=AXES)
    (value, grads), text = on_mesh(value_and_grad(family, kernels=kernels, remat=remat)[0], params, mesh, *batch)

    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    for (path, grad), truth in zip(jax.tree.leaves_with_path(grads), jax.tree.leaves(expected[1]), strict=True):
        error = np.max(np.abs(np.asarray(grad) - truth)) / max(np.max(np.abs(truth)), 1e-30)  # some are not trained
        assert error < (5e-4 if family == "gemma4" else 2e-5), (jax.tree_util.keystr(path), error)
    of_parameters = {1}
    for leaf in jax.tree.leaves(params):
        whole = leaf.size, leaf.size // SIZES["num_hidden_layers"]
        of_parameters |= {size // part for size in whole for part in (1, mesh.shape["fsdp"])}
    of_parameters |= {32 * 128} if family == "gemma4" else set()  # one product of a full layer's queries, keys, values
    others = {(kind, size) for kind, size in sent(text) if size not in of_parameters}
    assert not others, f"no parameters: {others}"
    assert not {kind for kind, _ in sent(text)} & {"all-to-all", "collective-permute"}


@pytest.mark.full
@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
def test_metrics_and_logits_of_a_sharded_batch_are_global(axis_type, make_mesh, rng):
    tokens = jnp.asarray(rng.integers(0, SIZES["vocab_size"], (8, 11)))

    def call(batch_axes):
        graph, params = nnx.split(FAMILIES["llama"](kernels=KernelOptions(batch_axes=batch_axes)))
        options = dict(return_metrics=True, return_logits=True)
        return lambda p, t: nnx.merge(graph, p)(t, labels=t, **options), params

    single, params = call(None)
    expected = jax.jit(single)(params, tokens)
    mesh = make_mesh("both", axis_type)
    with jax.set_mesh(mesh):
        found = jax.jit(call(AXES)[0])(
            jax.device_put(params, Layout().shardings(params, mesh)),
            jax.device_put(tokens, NamedSharding(mesh, P(AXES))),
        )
    np.testing.assert_allclose(found.logits, expected.logits, rtol=1e-4, atol=1e-5)
    assert found.logits.sharding.spec[0] == AXES
    for name, value in vars(expected.metrics).items():
        np.testing.assert_allclose(getattr(found.metrics, name), value, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    "axis_type, state_memory",
    [(AxisType.Auto, "device"), *(pytest.param(kind, "host", marks=pytest.mark.full) for kind in AXIS_TYPES)],
    ids=str,
)
def test_sharded_steps_in_micro_batches_learn_what_one_device_does_in_one(axis_type, state_memory, make_mesh, rng):
    """Two steps with clipping, momentum and unequal numbers of tokens on each device; the state stays where it is."""
    tokens = rng.integers(0, SIZES["vocab_size"], (8, 21))
    labels = np.where(rng.random(tokens.shape) < np.linspace(0, 0.8, 8)[:, None], -100, tokens)
    batch = {name: jnp.asarray(x, jnp.int32) for name, x in dict(input_ids=tokens, labels=labels).items()}
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))
    start = nnx.split(FAMILIES["llama"]())[1]

    def two_steps(mesh, **options):
        graph, _ = nnx.split(FAMILIES["llama"](kernels=KernelOptions(batch_axes=mesh and AXES), remat="full"))
        state = jax.tree.map(jnp.copy, (start, optimizer.init(start)))
        step = jax.jit(make_step(graph, optimizer, **options), donate_argnums=0)
        if mesh is None:
            return step(step(state, batch)[0], batch)
        on_mesh = Layout().shardings(state, mesh, optimizer)
        on_host = [x.with_memory_kind("pinned_host") for x in jax.tree.leaves(on_mesh[1])]
        if options["state_on_host"]:
            on_mesh = on_mesh[0], jax.tree.unflatten(jax.tree.structure(on_mesh[1]), on_host)
        with jax.set_mesh(mesh):
            placed = jax.device_put(batch, NamedSharding(mesh, P(AXES)))
            state = jax.device_put(state, on_mesh)
            where = [x.sharding for x in jax.tree.leaves(state)]
            (state, loss) = step(step(state, placed)[0], placed)
        for x, before in zip(jax.tree.leaves(state), where, strict=True):
            assert x.sharding.is_equivalent_to(before, x.ndim) and x.sharding.memory_kind == before.memory_kind
        return state, loss

    mesh = make_mesh("both", axis_type)
    (expected, _), loss = two_steps(None)
    (found, _), sharded_loss = two_steps(mesh, micro_batches=2, state_on_host=state_memory == "host")
    np.testing.assert_allclose(sharded_loss, loss, rtol=1e-5)
    for ours, truth, before in zip(*map(jax.tree.leaves, (found, expected, start)), strict=True):
        assert np.abs(np.asarray(ours) - truth).max() < 1e-4 * np.abs(truth - before).max() + 1e-7


def test_on_an_explicit_mesh_the_batch_must_lie_as_the_options_say(make_mesh):
    mesh = make_mesh("both", AxisType.Explicit)
    tokens = jnp.zeros((8, 5), jnp.int32)
    with jax.set_mesh(mesh):
        place = lambda *axes: jax.device_put(tokens, NamedSharding(mesh, P(*axes)))
        with pytest.raises(ValueError, match=r"P\('data', None\), but the layout shards the batch over \(\)"):
            FAMILIES["llama"]()(place("data"))
        model = FAMILIES["llama"](kernels=KernelOptions(batch_axes=("data",)))
        with pytest.raises(ValueError, match=r"P\('fsdp', None\), but the layout shards the batch over \('data',\)"):
            model(place("fsdp"))
        with pytest.raises(ValueError, match="cache is given on a mesh with Explicit axes"):
            model(place("data"), cache=model.init_cache(8, 8))


@pytest.mark.parametrize("kernels", [KernelOptions(), KernelOptions(implementation="triton:interpret")])
def test_a_sharded_model_without_batch_axes_names_them(kernels, make_mesh):
    mesh = make_mesh("fsdp")
    model = FAMILIES["llama"](kernels=kernels)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"given KernelOptions\(batch_axes=…\)"):
        tokens = jax.device_put(jnp.zeros((8, 5), jnp.int32), NamedSharding(mesh, P("fsdp")))
        jax.eval_shape(lambda tokens: model(tokens, labels=tokens).loss, tokens)


@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
def test_a_mesh_that_is_not_in_context_is_missed(axis_type, make_mesh):
    model = FAMILIES["llama"](kernels=KernelOptions(batch_axes=("fsdp",)))
    mesh = make_mesh("fsdp", axis_type)
    tokens = jax.device_put(jnp.zeros((8, 5), jnp.int32), NamedSharding(mesh, P("fsdp")))
    with pytest.raises(ValueError, match=r"Call the model under jax.set_mesh\(mesh\)"):
        model(tokens)


def test_batch_axes_must_be_names(unchecked_types):
    with pytest.raises(TypeError, match="batch_axes='data' must be a tuple of mesh axis names"):
        KernelOptions(batch_axes="data")
