"""Adapters: their values and gradients, the cost of frozen weights, their files, and the model without them."""

import dataclasses
import importlib
import importlib.util
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from liger_jax.models import AutoModelForCausalLM, KernelOptions, Layout
from liger_jax.models.core.dropout import dropped, token_words
from liger_jax.models.hugging_face.adapter_targets import LAYER, problem_of_expression
from liger_jax.models.lora import (
    add_lora,
    load_adapters,
    merge_lora,
    save_adapters,
    trainable,
    with_adapters,
    with_dropout,
)
from liger_jax.models.quantized import quantize
from liger_jax.training import make_step
from tests.models import _hugging_face as hugging_face
from tests.models._llama import CONFIG, loss_and_gradients, make_model, random_tokens
from tests.ops._oracle import first

RANK, ALPHA = 3, 6.0
SMALL = dataclasses.replace(CONFIG, num_hidden_layers=1)
HAS_PEFT = all(importlib.util.find_spec(name) for name in ("torch", "transformers", "peft"))


def adapted(config=CONFIG, *, targets=None, seed=1, rslora=False, dora=False, dropout=0.0, **options):
    """A model with adapters that have been trained: B is no longer zero, nor DoRA's lengths those of the weights."""
    model = make_model(config, **options)
    settings = dict(alpha=ALPHA, targets=targets, rslora=rslora, dora=dora, dropout=dropout)
    return moved(add_lora(model, RANK, **settings, rngs=nnx.Rngs(seed)))


def moved(model):
    graph, adapters, base = trainable(model)
    noise = lambda x: 0.2 * np.random.default_rng(x.size).standard_normal(x.shape)
    shifted = lambda x: x + noise(x).astype(x.dtype)
    return nnx.merge(graph, jax.tree.map(shifted, adapters), base)


def by_path(state):
    return {path: np.asarray(x[...], np.float64) for path, x in nnx.to_flat_state(state)}


def close(found, truth, tolerance=2e-5):
    assert np.abs(np.asarray(found, np.float64) - truth).max() <= tolerance * np.abs(truth).max()


@jax.jit
def loss_of(model, tokens):
    return model(tokens, labels=tokens).loss


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_new_adapters_change_nothing_and_are_the_same_on_scanned_and_unrolled_layers(rng):
    tokens = random_tokens(rng)
    models = [make_model(scan_layers=scan) for scan in (True, False)]
    before = [loss_of(model, tokens) for model in models]
    for model, loss in zip(models, before, strict=True):
        add_lora(model, RANK, alpha=ALPHA, rngs=nnx.Rngs(1))
        close(loss_of(model, tokens), loss, 1e-6)
    scanned, unrolled = (model.model.layers for model in models)
    for of_scan, *of_layers in (
        [holder(x) for x in (scanned, *unrolled)]
        for holder in (lambda layer: layer.self_attn.k_proj, lambda layer: layer.mlp.down_proj)
    ):
        a = of_scan.lora_a[...]
        np.testing.assert_array_equal(a, jnp.stack([layer.lora_a[...] for layer in of_layers]))
        bound = a.shape[-2] ** -0.5
        assert 0.9 * bound < jnp.abs(a).max() <= bound and len(np.unique(a)) == a.size  # each layer has its own
        assert not of_scan.lora_b[...].any()


CASES = {
    "scanned": {},
    "unrolled, q and v beside the fused feed-forward": dict(scan_layers=False, targets=("q_proj", "v_proj")),
    "full": dict(remat="full", rslora=True),
    "offload": dict(remat="offload", scan_layers=False),
    "offload, with attention": dict(remat="offload_attention"),
    "dots": dict(remat="dots"),
    "plain": dict(kernels=KernelOptions.off()),
}


@pytest.mark.parametrize("options", first(3, list(CASES.values())), ids=CASES)
def test_gradients_of_adapters_follow_from_those_of_the_merged_weights(options, rng):
    """With W' = W + s·A·B the chain rule says dA = s·dW'·Bᵀ and dB = s·Aᵀ·dW'; dW' is the model's own gradient."""
    model, tokens = adapted(**options), random_tokens(rng)
    arguments = {"segment_ids": jnp.asarray(np.repeat([[1, 2, 3]], 4, axis=1).repeat(2, axis=0))}
    merged = merge_lora(with_adapters(model, True))
    truth, gradients = loss_and_gradients(merged, tokens, arguments)
    of_weights = by_path(gradients)

    graph, adapters, base = trainable(model)
    loss = lambda adapters: nnx.merge(graph, adapters, base)(tokens, labels=tokens, **arguments).loss
    value, found = jax.jit(jax.value_and_grad(loss))(adapters)
    close(value, truth)
    parts = by_path(adapters)
    scale = ALPHA / (np.sqrt(RANK) if options.get("rslora") else RANK)
    assert len(parts) == 2 * len(options.get("targets", LAYER)) * (2 if options.get("scan_layers") is False else 1)
    for (*path, part), gradient in by_path(found).items():
        dw = scale * of_weights[(*path, "kernel")]
        a, b = (parts[(*path, name)] for name in ("lora_a", "lora_b"))
        expected = dw @ b.swapaxes(-1, -2) if part == "lora_a" else a.swapaxes(-1, -2) @ dw
        # Both sides are float32. From the truth in float64, in twelve draws, the adapters' gradients were off by 1.4e-5
        # at most, and those that follow from the merged weights by 4.1e-5 ("full", whose scale is the largest).
        close(gradient, expected, tolerance=1e-4)


def test_dora_turns_the_weight_and_trains_the_length_of_its_columns(rng):
    """y = m·V/‖V‖·x with V = W + s·A·B, against the same written with plain arrays; the norm is a constant."""
    model, tokens = adapted(SMALL, targets=("v_proj",), dora=True), random_tokens(rng)
    graph, adapters, base = trainable(model)
    found = jax.jit(jax.grad(lambda p: nnx.merge(graph, p, base)(tokens, labels=tokens).loss))(adapters)

    projection = model.model.layers.self_attn.v_proj
    parts = {name: getattr(projection, name)[...] for name in ("lora_a", "lora_b", "magnitude")}
    plain, rest = nnx.split(with_adapters(model, False))

    def loss(parts):
        v = projection.kernel[...] + ALPHA / RANK * parts["lora_a"] @ parts["lora_b"]
        norm = jax.lax.stop_gradient(jnp.sqrt(jnp.sum(v**2, axis=1, keepdims=True)))
        same = nnx.merge(plain, rest, copy=True)
        same.model.layers.self_attn.v_proj.kernel[...] = v / norm * parts["magnitude"][:, None]
        return same(tokens, labels=tokens).loss

    for name, truth in jax.jit(jax.grad(loss))(parts).items():
        close(getattr(found.model.layers.self_attn.v_proj, name)[...], truth)


def test_dora_with_dropout_drops_the_adapter_s_inputs_and_not_the_weight_s(rng):
    """y = m/‖V‖·(x·W + s·(drop x)·A·B). PEFT's training adds (m/‖V‖ − 1)·(drop x − x)·W, whose mean is zero."""
    model = adapted(SMALL, targets=("o_proj",), dora=True, dropout=0.25, scan_layers=False)
    x = rng.normal(size=(200, 32))
    layer = with_dropout(model, jax.random.key(0)).model.layers[0].self_attn.o_proj
    kept = dropped(jnp.ones(x.shape), 0.25, layer.dropout_key[...], token_words((1, 200))[0]) > 0
    w, a, b, m = (np.asarray(v[...], np.float64) for v in (layer.kernel, layer.lora_a, layer.lora_b, layer.magnitude))
    factor = m / np.linalg.norm(w + ALPHA / RANK * a @ b, axis=0)
    truth = factor * (x @ w + ALPHA / RANK * (np.where(kept, x, 0) / 0.75) @ a @ b)
    close(layer(jnp.asarray(x, jnp.float32)), truth)


def test_dropout_needs_a_key_and_drops_an_adapter_s_inputs_by_the_rate():
    model, x = adapted(SMALL, targets=("o_proj",), dropout=0.25, scan_layers=False), jnp.ones((1, 40, 32))
    projection = lambda model: model.model.layers[0].self_attn.o_proj
    layer, dropping = projection(model), projection(with_dropout(model, jax.random.key(0)))
    assert jnp.ptp(layer(x), axis=1).max() == 0  # without a key all positions are alike
    identity = jnp.eye(32)  # so that y shows what is dropped
    dropping.lora_a, dropping.lora_b = nnx.LoRAParam(identity), nnx.LoRAParam(identity)
    kept = np.asarray(dropping(x) - nnx.Linear.__call__(dropping, x)) / dropping.scale
    np.testing.assert_allclose(kept, np.where(kept > 0.5, 1 / 0.75, 0), atol=1e-4)
    assert abs((kept < 0.5).mean() - 0.25) < 5 * (0.25 * 0.75 / kept.size) ** 0.5


def test_dropout_differs_by_key_and_by_layer_and_survives_rematerialisation(rng):
    tokens = random_tokens(rng)

    def gradients(*seeds, **options):
        graph, adapters, base = trainable(adapted(dropout=0.5, targets=("q_proj", "up_proj"), **options))

        def loss(adapters, key):
            return with_dropout(nnx.merge(graph, adapters, base), key)(tokens, labels=tokens).loss

        step = jax.jit(jax.grad(loss))
        return [step(adapters, jax.random.key(seed)) for seed in seeds]

    one, other = gradients(0, 1)
    (again,) = gradients(0, remat="full")
    for x, y, z in zip(*map(jax.tree.leaves, (one, other, again)), strict=True):
        assert jnp.abs(x - y).max() > 0.01 * jnp.abs(x).max()
        close(z, x)
    keys = with_dropout(adapted(dropout=0.5), jax.random.key(0)).model.layers.self_attn.q_proj.dropout_key[...]
    assert len(np.unique(jax.random.key_data(keys), axis=0)) == CONFIG.num_hidden_layers


def test_adapters_are_float32_beside_bfloat16_weights_and_computed_in_the_model_s_dtype(rng):
    options = dict(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, scan_layers=False)
    model, tokens = adapted(SMALL, **options), random_tokens(rng)
    assert model.model.layers[0].mlp.up_proj(jnp.ones((1, 32), jnp.bfloat16)).dtype == jnp.bfloat16
    graph, adapters, base = trainable(model)
    gradient = jax.grad(lambda p: nnx.merge(graph, p, base)(tokens, labels=tokens).loss)
    gradients = jax.eval_shape(gradient, adapters)
    assert {x.dtype for x in jax.tree.leaves((adapters, gradients))} == {jnp.dtype(jnp.float32)}
    assert {x.dtype for x in jax.tree.leaves(base)} == {jnp.dtype(jnp.bfloat16)}


# --- what is frozen costs nothing -------------------------------------------------------------------------------------

WIDE = dataclasses.replace(CONFIG, hidden_size=40, head_dim=6, intermediate_size=56)  # no two widths alike


def gradient_shapes(config, frozen, **options):
    """The shapes of weights' gradients among a step's products, sorted."""
    model = nnx.eval_shape(lambda: adapted(config, **options))
    graph, adapters, base = trainable(model)
    tokens = jax.ShapeDtypeStruct((2, 7), jnp.int32)
    loss = lambda adapters, base, tokens: nnx.merge(graph, adapters, base)(tokens, labels=tokens).loss
    text = jax.jit(jax.grad(loss, 0 if frozen else (0, 1))).lower(adapters, base, tokens).as_text()
    widths = {40, 24, 12, 48, 56, 61}  # D, queries, keys, all three, F, V
    products = re.findall(r"stablehlo\.dot_general.*-> tensor<(\d+)x(\d+)xf32>", text)
    return sorted((int(m), int(n)) for m, n in products if {int(m), int(n)} <= widths)


@pytest.mark.parametrize(
    "tied, options",
    [
        (False, {}),
        (True, dict(scan_layers=False)),
        (False, dict(scan_layers=False, targets=("q_proj", "v_proj"))),
        (True, dict(remat="full", targets=("o_proj",))),
    ],
    ids=["scanned", "unrolled", "q and v", "full"],
)
def test_no_product_is_the_gradient_of_a_frozen_weight(tied, options):
    """In layers, in the fused feed-forward beside adapters, and in the loss."""
    config = dataclasses.replace(WIDE, tie_word_embeddings=tied)
    assert gradient_shapes(config, frozen=True, **options) == []
    assert len(gradient_shapes(config, frozen=False, **options)) >= 5  # some stand in one product


def test_a_tied_bfloat16_head_is_held_in_float32_only_if_it_is_trained():
    config = dataclasses.replace(SMALL, tie_word_embeddings=True)
    make = lambda: make_model(config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    tokens = jax.ShapeDtypeStruct((2, 7), jnp.int32)

    def is_copied(make, trained):
        graph, params, frozen = nnx.split(nnx.eval_shape(make), trained, ...)
        loss = lambda params, frozen, tokens: nnx.merge(graph, params, frozen)(tokens, labels=tokens).loss
        text = jax.jit(jax.grad(loss)).lower(params, frozen, tokens).as_text()
        return "(tensor<61x32xbf16>) -> tensor<61x32xf32>" in text

    assert is_copied(make, nnx.Param)
    assert not is_copied(lambda: add_lora(make(), RANK, alpha=ALPHA, rngs=nnx.Rngs(1)), nnx.LoRAParam)


@pytest.mark.parametrize("remat", ["none", "dots"])
def test_a_layer_keeps_the_sums_of_products_and_adapters_and_not_their_terms(remat):
    config = dataclasses.replace(SMALL, intermediate_size=72)

    def kept(model):
        graph, params = nnx.split(nnx.eval_shape(model).model)
        x, table = jax.ShapeDtypeStruct((2, 10, 32), jnp.float32), jnp.ones((1, 10, config.head_dim))
        inputs = {"full_attention": (table, table, None, None)}
        layer = lambda x, params: nnx.merge(graph, params).run_layers(x, inputs)
        arrays = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(layer, *args)[1], x, params))
        return sum(array.shape == (2, 10, 72) for array in arrays)

    options = dict(scan_layers=False, remat=remat)
    assert kept(lambda: make_model(config, **options)) == 2
    assert kept(lambda: adapted(config, **options)) == kept(lambda: adapted(config, dora=True, **options)) == 2


def test_a_step_trains_adapters_alone_and_micro_batches_give_the_batch_s_gradient(rng):
    model, tokens = adapted(SMALL, targets=("q_proj", "down_proj")), random_tokens(rng, batch=4)
    graph, adapters, base = trainable(model)
    optimizer = optax.adamw(1e-2)
    results = []
    for micro_batches in (1, 2):
        step = jax.jit(make_step(graph, optimizer, micro_batches=micro_batches))
        state, loss = step((adapters, optimizer.init(adapters)), tokens, base)
        results.append((state, loss))
    (whole, loss), (parts, other_loss) = results
    close(other_loss, loss)
    (after, _), (other, _) = whole, parts
    size = sum(x.size for x in jax.tree.leaves(adapters))
    assert sum(x.size for x in jax.tree.leaves(whole)) == 3 * size + 1  # Adam's two moments and its count
    for x, y, start in zip(*map(jax.tree.leaves, (after, other, adapters)), strict=True):
        assert jnp.abs(x - start).max() > 1e-3
        np.testing.assert_allclose(x, y, atol=1e-4)


# --- several devices --------------------------------------------------------------------------------------------------


SHARDED = dataclasses.replace(CONFIG, vocab_size=64)
AXES = ("data", "fsdp")
AUTO = pytest.param(AxisType.Auto, marks=pytest.mark.full)
AXIS_TYPES = pytest.mark.parametrize("axis_type", [AUTO, AxisType.Explicit], ids=str)


@pytest.fixture
def mesh(axis_type, devices):
    return jax.make_mesh((len(devices) // 2, 2), AXES, axis_types=(axis_type,) * 2, devices=devices)


def sharded_model(mesh):
    graph, params = nnx.split(make_model(SHARDED, kernels=KernelOptions(batch_axes=AXES)))
    return nnx.merge(graph, jax.device_put(params, Layout().shardings(params, mesh)))


@AXIS_TYPES
def test_sharded_loss_and_gradients_are_those_of_one_device(mesh, rng):
    tokens = random_tokens(rng, batch=8)

    def value_and_gradients(model, tokens):
        graph, adapters, base = trainable(model)

        def loss(adapters, base, tokens):
            model = with_dropout(nnx.merge(graph, adapters, base), jax.random.key(3))
            return model(tokens, labels=tokens).loss

        return adapters, jax.jit(jax.value_and_grad(loss))(adapters, base, tokens)

    options = dict(dropout=0.3, dora=True, targets=("q_proj", "down_proj"))
    _, (truth, expected) = value_and_gradients(adapted(SHARDED, **options), tokens)
    with jax.set_mesh(mesh):
        model = add_lora(sharded_model(mesh), RANK, alpha=ALPHA, rngs=nnx.Rngs(1), **options)
        tokens = jax.device_put(tokens, NamedSharding(mesh, P(AXES)))
        adapters, (value, found) = value_and_gradients(moved(model), tokens)
    assert model.model.layers.self_attn.q_proj.lora_a[...].sharding.spec == P(None, "fsdp", None)
    close(value, truth)
    for (path, x), y in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(np.asarray(x) - y).max() < 2e-5 * np.abs(y).max(), path


@pytest.mark.parametrize("param_dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.full)])
def test_dora_s_norm_is_that_of_the_weights_that_the_products_take(param_dtype, devices):
    """With weights that all round up by 0.39 %: on one device, on a mesh that gathers rounded ones, and merged."""
    mesh = jax.make_mesh((len(devices) // 2, 2), AXES, axis_types=(AxisType.Auto,) * 2, devices=devices)
    options = dict(dtype=jnp.bfloat16, param_dtype=param_dtype, scan_layers=False)
    model = make_model(SHARDED, **options)
    up = jnp.asarray(1 + 1.01 * 2.0**-8, param_dtype)  # 1.00395: in bfloat16 1.0078
    q_proj = model.model.layers[0].self_attn.q_proj
    q_proj.kernel[...] = jnp.full_like(q_proj.kernel[...], up)
    add_lora(model, RANK, alpha=ALPHA, targets=("q_proj",), dora=True, rngs=nnx.Rngs(1))
    np.testing.assert_allclose(q_proj.magnitude[...], 1.0078125 * np.sqrt(SHARDED.hidden_size), rtol=1e-6)
    q_proj.magnitude[...] *= 2
    alone = jax.jit(lambda projection: projection.factor())(q_proj)
    np.testing.assert_allclose(alone, 2, rtol=1e-6)

    graph, state = nnx.split(q_proj)
    with jax.set_mesh(mesh):
        state = jax.device_put(state, Layout().shardings(state, mesh))
        whole = jax.jit(lambda state: nnx.merge(graph, Layout().gathered(state, jnp.bfloat16)).factor())(state)
    np.testing.assert_allclose(whole, alone, rtol=1e-6)
    kernel = q_proj.kernel[...].astype(jnp.float32)
    np.testing.assert_allclose(merge_lora(model).model.layers[0].self_attn.q_proj.kernel[...], 2 * kernel, rtol=1e-6)


@AXIS_TYPES
def test_adapters_load_and_merge_on_a_mesh_and_kernels_stay_split(mesh, tmp_path):
    one = adapted(SHARDED, targets=("q_proj", "down_proj"), dora=True)
    save_adapters(one, tmp_path)
    with jax.set_mesh(mesh):
        model = merge_lora(load_adapters(sharded_model(mesh), tmp_path))
    expected = by_path(nnx.state(merge_lora(one)))
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        close(variable[...], expected[path], 1e-6)
    assert model.model.layers.mlp.down_proj.kernel[...].sharding.is_equivalent_to(
        NamedSharding(mesh, P(None, "fsdp", None)), 3
    )


@pytest.mark.full
@AXIS_TYPES
def test_dora_of_quantised_weights_loads_and_merges_on_a_mesh(mesh, tmp_path):
    quantised = lambda model: quantize(model, "nf4", block_size=16)
    add = lambda model: add_lora(quantised(model), RANK, alpha=ALPHA, dora=True, rngs=nnx.Rngs(1))
    one = moved(add(make_model(SHARDED)))
    save_adapters(one, tmp_path)
    with jax.set_mesh(mesh):
        new = add(sharded_model(mesh)).model.layers.mlp.up_proj.magnitude[...]
        model = merge_lora(load_adapters(quantised(sharded_model(mesh)), tmp_path))
    close(new, np.asarray(add(make_model(SHARDED)).model.layers.mlp.up_proj.magnitude[...]), 1e-6)
    expected = by_path(nnx.state(merge_lora(one)))
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        close(variable[...], expected[path], 1e-6)


# --- the model without adapters, and with them merged ----------------------------------------------------------------


def test_with_the_adapters_off_the_model_is_the_one_before_and_holds_the_same_arrays(rng):
    tokens = random_tokens(rng)
    policy, before = adapted(), make_model()
    reference = with_adapters(policy, False)
    assert loss_of(reference, tokens) == loss_of(before, tokens) != loss_of(policy, tokens)
    assert loss_of(with_adapters(reference, True), tokens) == loss_of(policy, tokens)
    shared = zip(*(jax.tree.leaves(nnx.state(model)) for model in (policy, reference)), strict=True)
    assert all(x is y for x, y in shared)


@pytest.mark.parametrize("dora", [False, True])
def test_a_merged_model_computes_the_same_and_saves_as_any_other(dora, rng, tmp_path):
    model, tokens = adapted(SMALL, dora=dora), random_tokens(rng)
    with pytest.raises(ValueError, match=r"save_pretrained: .*merge_lora\(model\).* The first of \d+ is .*lora_a\."):
        model.save_pretrained(tmp_path)
    truth = loss_of(model, tokens)
    merge_lora(model)
    assert nnx.graphdef(model) == nnx.graphdef(make_model(SMALL))
    close(loss_of(model, tokens), truth)
    model.save_pretrained(tmp_path)
    close(loss_of(AutoModelForCausalLM.from_pretrained(tmp_path), tokens), truth)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scan_layers", [True, False])
def test_saved_adapters_load_into_scanned_and_unrolled_models(scan_layers, rng, tmp_path):
    targets = ("q_proj", "mlp.up_proj")
    model = adapted(scan_layers=scan_layers, targets=targets, rslora=True, dora=True, dropout=0.1)
    save_adapters(model, tmp_path, base_model="org/name")
    loaded = load_adapters(make_model(scan_layers=not scan_layers), tmp_path)
    again = load_adapters(make_model(scan_layers=scan_layers), tmp_path)
    assert nnx.graphdef(again) == nnx.graphdef(model)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(model))
    tokens = random_tokens(rng)
    close(loss_of(loaded, tokens), loss_of(model, tokens))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj", "up_proj"] and config["base_model_name_or_path"] == "org/name"
    shapes = {name: x.shape for name, x in load_file(tmp_path / "adapter_model.safetensors").items()}
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    assert shapes[name] == (RANK, 32) and len(shapes) == 2 * 2 * 3


def test_adapters_on_some_layers_are_saved_and_loaded_as_those_alone(rng, tmp_path):
    """Into unrolled layers, and into a stack of layers, where the other layers' A and B are 0 and stay so."""
    targets, names = (
        ("1.self_attn.q_proj", "0.mlp.up_proj"),
        ["model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj"],
    )
    tokens, model = random_tokens(rng), adapted(targets=targets, scan_layers=False)
    save_adapters(model, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == names
    again = load_adapters(make_model(scan_layers=False), tmp_path)
    assert nnx.graphdef(again) == nnx.graphdef(model)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(model))

    stack = load_adapters(make_model(), tmp_path)
    close(loss_of(stack, tokens), loss_of(model, tokens))
    graph, params, base = trainable(stack)
    optimizer = optax.adamw(1e-2)
    step = jax.jit(make_step(graph, optimizer))
    (params, _), _ = step((params, optimizer.init(params)), tokens, base)
    save_adapters(nnx.merge(graph, params, base), tmp_path / "trained")
    assert json.loads((tmp_path / "trained" / "adapter_config.json").read_text())["target_modules"] == names
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path, tmp_path / "trained"))
    assert before.keys() == after.keys() and all((before[name] != after[name]).any() for name in before)

    # PEFT may say the same by numbers of layers. What its config means must be there: this may be another model's.
    path, ends = tmp_path / "adapter_config.json", dict(target_modules=["up_proj"], exclude_modules=None)
    save_adapters(adapted(targets=("0.mlp.up_proj",), scan_layers=False), tmp_path)
    path.write_text(json.dumps(config | ends | {"layers_to_transform": [0]}))
    load_adapters(make_model(), tmp_path)
    path.write_text(json.dumps(config | ends | {"exclude_modules": r".*\.1\..*"}))
    load_adapters(make_model(), tmp_path)
    path.write_text(json.dumps(config | ends))
    with pytest.raises(ValueError, match=r"Missing: \['base_model.model.model.layers.1.mlp.up_proj.lora_A"):
        load_adapters(make_model(), tmp_path)


def test_a_rank_may_be_above_a_width(rng):
    """PEFT allows it: 256 on Qwen2.5-0.5B, whose keys are 128 wide."""
    model, tokens = make_model(SMALL), random_tokens(rng)
    model = moved(add_lora(model, 40, alpha=ALPHA, targets=("k_proj", "down_proj"), rngs=nnx.Rngs(1)))
    found = loss_of(model, tokens)
    close(found, loss_of(merge_lora(model), tokens))


def test_adapters_that_do_not_fit_are_refused_and_leave_the_model_as_it_was(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"lacks \['adapter_config.json', 'adapter_model.safetensors'\]"):
        load_adapters(make_model(), tmp_path)
    save_adapters(adapted(targets=("q_proj",)), tmp_path)
    model = make_model(dataclasses.replace(CONFIG, num_hidden_layers=1, hidden_size=16))
    with pytest.raises(ValueError, match=r"Missing: none; left over: \[.*layers.1.*\]; shapes: .*\(3, 32\), expected"):
        load_adapters(model, tmp_path)
    assert not nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"layer_replication": [[0, 2]], "init_lora_weights": "pissa"}))
    with pytest.raises(
        ValueError, match=r"has {'layer_replication': \[\[0, 2\]\], 'init_lora_weights': 'pissa'}, and {'layer"
    ):
        load_adapters(model, tmp_path)
    path.write_text("{")
    with pytest.raises(ValueError, match="adapter_config.json is damaged"):
        load_adapters(model, tmp_path)


def with_fields(**fields):
    return lambda folder, config, tensors: (folder / "adapter_config.json").write_text(json.dumps(config | fields))


def with_text(text):
    return lambda folder, config, tensors: (folder / "adapter_config.json").write_bytes(text)


def with_tensors(change):
    def write(folder, config, tensors):
        save_file({name: change(tensor) for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")

    return write


DAMAGED = {
    "no_finite": (with_fields(lora_alpha=float("nan")), "adapter_config.json is damaged: .*'NaN' is no finite float64"),
    "infinite": (with_fields(lora_alpha=float("inf")), "'Infinity' is no finite float64"),
    "above_float32": (with_fields(lora_alpha=1e39), r"lora_alpha=1e\+39 must be a finite float32 above 0"),
    "text": (with_fields(lora_alpha="4"), r"lora_alpha='4' \(str\) must be"),
    "a_word_for_false": (with_fields(use_rslora="false"), r"use_rslora='false' \(str\) must be True or False"),
    "a_number_for_true": (with_fields(use_dora=1), r"use_dora=1 \(int\) must be True or False"),
    "half_a_rank": (with_fields(r=4.9), r"r=4.9 \(float\) must be an int from 1"),
    "a_rank_of_true": (with_fields(r=True), r"r=True \(bool\) must be an int from 1"),
    "no_rank": (with_text(b"{}"), "r is missing; lora_alpha is missing"),
    "dropout": (with_fields(lora_dropout=None), r"lora_dropout=None must be a number in \[0, 1\)"),
    "expression": (with_fields(target_modules="("), "target_modules='.' is no regular expression: missing"),
    "slow": (
        with_fields(target_modules="(.+)+!"),
        "target_modules=.* may take too long: a repeated group has a choice",
    ),
    "slow_choice": (with_fields(exclude_modules="(?:.|.)*!"), "exclude_modules=.* may take too long: a repeated group"),
    "slow_row": (with_fields(target_modules=".*" * 9 + "!"), "target_modules=.* may take too long: it has 9 repet"),
    "names": (with_fields(exclude_modules=[3]), r"exclude_modules=\[3\] must be a list of names"),
    "a_pattern": (with_fields(rank_pattern={"(": 2}), r"rank_pattern: '\(' is no regular expression"),
    "a_pattern_s_rank": (with_fields(rank_pattern={"q_proj": 0}), r"rank_pattern: {'q_proj': 0} must be an int"),
    "a_pattern_s_alpha": (with_fields(alpha_pattern={"q_proj": "4"}), r"alpha_pattern: {'q_proj': '4'} must be a"),
    "a_pattern_s_list": (with_fields(alpha_pattern=[4]), r"alpha_pattern=\[4\] must hold values by names"),
    "layers_pattern": (with_fields(layers_pattern=["("]), r"layers_pattern='\(' is no regular expression"),
    "layers": (with_fields(layers_to_transform=[0.5]), r"layers_to_transform=\[0.5\] must be numbers of layers"),
    "deep": (with_text(b"[" * 100_000), "is nested too deep"),
    "bytes": (with_text(b"\xff"), "adapter_config.json is damaged: .*'utf-8' codec"),
    "list": (with_text(b"[]"), "must hold an object"),
    "int": (with_tensors(lambda x: x.astype(np.int32)), r"must be of \['BF16', .*and there are base_model.* I32"),
    "bool": (with_tensors(lambda x: x > 0), "and there are base_model.* BOOL"),
    "complex": (with_tensors(lambda x: x.astype(np.complex64)), "and there are base_model.* C64"),
    "nan": (with_tensors(lambda x: x * np.nan), "has numbers that are not finite float32, in base_model"),
    "large": (with_tensors(lambda x: x.astype(np.float64) + 1e300), "has numbers that are not finite float32"),
}


def test_expressions_that_peft_s_users_write_are_taken():
    words = "(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)"
    usual = (
        r".*\.(q|v)_proj",
        r"^(?!.*patch_embed).*(?:fc1|fc2|qkv|proj).*",
        r"model\.layers\.(1[0-9]|2\d)\.(self_attn|mlp)\.(?:q_proj|up_proj)",
        rf"(?:.*?(?:language|text).*?{words}.*?(?:q_proj|k_proj).*?)|(?:\bmodel\.layers\.[\d]{{1,}}\.{words}\.(?:(?:q_proj)))",
        r"[(+*|]x|a\(b+\)+",
    )
    assert [problem_of_expression(each) for each in usual] == [None] * len(usual)
    slow = ("(a+)+", "(a|b)+", "((a)*b){2,}", "((a|b)c)*", "(?:a{3})+", "([)]+)*", "a?" * 30 + "a" * 30)
    assert all("too long" in str(problem_of_expression(each)) for each in slow)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model without adapters, and a folder of adapters for it."""
    folder = tmp_path_factory.mktemp("adapters")
    save_adapters(adapted(SMALL, targets=("q_proj",)), folder)
    return make_model(SMALL), folder


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_adapters_are_one_sentence_and_leave_the_model_as_it_was(case, saved, tmp_path):
    (model, good), (damage, message) = saved, DAMAGED[case]
    folder = shutil.copytree(good, tmp_path / "adapters")
    tensors = load_file(folder / "adapter_model.safetensors")
    damage(folder, json.loads((folder / "adapter_config.json").read_text()), tensors)
    with pytest.raises(ValueError, match=f"^load_adapters: .*{message}") as caught:
        load_adapters(model, folder)
    assert len(str(caught.value)) < 20_000 and not nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))


# --- arguments --------------------------------------------------------------------------------------------------------


def test_arguments_that_do_not_fit_are_refused():
    model = make_model(SMALL)
    add = lambda rank=2, **options: add_lora(model, rank, **{"alpha": 4, **options}, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"no projection is called \['c_attn'\]. The model has \['down_proj', 'embed"):
        add(targets=("q_proj", "c_attn"))
    with pytest.raises(ValueError, match=r"targets=\[\] must name at least one projection"):
        add(targets=())
    with pytest.raises(ValueError, match="rank=0 must be at least 1"):
        add(0)
    for alpha in (0, float("nan"), float("inf"), 1e39):
        with pytest.raises(ValueError, match=f"alpha={re.escape(str(alpha))} must be more than 0, and finite"):
            add(alpha=alpha)
    with pytest.raises(ValueError, match=r"dropout=1.0 must be in \[0, 1\)"):
        add(dropout=1.0)
    with pytest.raises(ValueError, match="trainable: the model has no adapters, or they are off"):
        trainable(model)
    with pytest.raises(ValueError, match="with_adapters: the model has no adapters"):
        with_adapters(model, False)
    add()
    with pytest.raises(ValueError, match=r"the model has adapters already. Merge them first: merge_lora\(model\)"):
        add()


# --- PEFT -------------------------------------------------------------------------------------------------------------


def live(test):
    """Marks a test that runs PEFT: `make parity` installs it."""
    return pytest.mark.parity(pytest.mark.skipif(not HAS_PEFT, reason="torch, transformers or peft is absent")(test))


@live
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize(
    "case, options",
    [
        ("llama", {}),
        ("qwen2", dict(use_dora=True)),
        ("gemma2", dict(use_rslora=True)),
        ("phi3", {}),
        ("olmo2", {}),
        ("olmo3", {}),
        ("exaone4", {}),
        ("gemma4", {}),
        ("glm4", {}),
        ("granite", {}),
        ("ministral3", {}),
        ("hunyuan", {}),
        ("qwen3_5", dict(use_dora=True)),
    ],
)
def test_peft_s_adapters_are_ours_both_ways(case, options, rng, tmp_path):
    torch, transformers, peft = map(importlib.import_module, ("torch", "transformers", "peft"))
    folder, expected = hugging_face.committed(case)
    load = lambda: transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float()
    logits = lambda model: model(input_ids=torch.from_numpy(np.asarray(expected.tokens))).logits.detach().numpy()
    tokens = jnp.asarray(expected.tokens, jnp.int32)

    torch.manual_seed(0)
    config = peft.LoraConfig(r=RANK, lora_alpha=7, target_modules="all-linear", task_type="CAUSAL_LM", **options)
    theirs = peft.get_peft_model(load(), config)
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            parameter.data += 0.2 * torch.randn_like(parameter)
    theirs.eval().save_pretrained(tmp_path / "theirs")
    truth = logits(theirs)
    assert np.abs(truth - expected.logits).max() > 0.1 * np.abs(truth).max()  # the adapters count
    ours = load_adapters(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "theirs")
    close(ours(tokens).logits, truth, 1e-4)

    save_adapters(ours, tmp_path / "ours")
    back = peft.PeftModel.from_pretrained(load(), tmp_path / "ours").eval()
    close(logits(back), truth, 1e-6)


@live
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "options",
    [
        dict(target_modules=["q_proj", "up_proj"], layers_to_transform=[1]),
        dict(target_modules=r"model\.layers\.0\.(self_attn\.[kv]|mlp\.down)_proj"),
        dict(target_modules=["model.layers.1.mlp.up_proj", "0.self_attn.o_proj"]),
        dict(target_modules=["q_proj", "down_proj"], exclude_modules=["layers.1.mlp.down_proj"]),
    ],
    ids=lambda options: next(iter(options.keys() - {"target_modules"}), str(type(options["target_modules"]).__name__)),
)
def test_peft_adapts_the_same_layers(options, tmp_path):
    """Whatever says which layers they are, into a stack of layers and back."""
    torch, transformers, peft = map(importlib.import_module, ("torch", "transformers", "peft"))
    folder, expected = hugging_face.committed("llama")
    load = lambda: transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float()
    logits = lambda model: model(input_ids=torch.from_numpy(np.asarray(expected.tokens))).logits.detach().numpy()
    adapted = lambda model: {name for name, module in model.named_modules() if hasattr(module, "lora_A")}
    torch.manual_seed(0)
    config = peft.LoraConfig(r=RANK, lora_alpha=7, task_type="CAUSAL_LM", init_lora_weights=False, **options)
    theirs = peft.get_peft_model(load(), config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    for scan_layers in (True, False):
        ours = load_adapters(AutoModelForCausalLM.from_pretrained(folder, scan_layers=scan_layers), tmp_path / "theirs")
        close(ours(jnp.asarray(expected.tokens, jnp.int32)).logits, logits(theirs), 1e-4)
        save_adapters(ours, tmp_path / "ours")
        back = peft.PeftModel.from_pretrained(load(), tmp_path / "ours").eval()
        assert adapted(back) == adapted(theirs)
        close(logits(back), logits(theirs), 1e-6)
