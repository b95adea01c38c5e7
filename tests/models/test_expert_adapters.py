"""Adapters of experts and quantised experts: what they mean, PEFT's files of both forms, and what is refused."""

import contextlib
import importlib
import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from liger_jax import models
from liger_jax.models.hugging_face import pretrained
from liger_jax.models.lora import add_lora, load_adapters, merge_lora, save_adapters, trainable, with_adapters
from liger_jax.models.quantized import QuantizedParam, dequantize, quantize
from tests.models.test_experts import CLASSES, CONFIGS, make, numbered

BOTH = ("gate_up_proj", "down_proj")
EXPERTS = {"mixtral": ("block_sparse_moe", "gate_up", "down"), "olmoe": ("mlp", "gate_up", "down")}
EXPERTS |= {"qwen3_moe": EXPERTS["olmoe"], "gpt_oss": ("mlp", "gate_up_proj", "down_proj")}
HAS_PEFT = all(importlib.util.find_spec(name) for name in ("torch", "transformers", "peft"))
families = lambda *default: [
    pytest.param(family, marks=() if family in default else pytest.mark.full) for family in CONFIGS
]


def weights(model, family, layer=1):
    """Gate and up, and down, of a layer, as arrays."""
    block, *names = EXPERTS[family]
    layers = model.model.layers
    one = getattr(layers[layer] if family == "qwen3_moe" else layers, block).experts
    return [np.asarray(jnp.asarray(getattr(one, name)[...]))[... if family == "qwen3_moe" else layer] for name in names]


def trained(model):
    """The model with adapters whose B is not zero."""
    graph, adapters, base = trainable(model)
    noise = lambda x: 0.1 * np.random.default_rng(x.size).standard_normal(x.shape)
    shifted = lambda x: x + noise(x).astype(x.dtype)
    return nnx.merge(graph, jax.tree.map(shifted, adapters), base)


def adapted(family, *, rank=2, parameters=BOTH, **options):
    options = dict(alpha=3, parameters=parameters, rngs=nnx.Rngs(1)) | options
    return trained(add_lora(numbered(make(family)), rank, **options))


# --- PEFT's files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", families("olmoe"))
def test_files_mean_what_peft_s_formula_says_and_are_read_again(family, tmp_path):
    model = adapted(family, rslora=family == "olmoe")
    beside_a_dense_layer = pytest.warns(match="these names are those of routed experts")
    with beside_a_dense_layer if family == "qwen3_moe" else contextlib.nullcontext():
        save_adapters(model, tmp_path)
    fields, tensors = (
        json.loads((tmp_path / "adapter_config.json").read_text()),
        load_file(tmp_path / "adapter_model.safetensors"),
    )
    assert fields["target_parameters"] == ["experts.down_proj", "experts.gate_up_proj"]
    scale = 3 / np.sqrt(2) if family == "olmoe" else 3 / 2
    base, merged = weights(numbered(make(family)), family), weights(merge_lora(with_adapters(model, True)), family)
    for module, before, after in zip(("experts.base_layer", "experts"), base, merged, strict=True):
        a, b = (tensors[f"base_model.model.model.layers.1.mlp.{module}.lora_{x}.weight"] for x in "AB")
        count, in_width, out_width = before.shape
        assert a.shape == (2 * count, in_width) and b.shape == (out_width, 2 * count)
        change = scale * np.einsum("ore,eri->eio", b.reshape(out_width, 2, count), a.reshape(count, 2, in_width))
        if family == "gpt_oss" and module.endswith("base_layer"):  # columns of gate and up take turns in the file
            change = np.concatenate([change[..., ::2], change[..., 1::2]], -1)
        np.testing.assert_allclose(after, before + change, rtol=1e-5)
    again = load_adapters(numbered(make(family)), tmp_path)
    for found, expected in zip(weights(merge_lora(again), family), merged, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("family", [*families("mixtral")[:3]])
@pytest.mark.parametrize("rslora", [True, pytest.param(False, marks=pytest.mark.full)])
def test_files_with_adapters_of_each_expert_are_read(family, rslora, tmp_path, rng):
    model = numbered(make(family))
    base = weights(model, family)
    block = EXPERTS[family][0]
    names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    (count, width, gates), scale = base[0].shape, 3 / (np.sqrt(2) if rslora else 2)
    ins, outs = (width, width, gates // 2), (gates // 2, gates // 2, width)
    tensors, changes = {}, {}
    layers = (1,) if family == "qwen3_moe" else (0, 1)
    for layer in layers:
        for e in range(count):
            for name, in_width, out_width in zip(names, ins, outs, strict=True):
                a, b = (rng.standard_normal(s).astype(np.float32) for s in ((2, in_width), (out_width, 2)))
                prefix = f"base_model.model.model.layers.{layer}.{block}.experts.{e}.{name}"
                tensors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
                changes[layer, e, name] = scale * (b @ a).T
    fields = dict(peft_type="LORA", r=2, lora_alpha=3, target_modules=list(names), use_rslora=rslora)
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    if family == "qwen3_moe":  # its names are those of the dense layer, too
        with pytest.raises(ValueError, match=r"Missing: .*layers\.0\.mlp\.down_proj"):
            load_adapters(model, tmp_path)
        fields["target_modules"] = r".*experts\..*"
        (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    found = weights(merge_lora(load_adapters(model, tmp_path)), family)
    own = [[changes[1, e, name] for e in range(count)] for name in names]
    expected = base[0] + np.concatenate([np.stack(own[0]), np.stack(own[1])], -1), base[1] + np.stack(own[2])
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    del tensors[next(name for name in tensors if ".1." in name)]
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"Missing: .*experts.*lora_A"):
        load_adapters(numbered(make(family)), tmp_path)


def test_adapters_that_experts_cannot_have_are_refused():
    model = nnx.eval_shape(lambda: make("mixtral"))
    add = lambda **options: add_lora(model, 2, alpha=4, rngs=nnx.Rngs(1), **options)
    with pytest.raises(
        ValueError, match=r"no weight of experts is called \['w1'\]. They are \['down_proj', 'gate_up_proj'\]"
    ):
        add(parameters=("w1",))
    with pytest.raises(ValueError, match="which adapters of experts do not support. Leave them out"):
        add(parameters=BOTH, dropout=0.1)
    with pytest.raises(ValueError, match="which adapters of experts do not support. Leave them out"):
        add(parameters=BOTH, dora=True)
    with pytest.raises(ValueError, match="must have adapters of the same rank and alpha in all layers, or in none"):
        add(parameters=["layers.0.mlp.experts.down_proj"])
    with pytest.raises(ValueError, match="must be a list of names"):
        add(parameters="down_proj")
    only = nnx.eval_shape(
        lambda: add_lora(make("mixtral"), 2, alpha=4, targets=(), parameters=BOTH[1:], rngs=nnx.Rngs(1))
    )
    assert [path[-1] for path, _ in nnx.to_flat_state(nnx.state(only, nnx.LoRAParam))] == ["down_lora_a", "down_lora_b"]


# --- the model --------------------------------------------------------------------------------------------------------


@jax.jit
def loss_of(model, tokens):
    return model(tokens, labels=tokens).loss


@pytest.mark.full
@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_with_adapters_is_the_merged_one_and_without_them_the_old_one(family, rng, tmp_path):
    tokens = jnp.asarray(rng.integers(0, 28, (2, 12)), jnp.int32)
    before = loss_of(make(family), tokens)
    model = add_lora(make(family), 2, alpha=3, parameters=BOTH, rngs=nnx.Rngs(1))
    np.testing.assert_allclose(loss_of(model, tokens), before, rtol=1e-6)
    model = trained(model)
    found = loss_of(model, tokens)
    assert abs(found - before) > 1e-4
    np.testing.assert_allclose(loss_of(with_adapters(model, False), tokens), before, rtol=1e-6)
    np.testing.assert_allclose(found, loss_of(merge_lora(with_adapters(model, True)), tokens), rtol=2e-5)
    if family != "qwen3_moe":
        save_adapters(model, tmp_path)
        unrolled = load_adapters(make(family, scan_layers=False), tmp_path)
        np.testing.assert_allclose(loss_of(unrolled, tokens), found, rtol=2e-5)


# --- quantised --------------------------------------------------------------------------------------------------------


def quantised(family, kind="nf4"):
    return quantize(make(family), kind, block_size=4)


@pytest.mark.parametrize("family", families("olmoe"))
def test_quantised_experts_become_the_numbers_of_their_codes(family, tmp_path):
    model = quantised(family)
    dense = weights(quantised(family), family)
    holders = [path[-1] for path, _ in nnx.to_flat_state(nnx.state(model, QuantizedParam)) if "experts" in path]
    assert set(holders) == set(EXPERTS[family][1:])
    for found, own in zip(dense, weights(make(family), family), strict=True):
        step = 0.152 * np.abs(own.reshape(*own.shape[:-2], -1, 4, own.shape[-1])).max(-2)
        assert (np.abs(found - own).reshape(*own.shape[:-2], -1, 4, own.shape[-1]).max(-2) <= 1.02 * step).all()
    model.save_pretrained(tmp_path)
    again = models.AutoModelForCausalLM.from_pretrained(tmp_path, scan_layers=family != "qwen3_moe")
    for found, expected in zip(weights(again, family), dense, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_checkpoint_of_dense_experts_is_quantised_layer_by_layer_as_it_is_read(tmp_path, monkeypatch):
    sizes = dict(vocab_size=8, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=1)
    config = models.OlmoeConfig(**sizes, num_experts=2, num_experts_per_tok=1)
    model = models.OlmoeForCausalLM(config, rngs=nnx.Rngs(0))
    model.save_pretrained(tmp_path)
    seen, quantized = [], pretrained.quantized.quantized
    monkeypatch.setattr(
        pretrained.quantized, "quantized", lambda x, *how, **own: seen.append(x.shape) or quantized(x, *how, **own)
    )
    read = models.OlmoeForCausalLM.from_pretrained(tmp_path, quantize="nf4")
    assert max(map(np.prod, seen)) == 2 * 64 * 128 and (1, 2, 64, 128) in seen
    jax.tree.map(np.testing.assert_array_equal, nnx.state(read), nnx.state(quantize(model, "nf4")))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("family", CONFIGS)
def test_adapters_beside_quantised_experts_have_the_loss_and_gradients_of_dense_ones(family, kind, rng):
    tokens = jnp.asarray(rng.integers(0, 28, (2, 12)), jnp.int32)
    results = []
    for prepare in (lambda model: model, dequantize):
        model = prepare(quantised(family, kind))
        model = trained(add_lora(model, 2, alpha=3, parameters=BOTH, rngs=nnx.Rngs(1)))
        graph, adapters, base = trainable(model)
        loss = lambda adapters, base, graph=graph: nnx.merge(graph, adapters, base)(tokens, labels=tokens).loss
        results.append(jax.jit(jax.value_and_grad(loss))(adapters, base))
    (value, gradients), (expected, of_dense) = results
    np.testing.assert_allclose(value, expected, rtol=2e-5)
    for (path, x), y in zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(of_dense), strict=True):
        assert np.abs(x - y).max() <= 1e-4 * max(np.abs(y).max(), 1e-3), jax.tree_util.keystr(path)


# --- PEFT itself ------------------------------------------------------------------------------------------------------


@pytest.mark.parity
@pytest.mark.skipif(not HAS_PEFT, reason="needs torch, transformers and peft")
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("family", CONFIGS)
def test_peft_reads_our_adapters_of_experts_and_we_read_its(family, tmp_path, rng):
    torch, transformers, peft = map(importlib.import_module, ("torch", "transformers", "peft"))
    tokens = rng.integers(0, 28, (2, 12))
    make(family).save_pretrained(tmp_path / "base")
    ours = trained(add_lora(make(family), 2, alpha=3, targets=("q_proj",), parameters=BOTH, rngs=nnx.Rngs(1)))
    save_adapters(ours, tmp_path / "ours")
    base = lambda: transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    theirs = peft.PeftModel.from_pretrained(base(), tmp_path / "ours")
    with torch.no_grad():
        logits = theirs(torch.tensor(tokens)).logits.numpy()
    run = jax.jit(lambda model: model(jnp.asarray(tokens, jnp.int32)).logits)
    np.testing.assert_allclose(run(ours), logits, atol=2e-4 * np.abs(logits).max())
    config = peft.LoraConfig(r=3, lora_alpha=4, target_modules=["v_proj"], target_parameters=list(BOTH))
    new = peft.get_peft_model(base(), config)
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            if "lora_" in name:
                parameter += 0.1 * torch.randn_like(parameter)
        logits = new(torch.tensor(tokens)).logits.numpy()
    new.save_pretrained(tmp_path / "theirs")
    again = load_adapters(make(family), tmp_path / "theirs")
    np.testing.assert_allclose(run(again), logits, atol=2e-4 * np.abs(logits).max())
    assert type(again) is CLASSES[family]
