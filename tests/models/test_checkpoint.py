"""Hugging Face's checkpoints: reading, writing, the numbers, and the errors for those that do not fit."""

import dataclasses
import fnmatch
import functools
import json
import pathlib
import re
import shutil
import sys
import time
import tracemalloc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from huggingface_hub.errors import LocalEntryNotFoundError
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from liger_jax.models import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from liger_jax.models.hugging_face import config_json, source, tensor_files, weights
from liger_jax.ops import DynamicRope, LinearRope, Llama3Rope, YarnRope
from tests.models._hugging_face import GOLDEN
from tests.models._llama import CONFIG, make_model, random_tokens
from tests.ops._oracle import first

read_llama = functools.partial(config_json.read, config_type=LlamaConfig, fixed=LlamaForCausalLM.config_fixed)
ROPES = [
    None,
    LinearRope(2.0),
    DynamicRope(2.0, 32),
    Llama3Rope(8.0, original_max_position_embeddings=16),
    YarnRope(4.0, 16, beta_fast=16.0),
]


def parameters(model):
    return {"/".join(map(str, path)): x for path, x in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def assert_equal_models(model, expected):
    ours, theirs = parameters(model), parameters(expected)
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        assert x.dtype == theirs[name].dtype
        assert jnp.array_equal(x[...], theirs[name][...]), name


# --- both ways --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scan, scan_again", [(True, False), pytest.param(False, True, marks=pytest.mark.full)])
def test_what_is_saved_is_read_back_bit_by_bit(tied, scan, scan_again, tmp_path):
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    make_model(config, param_dtype=jnp.bfloat16, scan_layers=scan).save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path, scan_layers=scan_again)
    assert model.config == config
    assert_equal_models(model, make_model(config, param_dtype=jnp.bfloat16, scan_layers=scan_again))
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) == (not tied)


def test_large_models_are_many_files_and_smaller_ones_replace_them(tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path, max_shard_bytes=20_000, config_fields={"eos_token_id": 7})
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    sizes = [[x.nbytes for x in load_file(file).values()] for file in files]
    assert all(sum(size) <= 20_000 or len(size) == 1 for size in sizes)
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == 7
    assert_equal_models(LlamaForCausalLM.from_pretrained(tmp_path), model)
    make_model(seed=1).save_pretrained(tmp_path)
    assert [file.name for file in tmp_path.glob("model*")] == ["model.safetensors"]
    assert_equal_models(LlamaForCausalLM.from_pretrained(tmp_path), make_model(seed=1))


def test_parameters_and_computation_get_the_dtypes_asked_for(tmp_path, rng):
    make_model(param_dtype=jnp.bfloat16).save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=jnp.bfloat16, param_dtype=jnp.float32)
    assert {x.dtype for x in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype(jnp.float32)}
    assert model.model(random_tokens(rng)).hidden.dtype == jnp.bfloat16


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: type(rope).__name__)
def test_config_is_read_back(rope):
    config = dataclasses.replace(CONFIG, rope_scaling=rope)
    values = json.loads(
        json.dumps(config_json.write(config, LlamaForCausalLM.config_fixed, "LlamaForCausalLM", "float32"))
    )
    assert read_llama(values) == config


def test_every_family_reads_its_own_checkpoint_and_no_other(tmp_path):
    sizes = {field.name: getattr(CONFIG, field.name) for field in dataclasses.fields(CONFIG)}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes), rngs=nnx.Rngs(0))
    assert "q_proj/bias" in " ".join(parameters(model))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is Qwen2ForCausalLM
    assert_equal_models(again, model)
    with pytest.raises(ValueError, match="model_type='qwen2' must be 'llama'"):
        LlamaForCausalLM.from_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"model_type": "mamba"}))
    with pytest.raises(ValueError, match="model_type='mamba' in .* must be one of .*'gemma', .*'llama', .*'qwen3'."):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("rope", first(1, ROPES[1:]), ids=lambda rope: type(rope).__name__)
def test_the_model_scales_its_rotary_embedding(rope, rng):
    tokens = random_tokens(rng, length=40)
    logits = nnx.jit(lambda model: model(tokens).logits)
    plain, scaled = (logits(make_model(dataclasses.replace(CONFIG, rope_scaling=r))) for r in (None, rope))
    assert not jnp.allclose(plain, scaled, atol=1e-3)


def test_rope_of_transformers_4_and_5_and_of_their_predecessors_is_one():
    scaling = {"factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    written = [
        {"rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3", **scaling}},
        {"rope_theta": 500.0, "rope_scaling": {"type": "llama3", "rope_type": "llama3", **scaling}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **scaling}},
    ]
    expected = LlamaConfig(rope_theta=500.0, rope_scaling=Llama3Rope(**scaling))
    assert [read_llama(values) for values in written] == [expected] * 3
    assert read_llama({"rope_scaling": None}) == LlamaConfig()


# --- on a mesh --------------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh(devices):
    return jax.make_mesh((len(devices) // 2, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2, devices=devices)


def split_last(shape):
    return P(*[None] * (len(shape) - 1), "fsdp") if len(shape) > 1 else P()


def specs_by(kind, model):
    """A rule, a pytree or nothing, and the spec that a kernel of the feed-forward should get from it."""
    if kind == "rule":
        return lambda name, shape: P(None, ("data", "fsdp")) if name == "lm_head" else split_last(shape)
    return jax.tree.map(lambda x: split_last(x.shape), nnx.state(model)) if kind == "pytree" else None


@pytest.mark.parametrize("kind", ["rule", "pytree", "none"])
@pytest.mark.parametrize("scan", [True, False])
def test_each_parameter_is_read_to_its_shards(kind, scan, mesh, tmp_path):
    model = make_model(scan_layers=scan)
    model.save_pretrained(tmp_path)
    options = dict(mesh=mesh, partition_specs=specs_by(kind, model), scan_layers=scan)
    found = LlamaForCausalLM.from_pretrained(tmp_path, **options)
    assert_equal_models(found, model)
    layers = found.model.layers
    kernel = (layers if scan else layers[1]).mlp.up_proj.kernel[...]
    split = P() if kind == "none" else split_last(kernel.shape)
    assert kernel.sharding.is_equivalent_to(NamedSharding(mesh, split), kernel.ndim)
    if kind == "rule":
        assert found.lm_head[...].sharding.is_equivalent_to(NamedSharding(mesh, P(None, ("data", "fsdp"))), 2)


@pytest.mark.parametrize(
    "scan, name",
    [
        (True, "model.layers.mlp.up_proj.kernel"),  # all layers of the scan
        (True, "model.last_layers.2.mlp.up_proj.kernel"),  # the one that its pattern of two leaves over
        (False, "model.layers.2.mlp.up_proj.kernel"),
    ],
)
def test_a_parameter_s_name_says_layers_once(scan, name, mesh, tmp_path):
    kinds = ("sliding_attention", "full_attention", "sliding_attention")
    sizes = {field.name: getattr(CONFIG, field.name) for field in dataclasses.fields(CONFIG)}
    config = Qwen2Config(**sizes | dict(num_hidden_layers=3, layer_types=kinds))
    Qwen2ForCausalLM(config, scan_layers=scan, rngs=nnx.Rngs(0)).save_pretrained(tmp_path)
    names = []
    specs = lambda name, shape: names.append(name) or P()
    Qwen2ForCausalLM.from_pretrained(tmp_path, mesh=mesh, partition_specs=specs, scan_layers=scan)
    assert name in names and not [name for name in names if name.count("layers") > 1], names


def test_of_a_sharded_parameter_parts_are_read_and_each_once(mesh, tmp_path, monkeypatch):
    make_model().save_pretrained(tmp_path)
    most, total, mapped = {}, {}, weights.transfers.mapped_tensors

    class Slice:
        def __init__(self, name, inner):
            self.name, self.inner = name, inner
            self.get_shape, self.get_dtype = inner.get_shape, inner.get_dtype

        def __getitem__(self, index):
            part = self.inner[index]
            most[self.name] = max(most.get(self.name, 0), part.size)
            total[self.name] = total.get(self.name, 0) + part.size
            return part

    noted = lambda path: {name: Slice(name, inner) for name, inner in mapped(path).items()}
    monkeypatch.setattr(weights.transfers, "mapped_tensors", noted)
    LlamaForCausalLM.from_pretrained(tmp_path, mesh=mesh, partition_specs=lambda _, shape: split_last(shape))
    assert most["model.layers.1.mlp.up_proj.weight"] == CONFIG.hidden_size * CONFIG.intermediate_size // 2
    assert most["model.layers.1.mlp.down_proj.weight"] == CONFIG.hidden_size * CONFIG.intermediate_size // 2
    assert most["lm_head.weight"] == CONFIG.vocab_size * CONFIG.hidden_size // 2
    assert total["model.layers.1.mlp.up_proj.weight"] == CONFIG.hidden_size * CONFIG.intermediate_size
    assert total["lm_head.weight"] == CONFIG.vocab_size * CONFIG.hidden_size


@pytest.mark.filterwarnings("ignore:.* become dense:UserWarning")
@pytest.mark.parametrize("scan", first(1, [True, False]), ids=["scan", "unrolled"])
@pytest.mark.parametrize("family", first(1, ["llama_nf4", "gpt_oss", "llama", "gemma3", "mixtral", "qwen3_5_moe"]))
def test_devices_get_tensors_as_they_are_stored_and_make_the_same_of_them(family, scan, mesh, monkeypatch):
    folder, found = GOLDEN / family, []
    specs = lambda _, shape: split_last(shape) if shape and shape[-1] % 2 == 0 else P()
    for is_cpu in (True, False):
        monkeypatch.setattr(weights.transfers, "is_cpu", lambda _, own=is_cpu: own)
        read = functools.partial(AutoModelForCausalLM.from_pretrained, folder, scan_layers=scan)
        models = read(), read(mesh=mesh, partition_specs=specs), read(param_dtype="bfloat16")
        found.append([nnx.state(model) for model in models])
        groups = [group for model in found[-1] for group in weights.shards(model, 2**30)]
        tensors = [{name: np.asarray(group[name].fetch()) for name in sorted(group)} for group in groups]
        found[-1].append(tensors)
    is_same = lambda a, b: a.dtype == b.dtype and np.array_equal(a, b)
    assert all(jax.tree.leaves(jax.tree.map(is_same, *found)))
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: a.sharding == b.sharding, *(models[:3] for models in found))))


def test_specs_that_do_not_fit_are_refused(mesh, tmp_path):
    make_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="partition_specs need a mesh"):
        LlamaForCausalLM.from_pretrained(tmp_path, partition_specs=lambda name, shape: P())
    for specs in ({"lm_head": P()}, lambda name, shape: None):
        with pytest.raises(ValueError, match="a PartitionSpec for each of the model's 12 parameters, and gave"):
            LlamaForCausalLM.from_pretrained(tmp_path, mesh=mesh, partition_specs=specs)


# --- what does not fit ------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    make_model().save_pretrained(tmp_path)
    return tmp_path


def change(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_all_missing_and_left_over_tensors_are_listed(folder):
    def edit(tensors):
        tensors["model.norm.weights"] = tensors.pop("model.norm.weight")
        del tensors["model.layers.1.mlp.up_proj.weight"]

    change(folder, edit)
    with pytest.raises(ValueError, match=r"Missing: \['model.layers.1.mlp.up_proj.weight', 'model.norm.weight'\]; left "
                                         r"over: \['model.norm.weights'\]"):  # fmt: skip
        LlamaForCausalLM.from_pretrained(folder)


def test_all_wrong_shapes_are_listed(folder):
    def edit(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].copy()
        tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].T.copy()

    change(folder, edit)
    with pytest.raises(ValueError, match=r"up_proj.weight \(32, 48\), expected \(48, 32\); .*norm.weight \(31,\), exp"):
        LlamaForCausalLM.from_pretrained(folder)


def test_names_and_shapes_are_listed_together(folder):
    def edit(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].copy()

    change(folder, edit)
    with pytest.raises(
        ValueError, match=r"Missing: \['model.layers.1.mlp.up_proj.*left over: none; shapes: .*norm.weight"
    ):
        LlamaForCausalLM.from_pretrained(folder)


def test_what_counts_is_in_the_files_and_not_in_their_index(tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path, max_shard_bytes=20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shard = tmp_path / index["weight_map"]["model.norm.weight"]
    tensors = load_file(shard)
    tensors["model.other.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, shard)
    with pytest.raises(ValueError, match=r"Missing: \['model.norm.weight'\]; left over: \['model.other.weight'\]"):
        LlamaForCausalLM.from_pretrained(tmp_path)


def test_one_file_counts_more_than_an_index_that_is_left_of_others(tmp_path):
    make_model(seed=1).save_pretrained(tmp_path, max_shard_bytes=20_000)
    model = make_model()
    model.save_pretrained(tmp_path / "one")
    (tmp_path / "one" / "model.safetensors").rename(tmp_path / "model.safetensors")
    assert_equal_models(LlamaForCausalLM.from_pretrained(tmp_path), model)


def test_a_save_that_fails_leaves_the_earlier_model_and_nothing_else(folder, monkeypatch):
    before, files = LlamaForCausalLM.from_pretrained(folder), sorted(folder.iterdir())
    put = tensor_files._put

    def full_disk(file, content):
        if pathlib.Path(file.name).name == "1" and file.tell():  # within the second file
            raise OSError("no space left")
        put(file, content)

    monkeypatch.setattr(tensor_files, "_put", full_disk)
    with pytest.raises(OSError, match="no space left"):
        make_model(seed=1).save_pretrained(folder, max_shard_bytes=20_000)
    assert sorted(folder.iterdir()) == files
    assert_equal_models(LlamaForCausalLM.from_pretrained(folder), before)


def test_an_id_fetches_the_model_s_and_the_tokenizer_s_files_only(folder, monkeypatch):
    fetched = {}
    fetch = lambda name, allow_patterns: fetched.update(name=name, patterns=allow_patterns) or str(folder)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    LlamaForCausalLM.from_pretrained("org/name")
    takes = lambda path: any(fnmatch.fnmatch(path, pattern) for pattern in fetched["patterns"])
    assert fetched["name"] == "org/name"
    weights = ("model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors")
    others = ("config.json", "generation_config.json", "tokenizer.json", "merges.txt", "chat_template.jinja")
    assert all(map(takes, (*weights, *others, "additional_chat_templates/tool_use.jinja")))
    assert not any(map(takes, ("consolidated.safetensors", "original/model.safetensors", "pytorch_model.bin")))
    source.find("org/name", weights=False)
    assert all(map(takes, others)) and not any(map(takes, weights))


def test_an_id_without_huggingface_hub_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match="'org/name' is not a folder, .* pip install huggingface_hub"):
        LlamaForCausalLM.from_pretrained("org/name")


@pytest.mark.parametrize(
    "path",
    [
        "./nowhere",
        "/no/where",
        "~/nowhere",
        "a/b/c",
        "here/nowhere",
        "gone/",
        "a/config.json",
        "",
        "a b/c",
        "runs/finetune",
    ],
)
def test_a_path_without_a_folder_is_no_id(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    fetch = lambda *_, **__: pytest.fail("the hub was asked")
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    with pytest.raises(FileNotFoundError, match=f"no such folder: '{re.escape(path)}'"):
        AutoModelForCausalLM.from_pretrained(path)


def test_a_file_is_no_folder_and_an_unknown_id_no_model(folder, monkeypatch):
    with pytest.raises(FileNotFoundError, match="config.json' is a file. Pass the folder that holds its config.json"):
        LlamaForCausalLM.from_pretrained(folder / "config.json")

    def fetch(name, allow_patterns):
        raise LocalEntryNotFoundError("the hub's own words")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    with pytest.raises(FileNotFoundError, match="no such folder: 'org/name', and .* that id: the hub's own words"):
        LlamaForCausalLM.from_pretrained("org/name")


def test_adapters_are_not_saved_under_names_that_nobody_reads(tmp_path):
    model: Any = make_model()
    model.lm_adapter = nnx.LoRA(32, 2, 32, rngs=nnx.Rngs(0))
    told = "save_pretrained: the model has adapters.*The first of 2 is lm_adapter.lora_a"
    with pytest.raises(ValueError, match=told):
        model.save_pretrained(tmp_path)


@pytest.mark.parametrize("dtype", ["int32", "float8_e4m3fn"])
def test_weights_that_cannot_be_read_again_are_not_saved(dtype, folder):
    model: Any = make_model()
    model.model.norm.scale = nnx.Param(model.model.norm.scale[...].astype(dtype))
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match=f"parameters are {dtype}, and must be float32, bfloat16, float16, float64"):
        model.save_pretrained(folder)
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"vocab_size": 7}, r"\{'vocab_size': 7\} contradicts the model, which has \d+"),
        ({"dtype": "float16"}, r"\{'dtype': 'float16'\} contradicts the model, which has 'float32'"),
        ({"eos_token_id": float("nan")}, r"\{'eos_token_id': nan\} must be JSON"),
        ({"note": {1, 2}}, r"\{'note': \{1, 2\}\} must be JSON"),
    ],
)
def test_fields_that_would_spoil_a_checkpoint_are_not_saved(fields, message, folder):
    before = (folder / "config.json").read_bytes()
    with pytest.raises(ValueError, match=f"save_pretrained: config_fields={message}"):
        make_model().save_pretrained(folder, config_fields=fields)
    assert (folder / "config.json").read_bytes() == before
    make_model().save_pretrained(folder, config_fields={"hidden_size": CONFIG.hidden_size, "dtype": "float32"})


def test_a_model_is_not_saved_to_a_file_or_a_broken_link(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        with pytest.raises(NotADirectoryError, match=f"{name} is a file, or a link to no folder, and must be"):
            make_model().save_pretrained(tmp_path / name)


def test_tied_head_and_rotary_buffers_may_be_there_once_more(tmp_path):
    model = make_model(dataclasses.replace(CONFIG, tie_word_embeddings=True))
    model.save_pretrained(tmp_path)

    def edit(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)

    change(tmp_path, edit)
    assert_equal_models(LlamaForCausalLM.from_pretrained(tmp_path), model)


def test_a_head_that_differs_is_kept_though_config_json_ties_it(tmp_path, rng):
    tied = make_model(dataclasses.replace(CONFIG, tie_word_embeddings=True))
    tied.save_pretrained(tmp_path)
    head = np.asarray(rng.normal(size=(61, 32)), np.float32)
    change(tmp_path, lambda tensors: tensors.update({"lm_head.weight": head}))
    with pytest.warns(UserWarning, match="says tie_word_embeddings, and the files hold a head that differs"):
        model = LlamaForCausalLM.from_pretrained(tmp_path)
    assert not model.config.tie_word_embeddings
    np.testing.assert_array_equal(model.lm_head[...], head)
    np.testing.assert_array_equal(model.model.embed_tokens[...], tied.model.embed_tokens[...])
    model.save_pretrained(tmp_path / "again")
    assert_equal_models(LlamaForCausalLM.from_pretrained(tmp_path / "again"), model)


def test_tensors_may_lack_the_prefix_of_the_decoder(tmp_path):
    """As transformers' `LlamaModel` saves them, without a head."""
    model = make_model(dataclasses.replace(CONFIG, tie_word_embeddings=True))
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({name.removeprefix("model."): x for name, x in load_file(path).items()}, path)
    assert_equal_models(LlamaForCausalLM.from_pretrained(tmp_path), model)
    values = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"does not fit the model. Missing: \['lm_head.weight'\]; left over: none"):
        LlamaForCausalLM.from_pretrained(tmp_path)


def test_a_tied_weight_may_be_there_as_the_head_alone(tmp_path):
    model = make_model(dataclasses.replace(CONFIG, tie_word_embeddings=True))
    model.save_pretrained(tmp_path)
    change(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    assert_equal_models(LlamaForCausalLM.from_pretrained(tmp_path), model)


def test_a_save_that_transformers_computes_otherwise_says_so(tmp_path):
    with pytest.warns(UserWarning, match="transformers does not: it leaves out logit_scale=0.5"):
        make_model(dataclasses.replace(CONFIG, logit_scale=0.5)).save_pretrained(tmp_path)


def test_all_unsupported_fields_are_listed(folder):
    values = json.loads((folder / "config.json").read_text())
    values |= {"hidden_act": "relu", "attention_bias": 1, "rope_scaling": {"type": "su", "factor": 2.0}}
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(
        ValueError, match="rope_type='su' must be .*; hidden_act='relu' must be 'silu'; attention_bias="
    ):
        LlamaForCausalLM.from_pretrained(folder)
    with pytest.raises(ValueError, match="model_type='mamba' must be 'llama'"):
        read_llama({"model_type": "mamba"})
    with pytest.raises(ValueError, match=r"type 'linear' has \['facter'\], and takes \['factor'\]"):
        read_llama({"rope_scaling": {"rope_type": "linear", "facter": 2.0}})


def test_pickles_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="pytorch_model.bin.* are pickles, .* convert them to safetensors"):
        LlamaForCausalLM.from_pretrained(folder)


@pytest.mark.usefixtures("unchecked_types")
def test_absent_files_are_named(folder, tmp_path):
    make_model().save_pretrained(folder, max_shard_bytes=20_000)
    second = sorted(folder.glob("*.safetensors"))[1]
    second.unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks .'{second.name}'., which its model.safetensors.index.json"):
        LlamaForCausalLM.from_pretrained(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="has no config.json"):
        LlamaForCausalLM.from_pretrained(tmp_path / "empty")
    (tmp_path / "empty" / ".lock").touch()  # as a run that was refused leaves it
    with pytest.raises(FileNotFoundError, match="empty is the folder of a run that has no result yet"):
        LlamaForCausalLM.from_pretrained(tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match="no such folder: './nowhere'"):
        LlamaForCausalLM.from_pretrained("./nowhere")
    with pytest.raises(ValueError, match="max_shard_bytes=0 must be positive"):
        make_model().save_pretrained(tmp_path, max_shard_bytes=0)
    with pytest.raises(TypeError, match="max_shard_bytes='5GB' must be an integer"):
        make_model().save_pretrained(tmp_path, max_shard_bytes="5GB")


@pytest.mark.parametrize(
    ["fields", "message"],
    [
        (dict(num_hidden_layers=10**15), "num_hidden_layers=1000000000000000 must be an int from 1 to 10000"),
        (dict(num_hidden_layers=10**6), "num_hidden_layers=1000000 must be an int from 1 to 10000"),
        (dict(num_hidden_layers=10**4), r"says num_hidden_layers=10000, and the tensors are of 2 layers: \[0, 1\]"),
        (dict(num_hidden_layers=1), "says num_hidden_layers=1, and the tensors are of 2 layers"),
        (dict(vocab_size=10**15), "vocab_size=1000000000000000 must be an int from 1 to 2147483647"),
        (dict(vocab_size=10**9), r"says vocab_size=1000000000, and model.embed_tokens.weight has the shape \(61, 32\)"),
        (dict(num_hidden_layers=3, vocab_size=62), "says num_hidden_layers=3, .*; vocab_size=62, "),
        (dict(intermediate_size=10**9), r"up_proj.weight \(48, 32\), expected \(1000000000, 32\)"),
        (dict(torch_dtype="float99"), "torch_dtype='float99' must be one of"),
        (dict(dtype=["float32"]), r"dtype=\['float32'\] must be one of"),
    ],
    ids=str,
)
def test_sizes_that_are_not_the_files_are_refused_in_little_time_and_memory(folder, fields, message):
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | fields))
    tracemalloc.start()
    start = time.process_time()
    try:
        with pytest.raises(ValueError, match=f"{folder}.*{message}"):
            AutoModelForCausalLM.from_pretrained(folder)
        assert time.process_time() - start < 1
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


# --- damaged and hostile files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "entry",
    ["../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..\\x.safetensors", "c:x.safetensors", "x.bin"]
    + ["..", "", ".safetensors", "x.safetensors\n", None, 3, ["x.safetensors"]],
    ids=repr,
)
def test_an_index_names_files_of_its_folder_only(entry, folder):
    shutil.copy(folder / "model.safetensors", folder.parent / "x.safetensors")
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    index = {"weight_map": {"model.norm.weight": "one.safetensors", "lm_head.weight": entry}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="index.json: the file of 'lm_head.weight' is .*, and must be the name of a"):
        LlamaForCausalLM.from_pretrained(folder)


def test_the_hub_s_cache_of_links_is_read(tmp_path):
    make_model().save_pretrained(tmp_path / "blobs", max_shard_bytes=20_000)
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    for i, path in enumerate(sorted((tmp_path / "blobs").iterdir())):
        path.rename(tmp_path / "blobs" / str(i))  # as there, where a blob is named by its digest
        (snapshot / path.name).symlink_to(f"../../blobs/{i}")
    assert_equal_models(LlamaForCausalLM.from_pretrained(snapshot), make_model())


JSON = {
    b"[]": "must hold an object, {…}, and holds ..",
    b'{"weight_map": ': "cannot be read as JSON: Expecting value",
    b"\xff": "cannot be read as JSON: 'utf-8' codec",
    b"[" * 100_000: "is nested too deep",
    b'{"weight_map": 1e999}': "cannot be read as JSON: '1e999' is no finite",
}
INDICES = {
    b"{}": "weight_map must be an object with a file for each tensor, and is None",
    b'{"weight_map": null}': "weight_map must be an object with a file for each tensor, and is None",
    b'{"weight_map": {}}': "weight_map must be an object with a file for each tensor, and is {}",
    b'{"weight_map": ["x"]}': "weight_map must be an object with a file for each tensor, and is .'x'.",
}


@pytest.mark.parametrize("content", [*JSON, *INDICES], ids=lambda content: content[:20].decode("latin1"))
def test_a_damaged_index_is_named(content, folder):
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    (folder / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(ValueError, match=f"model.safetensors.index.json:? {(JSON | INDICES)[content]}"):
        LlamaForCausalLM.from_pretrained(folder)
    make_model().save_pretrained(folder)  # which mends the folder
    LlamaForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", JSON, ids=lambda content: content[:20].decode("latin1"))
def test_damaged_json_is_named(name, content, folder):
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} {JSON[content]}"):
        AutoModelForCausalLM.from_pretrained(folder)


def header(tensors):
    text = json.dumps({name: dict(dtype="F32", shape=[2], data_offsets=place) for name, place in tensors.items()})
    return len(text).to_bytes(8, "little") + text.encode()


@pytest.mark.parametrize(
    ["damage", "reason"],
    [
        (lambda whole: b"", "header too small"),
        (lambda whole: whole[:-1], "incomplete metadata, file not fully covered"),
        (lambda whole: whole + b"0", "incomplete metadata, file not fully covered"),
        (lambda whole: whole[:100], "header too large|invalid header length"),
        (lambda whole: b"\xff" * 200, "header too large"),
        (lambda whole: header({"a": (0, 8), "b": (4, 12)}) + b"0" * 12, "invalid offset for tensor `b`"),
    ],
    ids=["empty", "truncated", "longer", "cut in its header", "garbage", "overlapping"],
)
def test_damaged_safetensors_are_named_with_the_reason(damage, reason, tmp_path):
    make_model().save_pretrained(tmp_path, max_shard_bytes=20_000)
    path = sorted(tmp_path.glob("*.safetensors"))[-1]
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=f"{path.name} is damaged, or not a safetensors file: .*({reason})"):
        LlamaForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("dtype", [np.int64, np.bool_, jnp.float8_e4m3fn])
def test_tensors_that_are_no_floats_are_refused_by_name_and_dtype(dtype, folder):
    names = {"int64": "I64", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3"}
    norm = {"model.norm.weight": np.ones(CONFIG.hidden_size, dtype)}
    change(folder, lambda tensors: tensors.update(norm))
    with pytest.raises(ValueError, match=f"dtypes: model.norm.weight {names[np.dtype(dtype).name]}, expected one of"):
        LlamaForCausalLM.from_pretrained(folder)
