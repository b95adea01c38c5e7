"""Quantised weights: their error, and models that hold them beside adapters."""

import dataclasses
import importlib
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.scipy.special import ndtri
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from liger_jax import fused_linear_log_probs
from liger_jax.models import AutoModelForCausalLM, KernelOptions, Layout
from liger_jax.models.lora import add_lora, merge_lora, trainable
from liger_jax.models.quantized import QuantizedParam, dequantize, quantize
from liger_jax.ops.block_quantized import KINDS, NF4, block_quantized
from liger_jax.ops.linear import quantized_head
from liger_jax.planner import planning
from tests.models._llama import CONFIG, make_model, random_tokens

WIDE = dataclasses.replace(CONFIG, hidden_size=64, intermediate_size=128, head_dim=16)
GAPS = {"nf4": 1 - 0.6961928, "int8": 1 / 127}


def test_nf4_is_the_normal_distribution_s_quantiles():
    """bitsandbytes' construction: 8 quantiles above zero, 7 below, and zero, over the largest."""
    outermost = 0.9677083
    above = ndtri(jnp.linspace(outermost, 0.5, 9)[:-1])
    below = -ndtri(jnp.linspace(outermost, 0.5, 8)[:-1])
    values = np.sort(np.concatenate([above, below, [0.0]]))
    np.testing.assert_allclose(np.array(NF4), values / values.max(), atol=2e-6)


def test_nf4_is_the_code_book_that_bitsandbytes_publishes():
    """`get_4bit_type("nf4")` in bitsandbytes' functional.py, and appendix E of QLoRA's paper."""
    published = """
        -1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 -0.18477343022823334
        -0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224
        0.44070982933044434 0.5626170039176941 0.7229568362236023 1.0
    """
    assert NF4 == tuple(map(float, published.split()))
    every_code = jnp.asarray(NF4, jnp.float32)[:, None]
    np.testing.assert_array_equal(block_quantized(every_code, "nf4", block_size=16).astype(jnp.float32), every_code)


@pytest.mark.parity
@pytest.mark.skipif(importlib.util.find_spec("qwix") is None, reason="qwix is absent")
@pytest.mark.parametrize("axis", [-1, -2])
def test_nf4_is_qwix_s_and_int8_is_as_exact(axis):
    """In nf4 values are the same to the bit. In int8 qwix divides blocks by 127.5, and clips their largest value."""
    qarray = importlib.import_module("qwix._src.core.qarray")
    weight = jax.random.normal(jax.random.key(0), (256, 192), jnp.bfloat16).astype(jnp.float32)

    def errors(kind):
        how = qarray.HowToQuantize(qtype=kind, tiled_axes={axis % 2: 64}, channelwise_axes=[1 - axis % 2])
        theirs = qarray.dequantize(qarray.quantize(weight, how))
        return block_quantized(weight, kind, axis=axis).astype(jnp.float32) - weight, theirs - weight

    ours, theirs = errors("nf4")
    np.testing.assert_array_equal(ours, theirs)
    ours, theirs = (float(jnp.sqrt(jnp.mean(error**2))) for error in errors("int8"))
    assert 0.98 < ours / theirs < 1.02


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axis", [-1, -2])
def test_a_value_is_within_half_the_widest_gap_of_its_weight(kind, axis):
    weight = jax.random.normal(jax.random.key(0), (192, 128), jnp.bfloat16).at[0].set(0)
    found = block_quantized(weight, kind, axis=axis)
    exact = np.asarray(weight, np.float64)
    largest = np.abs(exact.reshape(3, 64, 128) if axis == -2 else exact.reshape(192, 2, 64)).max(axis, keepdims=True)
    bound = np.broadcast_to(largest, (3, 64, 128) if axis == -2 else (192, 2, 64)).reshape(exact.shape) * GAPS[kind] / 2
    assert (np.abs(np.asarray(found.astype(jnp.float32), np.float64) - exact) <= bound * (1 + 1e-5)).all()
    assert found.shape == weight.shape and found.dtype == weight.dtype
    assert (
        sum(x.nbytes for x in jax.tree.leaves(found))
        == weight.size * (4 if kind == "nf4" else 8) // 8 + weight.size // 32
    )


@pytest.mark.parametrize(
    "options, entries",
    [(dict(remat="full"), 20), (dict(scan_layers=False), CONFIG.vocab_size)],
    ids=["scanned, four slices", "unrolled, one slice"],
)
def test_loss_and_gradients_are_those_of_the_dense_weights_that_the_codes_say(options, entries, rng, monkeypatch):
    monkeypatch.setattr(quantized_head, "MOST_IN_A_SLICE", entries)
    tokens = random_tokens(rng)
    model = add_lora(quantize(make_model(WIDE, **options), "nf4", head=True), 3, alpha=6, rngs=nnx.Rngs(1))

    def value_and_gradients(model):
        graph, adapters, base = trainable(model)
        call = dict(labels=tokens, token_scaling="remat" in options)
        loss = lambda adapters, base: nnx.merge(graph, adapters, base)(tokens, **call).loss
        return jax.jit(jax.value_and_grad(loss))(adapters, base)

    found = value_and_gradients(model)
    logits_of = nnx.jit(lambda model, tokens: model(tokens).logits)
    logits = logits_of(model, tokens)
    dequantize(model)
    assert not nnx.to_flat_state(nnx.state(model, QuantizedParam))
    expected = value_and_gradients(model)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.abs(x - y).max() <= 2e-5 * jnp.abs(y).max()
    np.testing.assert_allclose(logits, logits_of(model, tokens), atol=1e-4)


def test_a_token_that_does_not_count_may_hold_nan_before_a_quantised_head(rng, monkeypatch):
    monkeypatch.setattr(quantized_head, "MOST_IN_A_SLICE", 3)  # two slices
    head = block_quantized(jnp.asarray(rng.standard_normal((5, 14)), jnp.float32), "int8", block_size=14, axis=-1)
    hidden = jnp.asarray(rng.standard_normal((2, 14)), jnp.float32).at[1].set(jnp.nan)
    options = dict(ignore_index=-100, logit_softcap=2.0, entropy=True)
    labels = jnp.array([1, -100])
    total = lambda hidden: jnp.sum(quantized_head.quantized_log_probs(hidden, head, labels, **options).log_probs)
    gradient = jax.jit(jax.grad(total))(hidden)
    assert jnp.all(jnp.isfinite(gradient)) and jnp.any(gradient[0]) and not jnp.any(gradient[1])


def test_selected_tokens_of_a_quantised_head_are_those_of_the_dense_one(rng, monkeypatch):
    monkeypatch.setattr(quantized_head, "MOST_IN_A_SLICE", 3)  # two slices
    head = block_quantized(jnp.asarray(rng.standard_normal((5, 14)), jnp.float32), "int8", block_size=14, axis=-1)
    hidden, labels = jnp.asarray(rng.standard_normal((3, 14)), jnp.float32), jnp.array([1, -100, 4])
    options = dict(ignore_index=-100, logit_softcap=2.0, selected_token_ids=jnp.array([4, 0, 4]))

    def total(op, head):
        value = lambda hidden: jnp.sum(jnp.sin(op(hidden, head, labels, **options).selected_log_probs))
        return jax.jit(jax.value_and_grad(value))(hidden)

    found = total(quantized_head.quantized_log_probs, head)
    expected = total(fused_linear_log_probs, head.astype(jnp.float32))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), found, expected)


def test_a_step_s_program_makes_no_gradient_of_a_quantised_weight():
    model = nnx.eval_shape(lambda: add_lora(quantize(make_model(WIDE), "nf4"), 3, alpha=6, rngs=nnx.Rngs(1)))
    graph, adapters, base = trainable(model)
    tokens = jax.ShapeDtypeStruct((2, 7), jnp.int32)
    loss = lambda adapters, base, tokens: nnx.merge(graph, adapters, base)(tokens, labels=tokens).loss
    text = jax.jit(jax.grad(loss)).lower(adapters, base, tokens).as_text()
    products = re.findall(r"stablehlo\.dot_general.*-> tensor<(\d+)x(\d+)xf32>", text)
    assert not [shape for shape in products if {int(n) for n in shape} <= {64, 128, 32, 61}]


@pytest.mark.parametrize("remat", ["none", pytest.param("full", marks=pytest.mark.full)])
def test_a_step_never_holds_the_dense_weights_of_all_layers(remat):
    """The largest float array of the compiled program is less than the smallest projection's weights of all layers."""
    config = dataclasses.replace(WIDE, num_hidden_layers=16)
    make = lambda: add_lora(quantize(make_model(config, remat=remat), "nf4"), 3, alpha=6, rngs=nnx.Rngs(1))
    graph, adapters, base = trainable(nnx.eval_shape(make))
    tokens = jax.ShapeDtypeStruct((1, 7), jnp.int32)

    def largest_float_array(prepared):
        loss = lambda adapters, base, tokens: prepared(nnx.merge(graph, adapters, base))(tokens, labels=tokens).loss
        text = str(jax.jit(jax.grad(loss)).lower(adapters, base, tokens).compile().as_text())
        shapes = re.findall(r"\b(?:f64|f32|f16|bf16)\[([\d,]+)\]", text)
        return max(np.prod([int(n) for n in shape.split(",")]) for shape in shapes)

    smallest = 16 * 64 * 32  # keys or values
    assert largest_float_array(lambda model: model) < smallest
    assert largest_float_array(dequantize) >= smallest  # so it would be seen


def test_quantised_models_load_merge_and_save_dense(rng, tmp_path):
    tokens, dense_model = random_tokens(rng), make_model(WIDE)
    dense_model.save_pretrained(tmp_path / "dense")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantize="int8")
    expected = quantize(dense_model, "int8")
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(expected))
    assert isinstance(model.model.layers.mlp.up_proj.kernel, QuantizedParam)
    loss_of = nnx.jit(lambda model: model(tokens, labels=tokens).loss)
    loss = loss_of(model)
    merged = merge_lora(add_lora(model, 2, alpha=4, rngs=nnx.Rngs(1)))
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    np.testing.assert_allclose(loss_of(again), loss, rtol=1e-5)


def test_the_plan_counts_adapters_and_quantised_weights():
    totals = [
        planning.plan(
            "llama-3-8b", batch=4, device="h100", param_dtype="bfloat16", remat="full", lora=lora, quantize=quantize
        ).estimates["fused"]
        for lora, quantize in ((None, None), (16, None), (16, "nf4"))
    ]
    full, lora, qlora = (x.total / 2**30 for x in totals)
    assert full > 80 and abs(lora / 19.44 - 1) < 0.03 and abs(qlora / 9.90 - 1) < 0.03  # compiled for an H100


def test_what_cannot_be_quantised_is_refused():
    with pytest.raises(ValueError, match=r"quantize='fp4' must be one of \('nf4', 'int8'\)"):
        quantize(make_model(WIDE), "fp4")
    with pytest.raises(ValueError, match="block_size=64 must be even and divide the 48 values.*Pass block_size=16"):
        quantize(make_model(), "nf4")
    with pytest.raises(ValueError, match="the head is the embedding"):
        quantize(make_model(dataclasses.replace(WIDE, tie_word_embeddings=True)), "nf4", head=True)
    with pytest.raises(ValueError, match="quantised weights cannot be trained"):
        planning.make_run("llama-3-8b", batch=1, seq=128, device="h100", quantize="nf4")


# --- several devices --------------------------------------------------------------------------------------------------

SHARDED = dataclasses.replace(WIDE, vocab_size=64)
AXES = ("data", "fsdp")


def sharded(mesh):
    """A dense model whose parameters are sharded over a mesh as FSDP splits them."""
    graph, params = nnx.split(make_model(SHARDED, kernels=KernelOptions(batch_axes=AXES)))
    return nnx.merge(graph, jax.device_put(params, Layout().shardings(params, mesh)))


def value_and_adapters_gradients(model, tokens):
    graph, adapters, base = trainable(model)
    # B is zero at first, and A's gradient with it.
    adapters = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), adapters)

    def loss(adapters, base, tokens):
        return nnx.merge(graph, adapters, base)(tokens, labels=tokens).loss

    return jax.jit(jax.value_and_grad(loss))(adapters, base, tokens)


@pytest.mark.parametrize("axis_type", [pytest.param(AxisType.Auto, marks=pytest.mark.full), AxisType.Explicit], ids=str)
@pytest.mark.parametrize(
    "kind, entries",
    [("nf4", 20), pytest.param("int8", quantized_head.MOST_IN_A_SLICE, marks=pytest.mark.full)],
    ids=["nf4, several slices", "int8, one slice"],
)
def test_quantised_weights_on_a_mesh_give_one_device_s_loss_and_gradients(
    kind, entries, axis_type, devices, rng, monkeypatch
):
    """Layers and head alike; each device holds its part of the codes, and whole blocks."""
    monkeypatch.setattr(quantized_head, "MOST_IN_A_SLICE", entries)
    tokens = random_tokens(rng, batch=8)
    one = add_lora(quantize(make_model(SHARDED), kind, head=True), 3, alpha=6, rngs=nnx.Rngs(1))
    truth, expected = value_and_adapters_gradients(one, tokens)
    mesh = jax.make_mesh((len(devices) // 2, 2), AXES, axis_types=(axis_type,) * 2, devices=devices)
    with jax.set_mesh(mesh):
        model = add_lora(quantize(sharded(mesh), kind, head=True), 3, alpha=6, rngs=nnx.Rngs(1))
        for x, y in zip(*(jax.tree.leaves(nnx.state(m, QuantizedParam)) for m in (model, one)), strict=True):
            np.testing.assert_array_equal(x, y)
            assert x.addressable_shards[0].data.size == x.size // 2
        tokens = jax.device_put(tokens, NamedSharding(mesh, P(AXES)))
        value, found = value_and_adapters_gradients(model, tokens)
    np.testing.assert_allclose(value, truth, rtol=1e-5)
    for (path, x), y in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        # Both sides are float32, and each may round by 2e-5.
        assert np.abs(np.asarray(x) - np.asarray(y)).max() < 4e-5 * np.abs(np.asarray(y)).max(), path


def test_a_layout_splits_quantised_weights_as_quantize_does(devices):
    mesh = jax.make_mesh((1, len(devices)), AXES, axis_types=(AxisType.Auto,) * 2, devices=devices)
    state = nnx.state(quantize(sharded(mesh), "nf4", head=True), QuantizedParam)
    planned = Layout().shardings(state, mesh)
    found = jax.tree.map(lambda x, planned: x.sharding.is_equivalent_to(planned, x.ndim), state, planned)
    assert all(jax.tree.leaves(found))
