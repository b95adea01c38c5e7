"""Layers of linear attention, in Qwen3-Next's form: their formula, packed and padded rows, caches, and what is kept."""

import dataclasses
import functools
import json
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from safetensors.numpy import load_file, save_file

from liger_jax.models import (
    AutoModelForCausalLM,
    KernelOptions,
    Layout,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    lora,
)
from liger_jax.models.core.memory import LayerMemory
from liger_jax.models.core.parameters import describe
from liger_jax.models.core.remat import POLICIES
from liger_jax.models.quantized import quantize
from liger_jax.planner.devices import target
from tests.models import _hugging_face as hugging_face
from tests.ops._oracle import first

CONFIG = Qwen3NextConfig(
    vocab_size=24,
    hidden_size=12,
    intermediate_size=16,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    partial_rotary_factor=0.5,
    full_attention_interval=2,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=5,
    linear_value_head_dim=3,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    shared_expert_intermediate_size=8,
    initializer_range=0.4,
)
SHARED = {field.name: getattr(CONFIG, field.name) for field in dataclasses.fields(Qwen3_5TextConfig)}
DENSE = dataclasses.replace(Qwen3_5TextConfig(**SHARED), num_hidden_layers=2)  # the same layers without experts
TOLERANCE = 1e-4  # of logits about 2 in float32: sums in another order differed by up to 3e-5 in 1 of 100 runs


@pytest.fixture(scope="module")
def model():
    return Qwen3NextForCausalLM(CONFIG, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def dense():
    return Qwen3_5ForCausalLM(DENSE, rngs=nnx.Rngs(0))


@nnx.jit
def logits_of(model, tokens, **rows):
    return model(tokens, **rows).logits


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def truth(layer, x):
    """A layer of linear attention on one row (T, D), token by token, in float64."""
    of = lambda parameter: np.asarray(parameter[...], np.float64)
    key_heads, heads, d, e = 2, 4, 5, 3
    qkvz = (x @ of(layer.in_proj_qkvz.kernel)).reshape(len(x), key_heads, -1)
    q, k, v, z = np.split(qkvz, np.cumsum([d, d, heads // key_heads * e]), axis=-1)
    b, a = np.split((x @ of(layer.in_proj_ba.kernel)).reshape(len(x), key_heads, -1), 2, axis=-1)
    b, a = b.reshape(len(x), heads), a.reshape(len(x), heads)
    flat = np.concatenate([y.reshape(len(x), -1) for y in (q, k, v)], axis=-1)
    taps = of(layer.conv1d.taps)[:, 0]
    before = np.pad(flat, ((taps.shape[1] - 1, 0), (0, 0)))
    mixed = silu(sum(before[j : j + len(x)] * taps[:, j] for j in range(taps.shape[1])))
    q, k, v = np.split(mixed, [key_heads * d, 2 * key_heads * d], axis=-1)
    q, k = (np.repeat(y.reshape(len(x), key_heads, d), heads // key_heads, axis=1) for y in (q, k))
    q, k = (y / np.sqrt(np.sum(y * y, -1, keepdims=True) + 1e-6) for y in (q, k))
    v, z = v.reshape(len(x), heads, e), z.reshape(len(x), heads, e)
    decay = np.exp(-np.exp(of(layer.A_log)) * np.log1p(np.exp(a + of(layer.dt_bias))))
    state, outs = np.zeros((heads, d, e)), []
    for t in range(len(x)):
        state = decay[t][:, None, None] * state
        wrong = v[t] - np.einsum("hde,hd->he", state, k[t])
        state = state + np.einsum("hd,he->hde", k[t], sigmoid(b[t])[:, None] * wrong)
        outs.append(np.einsum("hde,hd->he", state, q[t]) / np.sqrt(d))
    out = np.stack(outs)
    out = out / np.sqrt(np.mean(out * out, -1, keepdims=True) + 1e-6) * of(layer.norm.scale) * silu(z)
    return out.reshape(len(x), -1) @ of(layer.out_proj.kernel)


def test_a_layer_is_its_formula(rng):
    model = Qwen3NextForCausalLM(dataclasses.replace(CONFIG, num_hidden_layers=1), scan_layers=False, rngs=nnx.Rngs(1))
    layer, x = model.model.layers[0].linear_attn, rng.normal(size=(2, 70, 12))
    y = nnx.jit(lambda layer, x: layer(x, None))(layer, jnp.asarray(x, jnp.float32))
    for found, row in zip(y, x, strict=True):
        expected = truth(layer, row)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_packed_documents_have_the_logits_that_they_have_alone(dense, rng):
    tokens = jnp.asarray(rng.integers(0, 24, (1, 12)), jnp.int32)
    ids = jnp.array([[1] * 7 + [2] * 4 + [0]])
    packed = logits_of(dense, tokens, segment_ids=ids)[0]
    for begin, end in ((0, 7), (7, 11)):
        row = jnp.pad(tokens[:, begin:end], ((0, 0), (0, 12 - end + begin)))
        alone = logits_of(dense, row, segment_ids=jnp.asarray(np.arange(12) < end - begin, jnp.int32)[None])[0]
        np.testing.assert_allclose(packed[begin:end], alone[: end - begin], atol=TOLERANCE)


def test_padding_anywhere_changes_nothing(dense, rng):
    tokens = jnp.asarray(rng.integers(0, 24, (1, 12)), jnp.int32)
    mask = jnp.array([[0, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1, 0]])
    at = np.flatnonzero(mask[0])
    positions = jnp.cumsum(mask, axis=1) - 1
    padded = logits_of(dense, tokens.at[0, 3].set(-5), attention_mask=mask, positions=positions)[0]
    row = jnp.pad(tokens[:, at], ((0, 0), (0, 12 - len(at))))
    alone = logits_of(dense, row)[0]
    np.testing.assert_allclose(padded[at], alone[: len(at)], atol=TOLERANCE)


@nnx.jit
def step(model, tokens, mask, cache):
    out = model(tokens, attention_mask=mask, cache=cache)
    return out.logits, out.cache


@pytest.mark.parametrize("scan", first(1, [None, True, False]), ids=["dense", "scan", "unrolled"])
def test_a_cache_gives_the_logits_of_whole_rows(scan, dense, rng):
    """Prompts of 5 and of 3 tokens, padded on the left and in between; then 4 tokens at once, then one by one."""
    model = dense if scan is None else Qwen3NextForCausalLM(CONFIG, scan_layers=scan, rngs=nnx.Rngs(0))
    rows = jnp.asarray(rng.integers(0, 24, (2, 11)), jnp.int32)
    whole = logits_of(model, rows)
    cache = model.init_cache(2, 14)
    prompts = jnp.stack([rows[0, :5], jnp.array([7, rows[1, 0], 7, rows[1, 1], rows[1, 2]])])
    masks = jnp.array([[1] * 5, [0, 1, 0, 1, 1]])
    out, cache = step(model, prompts, masks, cache)
    np.testing.assert_allclose(out[0], whole[0, :5], atol=TOLERANCE)
    np.testing.assert_allclose(out[1, np.array([1, 3, 4])], whole[1, :3], atol=TOLERANCE)
    more = jnp.stack([jnp.append(rows[0, 5:8], 7), rows[1, 3:7]])
    out, cache = step(model, more, jnp.array([[1, 1, 1, 0], [1] * 4]), cache)
    np.testing.assert_allclose(out[0, :3], whole[0, 5:8], atol=TOLERANCE)
    np.testing.assert_allclose(out[1], whole[1, 3:7], atol=TOLERANCE)
    for i in range(3):
        out, cache = step(model, jnp.stack([rows[:1, 8 + i], rows[1:, 7 + i]]), None, cache)
        np.testing.assert_allclose(out[:, 0], jnp.stack([whole[0, 8 + i], whole[1, 7 + i]]), atol=TOLERANCE)


def test_generated_tokens_are_the_likeliest_of_whole_rows(dense, rng):
    prompts = jnp.asarray(rng.integers(0, 24, (2, 5)), jnp.int32)
    mask = jnp.array([[1] * 5, [0, 0, 1, 1, 1]])
    found = np.asarray(dense.generate(prompts, attention_mask=mask, max_new_tokens=4, num_return_sequences=2))
    for row, begin in ((found[0], 0), (found[2], 2)):
        likeliest = np.asarray(logits_of(dense, jnp.asarray(row[None, begin:]))[0]).argmax(-1)
        assert likeliest[4 - begin : -1].tolist() == row[5:].tolist()
    assert (found[0] == found[1]).all() and (found[2] == found[3]).all()


@functools.cache
def gradients(family, config, scan, remat):
    """By the names of a checkpoint's tensors."""
    tokens = jnp.asarray(np.random.default_rng(int(os.environ["TEST_SEED"])).integers(0, 24, (2, 9)), jnp.int32)
    model = family(config, scan_layers=scan, remat=remat, rngs=nnx.Rngs(0))
    found = nnx.jit(nnx.grad(lambda model: model(tokens, labels=tokens).loss))(model)
    by_name, infos = {}, describe(found)
    for path, gradient in nnx.to_flat_state(found):
        info, gradient = infos[path], np.asarray(gradient[...])
        by_name |= {piece.name: gradient[piece.index] for piece in info.pieces(gradient.shape)}
    return by_name


@pytest.mark.parametrize("remat", first(1, ["full, dense", "full", "none", "dots"]))
def test_stacks_are_the_unrolled_layers_under_every_remat(remat):
    """Three layers of a pattern of two: one group, and one layer left over."""
    near = lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * max(1.0, np.abs(y).max()))
    dense = Qwen3_5ForCausalLM, dataclasses.replace(DENSE, num_hidden_layers=3)
    model = dense if remat.endswith("dense") else (Qwen3NextForCausalLM, CONFIG)
    jax.tree.map(near, gradients(*model, True, remat.partition(",")[0]), gradients(*model, False, "full"))


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_a_layer_keeps_what_the_planner_counts(remat):
    """Of 2,100 tokens a row, and so of three states."""
    config = dataclasses.replace(DENSE, num_hidden_layers=1)
    assert config.layer_types == ("linear_attention",)
    model = nnx.eval_shape(lambda: Qwen3_5ForCausalLM(config, remat=remat, scan_layers=False, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model.model.layers[0])
    layer = jax.checkpoint(lambda state, x: nnx.merge(graph, state)(x, None, None, None, None), policy=POLICIES[remat])
    x = jax.ShapeDtypeStruct((2, 2100, config.hidden_size), jnp.float32)
    _, pull = jax.eval_shape(lambda state, x: jax.vjp(lambda *args: layer(*args)[0], state, x), state, x)
    weights = [leaf.shape for leaf in jax.tree.leaves(state)]
    kept = sum(4 * math.prod(leaf.shape) for leaf in jax.tree.leaves(pull) if leaf.shape not in weights)
    device = target("h200").description
    counted = LayerMemory(config, KernelOptions(), remat, jnp.float32, rows=2, seq=2100, device=device).each
    assert len(counted) == 1 and sum(counted[0][0].kept.values()) == pytest.approx(kept, rel=1e-3)


LAYOUT = Layout(expert="expert")


FEWER_LAYERS = [("dense", 1), *(pytest.param(kind, 2, marks=pytest.mark.full) for kind in ("dense", "nf4"))]


@pytest.mark.parametrize("kind, layers", FEWER_LAYERS)
def test_several_devices_have_the_loss_and_gradients_of_one(kind, layers, devices, rng):
    """Packed rows; in nf4 with adapters of all projections. One layer has linear attention."""
    tokens = jnp.asarray(rng.integers(0, 24, (8, 9)), jnp.int32)
    ids = jnp.asarray(1 + np.cumsum(rng.random((8, 9)) < 0.2, 1), jnp.int32)
    batch = dict(input_ids=tokens, labels=tokens, segment_ids=ids)

    def value_and_gradients(**options):
        model = Qwen3NextForCausalLM(dataclasses.replace(CONFIG, num_hidden_layers=layers), rngs=nnx.Rngs(0), **options)
        if kind == "nf4":
            model = lora.add_lora(quantize(model, kind, block_size=4), 2, alpha=3, rngs=nnx.Rngs(1))
            graph, trained, base = lora.trainable(model)
            trained = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), trained)
        else:
            graph, trained, base = nnx.split(model, nnx.Param, ...)
        loss = lambda trained, base, batch: nnx.merge(graph, trained, base)(**batch).loss
        return jax.jit(jax.value_and_grad(loss)), trained, base

    single, *state = value_and_gradients()
    expected, of_one = single(*state, batch)
    sizes = (1, 2, len(devices) // 2)
    mesh = jax.make_mesh(sizes, ("data", "fsdp", "expert"), devices=devices, axis_types=(AxisType.Auto,) * 3)
    shared, *_ = value_and_gradients(kernels=KernelOptions(layout=LAYOUT))
    with jax.set_mesh(mesh):
        placed = [jax.device_put(part, LAYOUT.shardings(part, mesh)) for part in state]
        found, of_many = shared(*placed, LAYOUT.place(batch, mesh))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for (path, x), y in zip(jax.tree.leaves_with_path(of_many), jax.tree.leaves(of_one), strict=True):
        assert np.abs(np.asarray(x) - y).max() <= 1e-4 * max(np.abs(y).max(), 1e-3), jax.tree_util.keystr(path)


@pytest.mark.parametrize("axis", ["tensor", "sequence"])
def test_axes_that_would_split_heads_or_rows_are_refused(axis, devices, model):
    layout = Layout(batch=("fsdp",), **{axis: axis})
    mesh = jax.make_mesh((1, 2), ("fsdp", axis), devices=devices[:2], axis_types=(AxisType.Auto,) * 2)
    message = f"{axis}='{axis}' has 2 devices, and Qwen3NextConfig has layers of linear attention .*, wh.* to fsdp"
    with pytest.raises(ValueError, match=message):
        layout.shardings(model, mesh)
    split = Qwen3NextForCausalLM(CONFIG, kernels=KernelOptions(layout=layout), rngs=nnx.Rngs(0))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=message):
        batch = layout.place(dict(input_ids=jnp.ones((2, 8), jnp.int32)))
        jax.eval_shape(lambda batch: split(**batch).logits, batch)
    folder, _ = hugging_face.committed("qwen3_5")
    with pytest.raises(ValueError, match=message.replace("Qwen3Next", "Qwen3_5Text")):
        AutoModelForCausalLM.from_pretrained(folder, mesh=mesh, kernels=KernelOptions(layout=layout))


def test_adapters_of_all_projections_are_saved_and_read(model, tmp_path):
    """By their names in a checkpoint, in a stack of every second layer and in the layer that is left over."""
    adapted = lora.add_lora(nnx.clone(model), 2, alpha=3, rngs=nnx.Rngs(1))
    expected = nnx.state(adapted, nnx.LoRAParam)
    with pytest.warns(UserWarning, match=r"'model.layers.0.mlp.shared_expert.down_proj'.*, PEFT does not"):
        lora.save_adapters(adapted, tmp_path)
    found = nnx.state(lora.load_adapters(nnx.clone(model), tmp_path), nnx.LoRAParam)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    names = {name for path, _ in nnx.to_flat_state(expected) for name in path}
    assert {"in_proj_qkvz", "in_proj_ba", "out_proj", "shared_expert_gate", "q_proj", "0_of_2", "1_of_2"} <= names
    some = lora.add_lora(nnx.clone(model), 2, alpha=3, targets=["2.linear_attn.out_proj", "q_proj"], rngs=nnx.Rngs(1))
    paths = {path[1:3] for path, _ in nnx.to_flat_state(nnx.state(some, nnx.LoRAParam))}
    assert paths == {("layers", "1_of_2"), ("last_layers", "2")}


@pytest.mark.parametrize("case, form", [("qwen3_5_moe", "fused"), ("olmo_hybrid", "pieces")])
def test_weights_in_the_form_of_public_files_are_read(case, form, tmp_path):
    """Qwen3.5's experts in one tensor, in a multimodal checkpoint; OLMo Hybrid's convolution in three tensors."""
    folder, _ = hugging_face.committed(case)
    expected = AutoModelForCausalLM.from_pretrained(folder)
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    if form == "fused":
        experts = {name: x for name, x in tensors.items() if ".mlp.experts." in name}
        tensors = {name: x for name, x in tensors.items() if name not in experts}
        for stem in {name.partition(".experts.")[0] + ".experts." for name in experts}:
            each = lambda own, stem=stem: np.stack([experts[f"{stem}{e}.{own}_proj.weight"] for e in range(4)])
            tensors[f"{stem}gate_up_proj"] = np.concatenate([each("gate"), each("up")], axis=1)
            tensors[f"{stem}down_proj"] = each("down")
        tensors = {name.replace("model.", "model.language_model.", 1): x for name, x in tensors.items()}
        tensors |= {
            "mtp.fc.weight": np.ones((2, 2), np.float32),
            "model.visual.pos_embed.weight": np.ones(3, np.float32),
        }
        config = {"model_type": "qwen3_5_moe", "text_config": config, "vision_config": {}}
    else:
        widths, pieces = [12, 24], {}  # of queries and keys; transformers cuts it into equal pieces
        for name in [name for name in tensors if "_conv1d" in name]:
            stem, own = name.split(".linear_attn.")
            pieces.setdefault(stem, {})[own[0]] = tensors.pop(name)
        for stem, of_layer in pieces.items():
            whole = np.concatenate([of_layer[x] for x in "qkv"])
            for x, part in zip("qkv", np.split(whole, widths), strict=True):
                tensors[f"{stem}.linear_attn.{x}_conv1d.weight"] = np.ascontiguousarray(part)
        assert pieces
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = AutoModelForCausalLM.from_pretrained(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(found), nnx.state(expected))
