"""A model whose layers' products are FP8: which products are, what it computes, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType

from liger_jax.models import (
    KernelOptions,
    Layout,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)
from liger_jax.models.core import tiles
from liger_jax.models.core.remat import POLICIES
from liger_jax.models.lora import add_lora, merge_lora, trainable
from liger_jax.models.quantized import quantize
from liger_jax.ops._place import Place, described
from liger_jax.ops.fp8_matmul import refusal
from liger_jax.planner import mesh as meshes

SIZES = dict(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.1,
)  # fmt: skip
PROJECTIONS = 7  # of a layer; a scan's program has one layer
FP8 = KernelOptions(products="fp8")
FP8_DTYPES = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
# Operands are off by 2.5 % and a gradient's by 5 %, through two layers and back: of four seeds, at most 0.011 and 0.19.
LOSS_OFF, GRADIENTS_OFF = 0.05, 0.3


@pytest.fixture(autouse=True)
def fp8_here():
    if (reason := refusal(Place(described(jax.devices()[0])))) is not None:
        pytest.skip(reason)


def make_model(family=LlamaForCausalLM, config=LlamaConfig, seed=0, **options):
    return family(config(**SIZES), rngs=nnx.Rngs(seed), **options)


def loss_of(graph, *rest):
    return lambda params, tokens: nnx.merge(graph, params, *rest)(tokens, labels=tokens).loss


def value_and_gradients(model, tokens):
    graph, params = nnx.split(model)
    return jax.jit(jax.value_and_grad(loss_of(graph)))(params, tokens)


def products(function, *arrays):
    """How many products of a program have FP8 operands, and how many have others."""
    counts = [0, 0]

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                counts[not all(x.aval.dtype in FP8_DTYPES for x in equation.invars)] += 1
            for sub in jaxprs_in_params(equation.params):
                walk(sub)

    walk(jax.make_jaxpr(function)(*arrays).jaxpr)
    return tuple(counts)


def off(found, expected):
    """The norm of the difference as a share of the norm, over all leaves."""
    joined = lambda tree: np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(tree)])
    found, expected = joined(found), joined(expected)
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def check_near(found, expected):
    """The loss and gradients of FP8 products beside those of others: near, and not the same."""
    assert 0 < abs(found[0] - expected[0]) < LOSS_OFF
    assert 0.01 < off(found[1], expected[1]) < GRADIENTS_OFF


@pytest.fixture
def tokens(rng):
    return jnp.asarray(rng.integers(0, SIZES["vocab_size"], (4, 32)), jnp.int32)


def test_the_products_of_the_seven_projections_are_fp8_and_no_others(tokens):
    models = [nnx.split(make_model(kernels=kernels)) for kernels in (KernelOptions(), FP8)]
    plain, of_fp8 = (products(loss_of(graph), params, tokens) for graph, params in models)
    assert plain[0] == 0
    assert of_fp8 == (PROJECTIONS, plain[1] - (PROJECTIONS - 2))  # others take q, k and v as one product
    graph, params = models[1]
    assert products(jax.grad(loss_of(graph)), params, tokens)[0] == 3 * PROJECTIONS


def test_the_loss_is_near_that_of_full_products(tokens):
    graph, params = nnx.split(make_model(kernels=FP8))
    losses = [jax.jit(loss_of(graph))(params, tokens) for graph in (graph, nnx.split(make_model())[0])]
    assert 0 < abs(losses[0] - losses[1]) < LOSS_OFF


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, 1])
def test_loss_and_gradients_are_near_those_of_full_products(seed, tokens):
    expected = value_and_gradients(make_model(seed=seed), tokens)
    check_near(value_and_gradients(make_model(seed=seed, kernels=FP8), tokens), expected)


@pytest.mark.full
def test_rematerialised_and_unrolled_layers_compute_the_same(tokens):
    expected = value_and_gradients(make_model(kernels=FP8), tokens)
    for remat in POLICIES:
        assert off(value_and_gradients(make_model(kernels=FP8, remat=remat), tokens), expected) < 1e-3
    unrolled = make_model(kernels=FP8, scan_layers=False)
    assert abs(value_and_gradients(unrolled, tokens)[0] - expected[0]) < 1e-3


@pytest.mark.parametrize("remat", ["none", "dots", pytest.param("full", marks=pytest.mark.full)])
def test_layers_keep_as_much_for_the_backward_as_with_other_products(remat, tokens):
    kept = []
    for kernels in (KernelOptions(), FP8):
        graph, params = nnx.split(make_model(kernels=kernels, remat=remat, dtype=jnp.bfloat16))
        pullback_of = lambda params, loss: jax.vjp(loss, params)[1]
        loss = functools.partial(loss_of(graph), tokens=tokens)
        pullback = jax.eval_shape(functools.partial(pullback_of, loss=loss), params)
        kept.append(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pullback)))
    assert kept[1] == kept[0]


def on_devices(mesh, layout, tokens):
    """Loss and gradients of a model on a mesh, and how many of the loss's products are FP8."""
    graph, params = nnx.split(make_model(kernels=KernelOptions(products="fp8", layout=layout)))
    with jax.set_mesh(mesh):
        params = jax.device_put(params, layout.shardings(params, mesh))
        batch = layout.place(dict(input_ids=tokens, labels=tokens))
        loss = lambda params, batch: nnx.merge(graph, params)(**batch).loss
        return jax.jit(jax.value_and_grad(loss))(params, batch), products(loss, params, batch)[0]


@pytest.mark.parametrize(
    "axis_type", [pytest.param(kind, marks=pytest.mark.full) for kind in AxisType if kind.name != "Manual"]
)
def test_devices_that_split_batch_and_parameters_share_their_scales(axis_type, tokens, devices):
    expected = value_and_gradients(make_model(kernels=FP8), tokens)
    mesh = meshes.make_mesh(devices, dict(fsdp=len(devices)), axis_type)
    found, count = on_devices(mesh, Layout(batch=("fsdp",)), tokens)
    assert count == PROJECTIONS
    assert off(found, expected) < 1e-3


@pytest.mark.full
@pytest.mark.parametrize("axis", ["tensor", "sequence"])
def test_devices_that_split_layers_are_near_full_products(axis, tokens, devices):
    mesh = meshes.make_mesh(devices[:2], {"fsdp": 1, axis: 2}, AxisType.Auto)
    found, count = on_devices(mesh, Layout(batch=("fsdp",), **{axis: axis}), tokens)
    assert count == PROJECTIONS
    check_near(found, value_and_gradients(make_model(), tokens))


@pytest.mark.full
def test_tiles_of_tokens_have_fp8_products(monkeypatch, tokens):
    for name, value in dict(LEAST_TOKENS=16, MOST_TOKENS=16, LEAST_TILES=2, LEAST_TILES_OF_OFFLOADED=2).items():
        monkeypatch.setattr(tiles, name, value)
    expected = value_and_gradients(make_model(remat="full"), tokens)
    model = make_model(kernels=FP8, remat="full")
    graph, params = nnx.split(model)
    assert products(loss_of(graph), params, tokens)[0] == PROJECTIONS
    check_near(value_and_gradients(model, tokens), expected)


def test_fused_projections_have_fp8_products(tokens):
    graph, params = nnx.split(make_model(Phi3ForCausalLM, Phi3Config, kernels=FP8))
    assert products(jax.grad(loss_of(graph)), params, tokens)[0] == 3 * 4


def test_adapters_are_trained_beside_frozen_fp8_products(tokens):
    base = make_model(kernels=FP8)
    forward = products(loss_of(nnx.split(base)[0]), nnx.split(base)[1], tokens)
    model = add_lora(base, 4, alpha=8, rngs=nnx.Rngs(1))
    graph, params, *frozen = trainable(model)
    by_adapters = products(jax.grad(loss_of(graph, *frozen)), params, tokens)[0]
    assert by_adapters == 2 * PROJECTIONS  # a frozen kernel has no gradient
    merged = nnx.split(merge_lora(model))
    assert products(loss_of(merged[0]), merged[1], tokens) == forward


@pytest.mark.full
def test_adapters_beside_fp8_products_have_gradients_near_those_beside_others(tokens):
    results = []
    for kernels in (FP8, KernelOptions()):
        model = add_lora(make_model(kernels=kernels), 4, alpha=8, rngs=nnx.Rngs(1))
        graph, params, *frozen = trainable(model)
        noise = iter(jax.random.split(jax.random.key(2), 200))
        params = jax.tree.map(lambda leaf: leaf + 0.03 * jax.random.normal(next(noise), leaf.shape), params)  # noqa: B023
        results.append(jax.jit(jax.value_and_grad(loss_of(graph, *frozen)))(params, tokens))
    check_near(*results)


def test_what_has_no_fp8_products_is_refused(tmp_path, unchecked_types):
    with pytest.raises(ValueError, match=r"products='int8' must be 'fp8', or None"):
        KernelOptions(products="int8")
    with pytest.raises(ValueError, match=r"quantize: .* quantised weights and KernelOptions\(products='fp8'\)"):
        quantize(make_model(kernels=FP8), "int8", block_size=16)
    with pytest.raises(ValueError, match=r"products='fp8'\): experts have no FP8 products"):
        make_model(MixtralForCausalLM, MixtralConfig, kernels=FP8)
    make_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="from_pretrained: .* would round them a second time"):
        LlamaForCausalLM.from_pretrained(tmp_path, kernels=FP8, quantize="int8")
