"""Which layers are adapted, and each with its own rank and alpha: PEFT's rules, in stacks and without."""

import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from liger_jax.models import AutoModelForCausalLM, Phi3Config, Phi3ForCausalLM
from liger_jax.models.hugging_face.adapter_targets import LAYER, Targets, patterns_of, value_of
from liger_jax.models.lora import add_lora, load_adapters, merge_lora, save_adapters, trainable, with_adapters
from tests.models import _hugging_face as hugging_face
from tests.models._llama import make_model, random_tokens
from tests.models.test_lora import close, live, loss_of, moved
from tests.ops._oracle import first

NAMES = [f"model.layers.{i}.{name}" for i in (0, 1) for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj")]
PATTERNS = dict(rank_pattern={"k_proj": 5, "layers.1.mlp.up_proj": 1}, alpha_pattern={r"layers\.0\..*_proj": 9})
OWN = {"0.q_proj": (3, 9.0), "0.k_proj": (5, 9.0), "0.up_proj": (3, 9.0)}
OWN |= {"1.q_proj": (3, 6.0), "1.k_proj": (5, 6.0), "1.up_proj": (1, 6.0)}


def patterned(*, scan_layers=True, **options):
    model = make_model(scan_layers=scan_layers)
    settings = dict(alpha=6.0, targets=r".*\.(q|k|up)_proj", **PATTERNS) | options
    return moved(add_lora(model, 3, **settings, rngs=nnx.Rngs(1)))


def _set(variable, place, value):
    """Makes a layer's array this value, and 0 after it."""
    variable[...] = variable[...].at[place[0]].set(0).at[place].set(value)


def gradients(model, tokens):
    graph, adapters, base = trainable(model)
    return jax.jit(jax.grad(lambda p: nnx.merge(graph, p, base)(tokens, labels=tokens).loss))(adapters)


@pytest.mark.parametrize(
    "options, adapted",
    [
        (dict(names=["q_proj"]), [0, 3]),
        (dict(names=["1.self_attn.q_proj", "model.layers.0.mlp.up_proj"]), [2, 3]),
        (dict(names=r".*\.0\..*"), [0, 1, 2]),
        (dict(names="q_proj"), []),  # an expression is one for the whole name
        (dict(names="all-linear", excluded=["k_proj", "0.mlp.up_proj"]), [0, 3, 5]),
        (dict(names=["q_proj", "up_proj"], excluded=r".*mlp.*"), [0, 3]),
        (dict(names=["q_proj"], layers=[1]), [3]),
        (dict(names=["q_proj", "model.layers.0.mlp.up_proj"], layers=[1]), [2, 3]),
        (dict(names=["q_proj"], layers=[1], layers_pattern=["blocks", "layers"]), [3]),
        (dict(names=["q_proj"], layers=[1], layers_pattern=["blocks"]), []),
        (dict(names=["q_proj", "up_proj"], saved=["mlp"]), [0, 3]),
    ],
    ids=str,
)
def test_names_are_matched_as_in_peft(options, adapted):
    assert [name for name in NAMES if Targets(**options).adapts(name)] == [NAMES[i] for i in adapted]


def test_the_first_pattern_that_matches_a_name_s_end_counts():
    patterns = {"k_proj": 1, r"0\.self_attn\..*": 2, "proj": 3}
    assert [value_of(patterns, name, 0) for name in NAMES] == [2, 1, 0, 0, 1, 0]
    values = dict(zip(NAMES, (8, 4, 8, 8, 4, 2), strict=True))
    default, pattern = patterns_of(values)
    assert (default, pattern) == (8, {"k_proj": 4, "model.layers.1.mlp.up_proj": 2})
    assert {name: value_of(pattern, name, default) for name in NAMES} == values


@pytest.mark.parametrize("rslora", first(1, [False, True]))
def test_layers_with_ranks_and_alphas_of_their_own_compute_the_same_in_a_stack(rslora, rng):
    """y = x·W + alpha/rank·(x·A)·B with each layer's own numbers; what is beyond a rank stays 0."""
    tokens = random_tokens(rng)
    stack, unrolled = (patterned(scan_layers=scan, rslora=rslora) for scan in (True, False))
    for i, layer in enumerate(unrolled.model.layers):
        for of_stack, of_layer, name in (
            (stack.model.layers.self_attn.k_proj, layer.self_attn.k_proj, f"{i}.k_proj"),
            (stack.model.layers.mlp.up_proj, layer.mlp.up_proj, f"{i}.up_proj"),
        ):
            rank, alpha = OWN[name]
            assert of_layer.lora_a.shape[-1] == rank
            scale = alpha / (rank**0.5 if rslora else rank)
            np.testing.assert_allclose([of_layer.scale, np.ravel(of_stack.scale)[i]], scale, rtol=1e-6)
            _set(of_stack.lora_a, (i, slice(None), slice(rank)), of_layer.lora_a[...])  # the same adapters in both
            _set(of_stack.lora_b, (i, slice(rank)), of_layer.lora_b[...])
    for part in ("lora_a", "lora_b"):
        values = [getattr(layer.self_attn.q_proj, part)[...] for layer in unrolled.model.layers]
        getattr(stack.model.layers.self_attn.q_proj, part)[...] = jnp.stack(values)
    truth = loss_of(merge_lora(with_adapters(unrolled, True)), tokens)
    close(loss_of(unrolled, tokens), truth)
    close(loss_of(stack, tokens), truth)
    close(loss_of(merge_lora(with_adapters(stack, True)), tokens), truth)
    found, expected = gradients(stack, tokens).model.layers, gradients(unrolled, tokens).model.layers
    for i in (0, 1):
        rank = OWN[f"{i}.up_proj"][0]
        close(found.mlp.up_proj.lora_a[...][i, :, :rank], expected[i].mlp.up_proj.lora_a[...])
        close(found.mlp.up_proj.lora_b[...][i, :rank], expected[i].mlp.up_proj.lora_b[...])
        assert (
            not found.mlp.up_proj.lora_a[...][i, :, rank:].any() and not found.mlp.up_proj.lora_b[...][i, rank:].any()
        )


@pytest.mark.parametrize("scan_layers", first(1, [True, False]))
def test_ranks_and_alphas_of_their_own_are_saved_and_loaded(scan_layers, rng, tmp_path):
    model, tokens = load_adapters_of(patterned(scan_layers=False), tmp_path, scan_layers), random_tokens(rng)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["rank_pattern"]) == (3, {"k_proj": 5, "model.layers.1.mlp.up_proj": 1})
    assert config["target_modules"] == ["k_proj", "q_proj", "up_proj"]
    shapes = {name: x.shape for name, x in load_file(tmp_path / "adapter_model.safetensors").items()}
    assert shapes["base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"] == (1, 32)
    close(loss_of(model, tokens), loss_of(patterned(scan_layers=False), tokens))
    save_adapters(model, tmp_path / "again")
    again, first = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "again", tmp_path))
    assert again.keys() == first.keys()
    jax.tree.map(np.testing.assert_array_equal, again, first)
    assert json.loads((tmp_path / "again" / "adapter_config.json").read_text()) == config


def load_adapters_of(model, folder, scan_layers):
    save_adapters(model, folder)
    return load_adapters(make_model(scan_layers=scan_layers), folder)


@pytest.mark.parametrize("dora", first(1, [True, False]))
def test_layers_without_an_adapter_stay_as_they_are_in_a_stack(dora, rng, tmp_path):
    tokens, options = random_tokens(rng), dict(targets=["q_proj"], layers=[1], dora=dora)
    stack = patterned(**options)
    stack.model.layers.self_attn.q_proj.lora_a[...] = stack.model.layers.self_attn.q_proj.lora_a[...].at[0].set(0)
    stack.model.layers.self_attn.q_proj.lora_b[...] = stack.model.layers.self_attn.q_proj.lora_b[...].at[0].set(0)
    found = gradients(stack, tokens).model.layers.self_attn.q_proj
    for part in ("lora_a", "lora_b", *(["magnitude"] if dora else [])):
        gradient = getattr(found, part)[...]
        assert not gradient[0].any() and gradient[1].any()
    save_adapters(stack, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == [
        "model.layers.1.self_attn.q_proj"
    ]
    unrolled = load_adapters(make_model(scan_layers=False), tmp_path)
    assert not hasattr(unrolled.model.layers[0].self_attn.q_proj, "lora_a")
    close(loss_of(stack, tokens), loss_of(unrolled, tokens))
    close(loss_of(load_adapters(make_model(), tmp_path), tokens), loss_of(unrolled, tokens))
    close(loss_of(merge_lora(stack), tokens), loss_of(unrolled, tokens))


def test_targets_that_name_nothing_are_refused():
    add = lambda **options: add_lora(make_model(), 2, alpha=4, rngs=nnx.Rngs(0), **options)
    with pytest.raises(ValueError, match=r"targets='q_proj' must name at least one projection"):
        add(targets="q_proj")
    with pytest.raises(ValueError, match=r"targets=\['q_proj'\], layers=\[7\] must name at least one projection"):
        add(targets=["q_proj"], layers=[7])
    with pytest.raises(ValueError, match=r"add_lora: rank_pattern: {'k_proj': 0} must be an int of at least 1"):
        add(rank_pattern={"k_proj": 0})
    with pytest.raises(ValueError, match=r"targets='\(' is no regular expression"):
        add(targets="(")


@live
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("options", [{}, dict(use_rslora=True, use_dora=True)], ids=["plain", "rslora and dora"])
def test_peft_s_patterns_are_ours_both_ways(options, tmp_path):
    torch, transformers, peft = map(importlib.import_module, ("torch", "transformers", "peft"))
    folder, expected = hugging_face.committed("llama")
    load = lambda: transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float()
    logits = lambda model: model(input_ids=torch.from_numpy(np.asarray(expected.tokens))).logits.detach().numpy()
    torch.manual_seed(0)
    settings = dict(target_modules=["q_proj", "k_proj", "up_proj"], **PATTERNS, **options)
    config = peft.LoraConfig(r=3, lora_alpha=6, task_type="CAUSAL_LM", init_lora_weights=False, **settings)
    theirs = peft.get_peft_model(load(), config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    for scan_layers in (True, False):
        ours = load_adapters(AutoModelForCausalLM.from_pretrained(folder, scan_layers=scan_layers), tmp_path / "theirs")
        close(ours(jnp.asarray(expected.tokens, jnp.int32)).logits, logits(theirs), 1e-4)
        save_adapters(ours, tmp_path / "ours")
        back = peft.PeftModel.from_pretrained(load(), tmp_path / "ours").eval()
        close(logits(back), logits(theirs), 1e-6)


class Foreign(nnx.Module):
    """A model of another library: layers in a list, and a head that is a projection, too."""

    def __init__(self, name, rngs):
        self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)]) if name is None else nnx.List([])
        if name is not None:
            setattr(self, name, nnx.Linear(4, 4, rngs=rngs))
        self.unembed = nnx.Linear(4, 8, rngs=rngs)


def test_the_default_is_every_projection_of_the_layers_whatever_they_are_called():
    phi = Phi3Config(vocab_size=8, hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=1)
    adapted = lambda model, targets=None: {
        ".".join(map(str, path[:-1]))
        for path, _ in nnx.to_flat_state(trainable(add_lora(model, 2, alpha=2, targets=targets, rngs=nnx.Rngs(1)))[1])
    }
    make = lambda: Phi3ForCausalLM(phi, rngs=nnx.Rngs(0))
    default = adapted(make())
    assert {name.rpartition(".")[2] for name in default} == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    assert adapted(make(), [*LAYER]) == default
    assert adapted(make(), [*LAYER[::-1], "lm_head"]) - default and adapted(make(), ["o_proj"]) < default
    assert adapted(Foreign(None, nnx.Rngs(0))) == {"blocks.0", "blocks.1"}
    assert adapted(Foreign("o_proj", nnx.Rngs(0))) == {"o_proj"}
    with pytest.raises(ValueError, match=r"neither stacked nor numbered layers.* \['dense', 'u"):
        adapted(Foreign("dense", nnx.Rngs(0)))
