"""Adapters of the head and the embedding, and what is trained as a whole: numbers, files, meshes, and PEFT's."""

import dataclasses
import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from liger_jax.models import (
    AutoModelForCausalLM,
    KernelOptions,
    Layout,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from liger_jax.models.lora import (
    add_lora,
    load_adapters,
    merge_lora,
    save_adapters,
    train_more,
    trainable,
    with_adapters,
    with_dropout,
)
from liger_jax.models.quantized import quantize
from tests.models._llama import loss_and_gradients, random_tokens
from tests.models.test_lora import SMALL, by_path, close, live, loss_of, moved
from tests.ops._oracle import first

TIED = dataclasses.replace(SMALL, tie_word_embeddings=True)
BIASED = Qwen2Config(**{field.name: getattr(SMALL, field.name) for field in dataclasses.fields(LlamaConfig)})
OUTSIDE = ("q_proj", "lm_head", "embed_tokens")


def make_model(config, **options):
    """Queries, keys and values have biases where the config is Qwen2's."""
    family = Qwen2ForCausalLM if isinstance(config, Qwen2Config) else LlamaForCausalLM
    return family(config, rngs=nnx.Rngs(0), **options)


def with_head(config=SMALL, *, model=None, **options):
    settings = dict(alpha=6.0, targets=OUTSIDE) | options
    return moved(add_lora(model or make_model(config), 3, **settings, rngs=nnx.Rngs(1)))


def with_more(config=SMALL, *, targets=("q_proj",), **more):
    return moved(train_more(add_lora(make_model(config), 3, alpha=6.0, targets=targets, rngs=nnx.Rngs(1)), **more))


def value_and_gradients(model, tokens):
    graph, adapters, base = trainable(model)
    loss = lambda adapters, base, tokens: nnx.merge(graph, adapters, base)(tokens, labels=tokens).loss
    value, found = jax.jit(jax.value_and_grad(loss))(adapters, base, tokens)
    return value, by_path(found)


def same_weights(found, model):
    expected = by_path(nnx.state(model))
    assert by_path(nnx.state(found)).keys() == expected.keys()
    for path, value in by_path(nnx.state(found)).items():
        np.testing.assert_array_equal(value, expected[path])


@pytest.mark.parametrize("config", first(1, [TIED, SMALL]), ids=["tied", "untied"])
def test_adapters_of_head_and_embedding_follow_from_the_merged_weights(config, rng):
    """W' = W + s·(A·B)ᵀ of the head, E' = E + s·A·B; and the chain rule. A tied head is two."""
    new, tokens = add_lora(make_model(config), 3, alpha=6.0, targets=OUTSIDE, rngs=nnx.Rngs(1)), random_tokens(rng)
    before = loss_of(make_model(config), tokens)
    close(loss_of(new, tokens), before, 1e-6)
    model = moved(new)
    value, found = value_and_gradients(model, tokens)
    merged = merge_lora(with_adapters(model, True))
    truth, gradients = loss_and_gradients(merged, tokens, {})
    of_weights = by_path(gradients)
    close(value, truth)
    for path, adapter, dw in (
        (("lm_head_adapter",), model.lm_head_adapter, of_weights["lm_head",].T),
        (("model", "embed_tokens_adapter"), model.model.embed_tokens_adapter, of_weights["model", "embed_tokens"]),
    ):
        a, b = (np.asarray(x[...], np.float64) for x in (adapter.lora_a, adapter.lora_b))
        close(found[(*path, "lora_a")], adapter.scale * dw @ b.T, 1e-4)
        close(found[(*path, "lora_b")], adapter.scale * a.T @ dw, 1e-4)
    close(loss_of(with_adapters(model, False), tokens), before, 1e-6)
    assert loss_of(with_adapters(with_adapters(model, False), True), tokens) == loss_of(model, tokens) != before


def test_hidden_states_and_head_make_the_call_s_logits_with_dora_on_the_head(rng):
    model, tokens = with_head(targets=("lm_head",), dora=True), random_tokens(rng)
    hidden = jax.jit(lambda model: model.hidden_states(tokens))(model)
    logits = np.asarray(hidden, np.float64) @ np.asarray(model.head, np.float64).T
    adapter = model.lm_head_adapter
    w, a, b, m = (
        np.asarray(x[...], np.float64) for x in (model.lm_head, adapter.lora_a, adapter.lora_b, adapter.magnitude)
    )
    whole = w + adapter.scale * (a @ b).T
    h = np.asarray(jax.jit(lambda model: model.hidden_states(tokens))(with_adapters(model, False)), np.float64)
    close(logits, h @ (whole * (m / np.linalg.norm(whole, axis=1))[:, None]).T)
    truth = loss_of(model, tokens)
    close(loss_of(merge_lora(model), tokens), truth)


def test_dropout_drops_the_head_adapter_s_inputs(rng):
    model, tokens = with_head(targets=("lm_head",), dropout=0.5), random_tokens(rng)
    losses = [loss_of(with_dropout(model, jax.random.key(seed)), tokens) for seed in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2] and loss_of(model, tokens) not in losses


def test_whole_modules_are_trained_by_their_own_gradient_and_restored_by_turning_them_off(rng):
    options = dict(modules=["lm_head", "embed_tokens", "model.norm", "v_proj"], bias="lora_only")
    model, tokens = with_more(BIASED, **options), random_tokens(rng)
    value, found = value_and_gradients(model, tokens)
    truth, gradients = loss_and_gradients(merge_lora(with_adapters(model, True)), tokens, {})
    close(value, truth)
    layer, of_weights = ("model", "layers", "self_attn"), by_path(gradients)
    own = [("lm_head",), ("model", "embed_tokens"), ("model", "norm", "scale"), (*layer, "q_proj", "bias")]
    own += [(*layer, "v_proj", "kernel"), (*layer, "v_proj", "bias")]
    assert sorted(found) == sorted([*own, *((*layer, "q_proj", part) for part in ("lora_a", "lora_b"))])
    for path in own:
        close(found[path], of_weights[path], 1e-4)
    before = loss_of(make_model(BIASED), tokens)
    off = with_adapters(model, False)
    close(loss_of(off, tokens), before, 1e-6)
    assert loss_of(with_adapters(off, True), tokens) == loss_of(model, tokens) != before


def test_tokens_of_a_tied_table_are_trained_in_embedding_and_head(rng):
    """Rows of E' replace those of E in both, and their gradient is the sum of both."""
    model, tokens = with_more(TIED, tokens=[7, 3]), random_tokens(rng).at[0, :3].set(jnp.array([3, 7, 3]))
    value, found = value_and_gradients(model, tokens)
    merged = merge_lora(with_adapters(model, True))
    assert merged.config.tie_word_embeddings
    truth, gradients = loss_and_gradients(merged, tokens, {})
    close(value, truth)
    close(found["model", "embed_tokens_rows", "rows"], by_path(gradients)["model", "embed_tokens"][[7, 3]], 1e-4)
    close(loss_of(with_adapters(model, False), tokens), loss_of(make_model(TIED), tokens), 1e-6)


MORE = {
    "adapters": lambda: (SMALL, with_head()),
    "modules": lambda: (TIED, with_more(TIED, modules=["lm_head", "v_proj", "input_layernorm"])),
    "biases": lambda: (BIASED, with_more(BIASED, bias="all")),
    "tokens": lambda: (SMALL, with_more(tokens={"embed_tokens": [5, 0], "lm_head": [9]})),
    "dora": lambda: (SMALL, with_head(targets=("q_proj", "lm_head"), dora=True)),
    "tied": lambda: (TIED, with_head(TIED, targets=("lm_head",))),
    "adapted biases": lambda: (BIASED, with_more(BIASED, bias="lora_only", modules=["k_proj"])),
}


@pytest.mark.parametrize("case", first(4, list(MORE)))
def test_all_of_it_is_saved_and_loaded(case, tmp_path):
    config, model = MORE[case]()
    save_adapters(model, tmp_path)
    again = load_adapters(make_model(config), tmp_path)
    same_weights(again, model)
    unrolled = load_adapters(make_model(config, scan_layers=False), tmp_path)
    save_adapters(unrolled, tmp_path / "again")
    first, second = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path, tmp_path / "again"))
    assert first.keys() == second.keys()
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_names_in_checkpoints_and_files_stay_and_merging_gives_the_class_back(tmp_path):
    model = with_head()
    trained = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(trainable(model)[1])}
    of_layers = {f"model.layers.self_attn.q_proj.lora_{end}" for end in "ab"}
    outside = {f"{name}_adapter.lora_{end}" for name in ("lm_head", "model.embed_tokens") for end in "ab"}
    assert trained == outside | of_layers
    save_adapters(model, tmp_path)
    saved = {name for name in load_file(tmp_path / "adapter_model.safetensors") if ".lora_" in name}
    ends = ("lm_head.lora_A.weight", "lm_head.lora_B.weight", "model.embed_tokens.lora_embedding_A")
    ends += ("model.embed_tokens.lora_embedding_B",)
    assert {name for name in saved if ".layers." not in name} == {f"base_model.model.{end}" for end in ends}
    rows = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(trainable(with_more(TIED, tokens=[5]))[1])}
    assert rows == {"model.embed_tokens_rows.rows"} | of_layers
    assert type(model).__name__ == "LlamaForCausalLM" and type(merge_lora(model)) is LlamaForCausalLM


def test_a_table_in_the_file_counts_and_one_of_another_vocabulary_is_refused(tmp_path):
    """PEFT saves the table or the head beside its adapter."""
    save_adapters(with_head(targets=("lm_head",)), tmp_path)
    path, name = tmp_path / "adapter_model.safetensors", "base_model.model.lm_head.base_layer.weight"
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name] + 1}, path)
    np.testing.assert_array_equal(load_adapters(make_model(SMALL), tmp_path).lm_head[...], tensors[name] + 1)
    save_file(tensors | {name: np.ones((62, 32), np.float32)}, path)
    with pytest.raises(ValueError, match=r"lm_head.base_layer.weight \(62, 32\), expected \(61, 32\)"):
        load_adapters(make_model(SMALL), tmp_path)
    save_file({each: x for each, x in tensors.items() if each != name}, path)
    load_adapters(make_model(SMALL), tmp_path)


ON_A_MESH = {
    "adapters": lambda model: with_head(model=model),
    "tokens": lambda model: moved(
        train_more(
            add_lora(model, 3, alpha=6.0, targets=("q_proj",), rngs=nnx.Rngs(1)),
            modules=["norm"],
            tokens={"embed_tokens": [5], "lm_head": [9, 1]},
        )
    ),
}


@pytest.mark.parametrize("case", first(1, list(ON_A_MESH)))
def test_all_of_it_computes_the_same_on_a_mesh(case, devices, rng):
    config, tokens, add = dataclasses.replace(SMALL, vocab_size=64), random_tokens(rng, batch=8), ON_A_MESH[case]
    mesh = jax.make_mesh((len(devices) // 2, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2, devices=devices)
    truth, expected = value_and_gradients(add(make_model(config)), tokens)
    with jax.set_mesh(mesh):
        graph, params = nnx.split(make_model(config, kernels=KernelOptions(layout=Layout())))
        model = add(nnx.merge(graph, jax.device_put(params, Layout().shardings(params, mesh))))
        Layout().shardings(model, mesh)  # every parameter has a rule
        value, found = value_and_gradients(model, jax.device_put(tokens, NamedSharding(mesh, P(("data", "fsdp")))))
    close(value, truth)
    for path, gradient in found.items():
        close(gradient, expected[path])


def test_what_cannot_be_trained_is_refused():
    add = lambda model, **options: add_lora(model, 2, alpha=4, rngs=nnx.Rngs(0), **options)
    with pytest.raises(ValueError, match=r"add_lora: DoRA on model.embed_tokens is not supported"):
        add(make_model(SMALL), targets=("embed_tokens",), dora=True)
    with pytest.raises(ValueError, match=r"add_lora: lm_head is quantised.*head=False"):
        add(quantize(make_model(SMALL), "nf4", block_size=16, head=True), targets=("lm_head",))
    model = add(quantize(make_model(SMALL), "nf4", block_size=16), targets=("q_proj", "lm_head"))
    with pytest.raises(ValueError, match=r"train_more: .*v_proj is quantised, and quantised weights cannot be trained"):
        train_more(model, modules=["v_proj"])
    with pytest.raises(ValueError, match=r"train_more: lm_head has an adapter. Train it as a whole or by an adapter"):
        train_more(model, modules=["lm_head"])
    with pytest.raises(ValueError, match=r"no module is called \['score'\]. The model has \['down_proj', 'embed_tok"):
        train_more(model, modules=["score"])
    with pytest.raises(ValueError, match=r"tokens=\[61\] must each be in \[0, 61\), and occur once"):
        train_more(model, tokens=[61])
    with pytest.raises(ValueError, match=r"train_more: bias='some' must be one of \('none', 'all', 'lora_only'\)"):
        train_more(model, bias="some")
    with pytest.raises(ValueError, match="train_more: the model has no adapters, or they are off"):
        train_more(make_model(SMALL), modules=["norm"])


# --- PEFT -------------------------------------------------------------------------------------------------------------

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, initializer_range=0.3,
)  # fmt: skip
THEIRS = {
    "head and embedding": (False, dict(target_modules=["q_proj", "lm_head", "embed_tokens"])),
    "modules": (False, dict(target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens", "norm"])),
    "biases": (False, dict(target_modules=["q_proj"], bias="all")),
    "adapted biases": (False, dict(target_modules=["q_proj"], bias="lora_only")),
    "tied tokens": (True, dict(target_modules=["q_proj"], trainable_token_indices=[5, 10, 3])),
    "tied head": (True, dict(target_modules=["q_proj", "lm_head"])),
    "tied module": (True, dict(target_modules=["q_proj"], modules_to_save=["lm_head"])),
    "tied embedding": (True, dict(target_modules=["q_proj", "embed_tokens"])),
    "head with dora": (False, dict(target_modules=["q_proj", "lm_head"], use_dora=True)),
    "tokens of both": (
        False,
        dict(target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [5, 10], "lm_head": [7]}),
    ),
}


@live
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # PEFT's, of tied weights
@pytest.mark.parametrize("case", THEIRS)
def test_peft_computes_and_trains_the_same_both_ways(case, tmp_path):
    torch, transformers, peft = map(importlib.import_module, ("torch", "transformers", "peft"))
    torch.manual_seed(0)
    tied, options = THEIRS[case]
    base = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(tie_word_embeddings=tied, **SIZES)).eval()
    base.save_pretrained(tmp_path / "base")
    ids = np.arange(12)[None] * 5 % 64
    theirs = peft.get_peft_model(base, peft.LoraConfig(r=3, lora_alpha=6, task_type="CAUSAL_LM", **options)).eval()
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path / "theirs")
    out = theirs(torch.tensor(ids), labels=torch.tensor(ids))
    out.loss.backward()
    truth = out.logits.detach().numpy()

    model, tokens = AutoModelForCausalLM.from_pretrained(tmp_path / "base"), jnp.asarray(ids)
    load_adapters(model, tmp_path / "theirs")
    close(jax.jit(lambda model: model(tokens).logits)(model), truth, 1e-5)
    graph, adapters, rest = trainable(model)
    loss = lambda adapters: nnx.merge(graph, adapters, rest)(tokens, labels=tokens).loss
    gradients = jax.jit(jax.grad(loss))(adapters)
    save_adapters(nnx.merge(graph, gradients, rest), tmp_path / "gradients")  # by PEFT's names
    found = load_file(tmp_path / "gradients" / "adapter_model.safetensors")
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            name = name.replace(".modules_to_save.default", "").replace(".default", "")
            close(found[name.replace("vector.weight", "vector")], parameter.grad.numpy(), 1e-4)

    save_adapters(model, tmp_path / "ours")
    load = lambda: transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    back = peft.PeftModel.from_pretrained(load(), tmp_path / "ours").eval()
    close(back(torch.tensor(ids)).logits.detach().numpy(), truth, 1e-6)
    merge_lora(model).save_pretrained(tmp_path / "merged")
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] == (
        case == "tied tokens"
    )
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    close(merged(torch.tensor(ids)).logits.detach().numpy(), truth, 1e-4)
