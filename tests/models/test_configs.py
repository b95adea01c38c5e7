"""The configs of all families: defaults, layer types, errors, and that the model reads every field."""

import copy
import dataclasses
import importlib
import importlib.util
import json
import pathlib
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from liger_jax import models
from liger_jax.models import (
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    Ministral3Config,
    MistralConfig,
    Olmo3Config,
    Qwen2Config,
)
from liger_jax.models.hugging_face import checkpoint, config_json
from liger_jax.ops import DynamicRope, LinearRope, Llama3Rope, YarnRope, rope_table

FAMILIES = {
    name: getattr(models, name) for name in dir(models) if name.endswith("ForCausalLM") and not name.startswith("Auto")
}
SIZES = dict(
    vocab_size=11,
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
)
# Fields that the model does not read: a config computes layer_types from them when it is made.
SAY_LAYER_TYPES = {
    "full_attention_interval", "full_attn_idxs", "max_window_layers", "no_rope_layer_interval", "num_hidden_layers",
    "sliding_window_pattern", "use_sliding_window",
}  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"


def sizes_of(family):
    return {name: size for name, size in SIZES.items() if name not in family.config_type.never}


each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


@each_family
def test_every_config_field_is_read_by_the_model(family, monkeypatch):
    fields = {field.name for field in dataclasses.fields(family.config_type)}
    types = family.config_type.known_types[::-1]
    own = {"layer_types": types, "sliding_window": 2, "output_router_logits": True, "mlp_only_layers": (0,)}
    sizes = sizes_of(family) | {name: value for name, value in own.items() if name in fields}
    config, read = family.config_type(**sizes), set()

    def recording(self, name):
        read.add(name)
        return object.__getattribute__(self, name)

    monkeypatch.setattr(family.config_type, "__getattribute__", recording)
    for method in ("__hash__", "__eq__"):  # a dataclass's own methods read every field
        monkeypatch.setattr(family.config_type, method, getattr(object, method))
    tokens = jnp.zeros((1, 4), jnp.int32)
    jax.eval_shape(lambda: family(config, scan_layers=False, rngs=nnx.Rngs(0))(tokens, labels=tokens).loss)
    assert fields - read - set(family.config_type.never) <= SAY_LAYER_TYPES


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@each_family
def test_defaults_are_hugging_face_s(family):
    transformers = importlib.import_module("transformers")
    theirs = getattr(transformers, family.config_type.__name__)().to_dict()
    theirs = {name: value for name, value in theirs.items() if name != "sliding_window" or value is not None}
    ours = family.config_type()
    read = config_json.read(theirs, family.config_type, family.config_fixed)
    changes = dict(head_dim=ours.head_dim)
    if family.config_type.__name__ == "GptOssConfig":  # transformers 5.17 has 0.001 for it, earlier ones 0.9
        changes["router_aux_loss_coef"] = ours.router_aux_loss_coef
    if family.config_type.__name__ == "Lfm2Config":  # some versions name all layers, which None means here
        changes["full_attn_idxs"] = ours.full_attn_idxs
    assert dataclasses.replace(read, **changes) == ours


@each_family
def test_a_config_is_read_back(family):
    config = family.config_type(**sizes_of(family))
    values = config_json.write(config, family.config_fixed, family.__name__, "float32")
    assert config_json.read(values, family.config_type, family.config_fixed) == config


@pytest.mark.parametrize(
    ["config", "expected"],
    [
        (LlamaConfig(num_hidden_layers=2), (FULL, FULL)),
        (MistralConfig(num_hidden_layers=2), (SLIDING, SLIDING)),
        (MistralConfig(num_hidden_layers=2, sliding_window=None), (FULL, FULL)),
        (Qwen2Config(num_hidden_layers=2, max_window_layers=1), (FULL, FULL)),
        (Qwen2Config(num_hidden_layers=2, max_window_layers=1, use_sliding_window=True), (FULL, SLIDING)),
        (Gemma2Config(num_hidden_layers=3), (SLIDING, FULL, SLIDING)),
        (Gemma3TextConfig(num_hidden_layers=3, sliding_window_pattern=3), (SLIDING, SLIDING, FULL)),
        (Gemma3TextConfig(num_hidden_layers=2, layer_types=(FULL, SLIDING)), (FULL, SLIDING)),
    ],
    ids=str,
)
def test_layers_slide_as_the_config_says(config, expected):
    assert config.layer_types == expected
    assert [config.window_of(kind) for kind in expected] == [
        config.sliding_window if kind == SLIDING else None for kind in expected
    ]


def test_what_followed_from_a_field_follows_from_its_replacement():
    replace, llama = dataclasses.replace, LlamaConfig(hidden_size=64, num_attention_heads=4)
    assert replace(llama, num_attention_heads=8) == LlamaConfig(hidden_size=64, num_attention_heads=8)
    twice = replace(replace(llama, num_attention_heads=8), hidden_size=32)
    assert twice == LlamaConfig(hidden_size=32, num_attention_heads=8)
    # What was given stays, there or here, even if it is the number that would have followed.
    assert replace(llama, num_attention_heads=8, head_dim=16).head_dim == 16
    given = LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=16, num_key_value_heads=4)
    assert replace(given, num_attention_heads=8).head_dim == 16
    assert replace(given, num_attention_heads=8).num_key_value_heads == 4
    again = LlamaConfig(hidden_size=64, num_attention_heads=8, head_dim=llama.head_dim)
    assert replace(again, hidden_size=128).head_dim == 16

    layers = dict(num_hidden_layers=2, max_window_layers=1)
    slides = replace(Qwen2Config(**layers), use_sliding_window=True)
    assert slides == Qwen2Config(**layers, use_sliding_window=True) and slides.layer_types == (FULL, SLIDING)
    spelled_out = Qwen2Config(**layers, layer_types=(FULL, FULL))  # as in a checkpoint of transformers
    assert replace(spelled_out, use_sliding_window=True).layer_types == (FULL, SLIDING)
    assert replace(Gemma3TextConfig(), num_hidden_layers=2) == Gemma3TextConfig(num_hidden_layers=2)
    assert replace(MistralConfig(), sliding_window=None) == MistralConfig(sliding_window=None)
    other = Qwen2Config(**layers, layer_types=(SLIDING, FULL))
    assert replace(other, use_sliding_window=True).layer_types == (SLIDING, FULL)
    assert repr(llama) == repr(pickle.loads(pickle.dumps(llama))) and "followed" not in repr(llama)
    assert replace(copy.deepcopy(llama), num_attention_heads=8).head_dim == 8


def test_layer_types_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="Gemma2Config: layer_types=.* for each of num_hidden_layers=3. Pass None"):
        Gemma2Config(num_hidden_layers=3, layer_types=(FULL,))
    with pytest.raises(ValueError, match="layer_types=.'chunked_attention',. must be a 'full_attention' or"):
        Gemma2Config(num_hidden_layers=1, layer_types=("chunked_attention",))
    with pytest.raises(ValueError, match="sliding_window=None must be positive, since layers slide"):
        Gemma2Config(num_hidden_layers=1, sliding_window=None)
    with pytest.raises(ValueError, match=r"LlamaConfig cannot be read .*layer_types=\['sliding_attention'\] must be"):
        config_json.read({"num_hidden_layers": 1, "layer_types": [SLIDING]}, LlamaConfig, {})


@pytest.mark.parametrize(
    ["fields", "message"],
    [
        (dict(vocab_size="32000"), r"vocab_size='32000' \(str\) must be an int from 1 to 2147483647"),
        (dict(vocab_size=32000.0), r"vocab_size=32000.0 \(float\) must be an int"),
        (dict(hidden_size=True), r"hidden_size=True \(bool\) must be an int"),
        (dict(hidden_size=None), r"hidden_size=None \(NoneType\) must be an int"),
        (dict(vocab_size=10**15), "vocab_size=1000000000000000 must be an int from 1 to 2147483647"),
        (dict(num_hidden_layers=10**15), "num_hidden_layers=1000000000000000 must be an int from 1 to 10000"),
        (dict(num_key_value_heads=-1), "num_key_value_heads=-1 must be an int from 1 to 2147483647, or None"),
        (dict(rms_norm_eps=float("nan")), "rms_norm_eps=nan must be a finite float32 above 0"),
        (dict(rms_norm_eps=1e39), "rms_norm_eps=1e.39 must be a finite float32 above 0"),
        (dict(rms_norm_eps=0), "rms_norm_eps=0 must be a finite float32 above 0"),
        (dict(rope_theta=float("inf")), "rope_theta=inf must be a finite float32 above 1"),
        (dict(rope_theta=10**400), "rope_theta=1000.*000 must be a finite float32 above 1"),
        (dict(rope_theta=[1e4]), r"rope_theta=\[10000.0\] \(list\) must be a finite float32"),
        (dict(rope_scaling={"factor": 2.0}), r"rope_scaling={'factor': 2.0} \(dict\) must be one of LinearRope, "),
        (dict(rope_scaling=LinearRope(float("inf"))), "rope_scaling: factor=inf must be a finite float32 above 0"),
        (dict(rope_scaling=LinearRope(1e30)), "reaches more than the 2147483647 positions"),
        (dict(tie_word_embeddings=1), r"tie_word_embeddings=1 \(int\) must be True or False"),
        (dict(initializer_range=-1.0), "initializer_range=-1.0 must be a finite float32 of at least 0"),
        (dict(sliding_window=0), "sliding_window=0 must be an int from 1 to 2147483647, or None"),
        (dict(sliding_window_pattern=0), "sliding_window_pattern=0 must be an int from 1"),
        (
            dict(layer_types="full_attention"),
            r"layer_types='full_attention' \(str\) must be a list of strings, or None",
        ),
        (dict(layer_types=(1, 2)), r"layer_types=\(1, 2\) \(tuple\) must be a list of strings"),
        (
            dict(final_logit_softcapping=float("inf")),
            "softcapping=inf must be a finite float32 above 0, or None",
        ),
        (dict(query_pre_attn_scalar=0), "query_pre_attn_scalar=0 must be a finite float32 above 0"),
        (dict(vocab_size=0, rope_theta="x", head_dim=3.0), r"vocab_size=0 .*; head_dim=3.0 .*; rope_theta='x' \(str\)"),
    ],
    ids=str,
)
def test_fields_of_another_type_or_out_of_range_are_all_named(fields, message, unchecked_types):
    with pytest.raises(ValueError, match=f"^Gemma3TextConfig: .*{message}"):
        Gemma3TextConfig(**{**SIZES, **fields})


def test_biases_are_read_where_transformers_has_them_and_passed_over_elsewhere():
    both = {"attention_bias": True, "mlp_bias": True}
    assert config_json.read(both, LlamaConfig, {}).mlp_bias
    assert not config_json.read(dict.fromkeys(both), LlamaConfig, {}).attention_bias  # null
    with pytest.warns(UserWarning, match="config.json: mlp_bias=True changes nothing, here as in transformers"):
        assert config_json.read(both, Gemma2Config, {}).attention_bias
    with pytest.warns(UserWarning, match="attention_bias=True, mlp_bias=True changes nothing"):
        config = config_json.read(both, MistralConfig, {})
    assert not config.attention_bias and "mlp_bias" not in config_json.write(config, {}, "", "float32")
    with pytest.raises(ValueError, match="Qwen2Config: attention_bias=True must be False: this family has no such"):
        Qwen2Config(attention_bias=True)


@pytest.mark.full
def test_every_bias_of_a_config_is_a_parameter_that_counts(rng):
    config = LlamaConfig(**SIZES | {"attention_bias": True, "mlp_bias": True, "initializer_range": 0.5})
    model = models.LlamaForCausalLM(config, rngs=nnx.Rngs(0))
    tokens, biases = jnp.arange(6)[None], []
    logits = lambda: np.asarray(model(tokens).logits)
    before = logits()
    for path, parameter in nnx.to_flat_state(nnx.state(model)):
        if path[-1] == "bias":
            biases.append(path[-2])
            parameter.set_value(jnp.asarray(rng.normal(size=parameter.shape), jnp.float32))
            assert biases[-1] == "k_proj" or np.abs(logits() - before).max() > 1e-3  # softmax drops much of a key's
            before = logits()
    assert sorted(biases) == sorted([f"{x}_proj" for x in ("q", "k", "v", "o", "gate", "up", "down")])


def test_a_dtype_may_have_torch_s_name():
    path = pathlib.Path("config.json")
    assert config_json.dtype_of({"torch_dtype": "torch.bfloat16"}, path) == "bfloat16"
    with pytest.raises(ValueError, match="torch_dtype='int8' must be one of"):
        config_json.dtype_of({"torch_dtype": "torch.int8"}, path)


def test_fields_that_transformers_does_not_compute_with_are_passed_over():
    with pytest.warns(UserWarning, match="pretraining_tp=2 changes nothing, here as in transformers"):
        config_json.read({"pretraining_tp": 2, "attention_dropout": 0.1}, LlamaConfig, {})
    config_json.read({"pretraining_tp": 1, "attention_dropout": 0.0}, LlamaConfig, {})  # without a warning
    assert config_json.unapplied_dropout({"attention_dropout": 0.0}) is None


def test_numbers_of_another_library_become_python_s(unchecked_types):
    config = LlamaConfig(vocab_size=np.int64(32), rope_theta=np.float32(500000), rms_norm_eps=1)
    assert [type(value) for value in (config.vocab_size, config.rope_theta, config.rms_norm_eps)] == [int, float, float]
    json.dumps(config_json.write(config, {}, "LlamaForCausalLM", "float32"))


@pytest.mark.parametrize(
    ["values", "message"],
    [
        ({"rope_scaling": 5}, "rope_scaling=5 must be an object"),
        ({"rope_parameters": [1]}, r"rope_parameters=\[1\] must be an object"),
        ({"rope_parameters": {FULL: {}}}, "rope_parameters must be one object for all layers"),
        ({"rope_scaling": {FULL: {}}}, "rope_scaling must be one object for all layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 must be 1"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, r"rope_type=\['linear'\] must be 'default' or one of"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"rope_scaling of type 'linear' lacks \['factor'\]"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": "2"}},
            r"rope_scaling: factor='2' \(str\) must be a finite",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "rope_scaling: LinearRope: factor=0.5 must be at"),
        ({"rope_theta": "1e4"}, r"rope_theta='1e4' \(str\) must be a finite float32 above 1"),
        ({"layer_types": 3}, "layer_types=3 must be a list of strings"),
        ({"layer_types": [{}, []]}, r"layer_types=\[\{\}, \[\]\] must be"),
        ({"model_type": "mamba", "vocab_size": -1}, "model_type='mamba' must be 'llama'; vocab_size=-1 must be an int"),
        ({"hidden_size": 30, "num_attention_heads": 4}, "num_attention_heads=4 must divide hidden_size=30"),
    ],
    ids=str,
)
def test_a_config_json_that_does_not_fit_is_refused_with_its_name(values, message):
    fixed = {"model_type": ("llama",)}
    with pytest.raises(ValueError, match=f"^LlamaConfig cannot be read from folder/config.json: .*{message}"):
        config_json.read({"num_hidden_layers": 2, **values}, LlamaConfig, fixed, "folder/config.json")


@pytest.mark.parametrize(
    ["text", "message"],
    [
        (b"[1, 2]", r"must hold an object, \{…\}, and holds \[1, 2\]"),
        (b"", "cannot be read as JSON: Expecting value"),
        (b'{"vocab_size": 3', "cannot be read as JSON"),
        (b"\xff\xfe{}", "cannot be read as JSON: .*utf-8"),
        (b'{"a": ' + 100_000 * b"[", "is nested too deep"),
        (b'{"a": ' + 100_000 * b'{"a":', "is nested too deep"),
        (b'{"rms_norm_eps": 1e999}', "'1e999' is no finite float64"),
        (b'{"rms_norm_eps": NaN}', "'NaN' is no finite float64"),
        (b'{"other": [-Infinity]}', "'-Infinity' is no finite float64"),
        (b'{"vocab_size": 1' + 100_000 * b"0" + b"}", "'10000.*0000' is no finite float64"),
        (b'{"text_config": [1]}', r"text_config=\[1\] must be an object"),
        (b'{"model_type": ["llama"]}', r"model_type=\['llama'\] must be a string"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_damaged_config_json_is_refused_with_its_name(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=message) as error:
        checkpoint.config_values(path)
    assert str(error.value).startswith(str(path)) and len(str(error.value)) < 300 + len(str(path))


# --- the rotary embedding's fields, as transformers 5 reads them (tried with 5.24.0) ----------------------------------

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
OF_TYPES = {FULL: {"rope_theta": 7.0, "rope_type": "default"}, SLIDING: {"rope_theta": 5.0, "rope_type": "default"}}


@pytest.mark.parametrize(
    ["config_type", "values", "theta", "scaling"],
    [
        (LlamaConfig, {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": YARN}, 1e4, YarnRope(4.0, 16)),
        (LlamaConfig, {"rope_parameters": YARN, "rope_scaling": YARN}, 1e4, YarnRope(4.0, 16)),
        (LlamaConfig, {"rope_parameters": {"rope_theta": 7.0, **YARN}, "rope_scaling": {}}, 7.0, YarnRope(4.0, 16)),
        (LlamaConfig, {"rope_parameters": {"rope_theta": 7.0}, "rope_theta": 9.0}, 7.0, None),
        (LlamaConfig, {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": None}}, 1e4, YarnRope(4.0, 64)),
        (
            LlamaConfig,
            {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 32},
            1e4,
            YarnRope(4.0, 32),
        ),
        (LlamaConfig, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 1e4, Llama3Rope(8.0, 1.0, 4.0, 64)),
        (Gemma3TextConfig, {"rope_parameters": OF_TYPES, "rope_scaling": YARN}, 7.0, YarnRope(4.0, 16)),
    ],
)
def test_rope_scaling_beside_rope_parameters_counts(config_type, values, theta, scaling):
    config = config_json.read({"max_position_embeddings": 64, **values}, config_type, {})
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


EXTRA = dict(
    attn_factor=0.87, finetuned=True, alpha=1000.0, original_max_position_embeddings=32, beta_fast=20.0, mscale=0.7,
    mscale_all_dim=0.9, attention_factor=1.3, low_freq_factor=1.0, high_freq_factor=4.0, short_factor=[1.0],
    mrope_section=[2, 1, 1], truncate=False, partial_rotary_factor=1.0, rope_theta=500.0,
)  # fmt: skip
OF_KINDS = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
}


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore:config.json")
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("kind", OF_KINDS)
def test_every_key_of_a_scaling_means_what_it_means_in_transformers(kind):
    torch = importlib.import_module("torch")
    llama = importlib.import_module("transformers.models.llama")
    values = dict(hidden_size=32, num_attention_heads=2, max_position_embeddings=128, rope_theta=10000.0)
    for key in (None, *EXTRA):
        scaling = {"rope_type": kind, **OF_KINDS[kind], **({} if key is None else {key: EXTRA[key]})}
        given = values | {"rope_scaling": scaling}
        theirs = llama.modeling_llama.LlamaRotaryEmbedding(llama.LlamaConfig.from_dict(copy.deepcopy(given)))
        expected = theirs(torch.zeros(1, 200, 1), torch.arange(200)[None])[0].numpy()
        config = config_json.read(given, LlamaConfig, {})
        found, _ = rope_table(jnp.arange(200)[None], 16, theta=config.rope_theta, scaling=config.rope_scaling)
        np.testing.assert_allclose(found, expected, atol=1e-4, err_msg=str(scaling))


@pytest.mark.parametrize(
    ["config_type", "parameters", "scaling"],
    [
        (LlamaConfig, {"rope_theta": 1e6}, YARN),  # transformers goes back to the base 10,000
        (LlamaConfig, YARN, YARN | {"factor": 2.0}),
        (LlamaConfig, YARN, {"rope_type": "linear", "factor": 4.0}),
        (LlamaConfig, YARN, {"rope_type": "default"}),
        (Gemma3TextConfig, {FULL: YARN}, YARN | {"factor": 2.0}),
        (Gemma3TextConfig, OF_TYPES, YARN | {"rope_theta": 9.0}),
    ],
)
def test_rope_scaling_that_disagrees_with_rope_parameters_is_refused(config_type, parameters, scaling):
    with pytest.raises(ValueError, match="rope_parameters=.* disagrees with rope_scaling, .* put all fields into"):
        config_json.read({"rope_parameters": parameters, "rope_scaling": scaling}, config_type, {})


def test_fields_of_gemma_3_that_transformers_does_not_read_are_refused():
    read = lambda **values: config_json.read(values, Gemma3TextConfig, {})
    with pytest.raises(ValueError, match="rope_parameters must hold an object for 'full_attention' and one for"):
        read(rope_parameters={"rope_type": "linear", "factor": 8.0})
    with pytest.raises(ValueError, match="rope_scaling must have its type as rope_type"):
        read(rope_scaling={"type": "linear", "factor": 8.0})
    with pytest.raises(ValueError, match="rope_parameters of 'full_attention'=3 must be an object"):
        read(rope_parameters={FULL: 3})


@pytest.mark.parametrize(
    ["scaling", "name", "expected"],
    [
        (YARN | {"attn_factor": 0.9}, "attn_factor", YarnRope(4.0, 16)),
        ({"type": "linear", "factor": 2.0, "original_max_position_embeddings": 16}, "original_max", LinearRope(2.0)),
        ({"type": "dynamic", "factor": 2.0, "alpha": 10.0}, "alpha", DynamicRope(2.0, 64)),
        ({"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8}, "=8, for", DynamicRope(2.0, 64)),
    ],
)
def test_fields_of_a_scaling_that_change_nothing_are_named(scaling, name, expected):
    with pytest.warns(UserWarning, match=f"config.json: rope_scaling of type .*{name}"):
        config = config_json.read({"max_position_embeddings": 64, "rope_scaling": scaling}, LlamaConfig, {})
    assert config.rope_scaling == expected


def test_transformers_takes_a_dynamic_scaling_s_length_from_max_position_embeddings():
    config = LlamaConfig(max_position_embeddings=64, rope_scaling=DynamicRope(2.0, 8))
    values = config_json.write(config, {}, "LlamaForCausalLM", "float32")
    assert values["max_position_embeddings"] == 8 and values["rope_scaling"] == {"rope_type": "dynamic", "factor": 2.0}
    assert config_json.read(values, LlamaConfig, {}) == config


def test_windows_by_layer_types_are_saved_as_transformers_reads_them():
    write = lambda **fields: config_json.write(Qwen2Config(**SIZES, **fields), {}, "Qwen2ForCausalLM", "float32")
    assert write(layer_types=(FULL, SLIDING))["use_sliding_window"] is True
    assert write()["use_sliding_window"] is False
    number = config_json.write(Gemma2Config(**SIZES, query_pre_attn_scalar=144.0), {}, "", "")["query_pre_attn_scalar"]
    assert number == 144 and type(number) is int


@pytest.mark.parametrize(
    ["config", "clause"],
    [
        (LlamaConfig(logit_scale=0.5), "it leaves out logit_scale=0.5"),
        (LlamaConfig(hidden_size=10, num_attention_heads=3, head_dim=4), "it refuses hidden_size=10"),
        (LlamaConfig(initializer_range=2.0), "it refuses initializer_range=2.0"),
        (Gemma2Config(query_pre_attn_scalar=3.5), "it refuses query_pre_attn_scalar=3.5"),
        (Gemma3TextConfig(rope_scaling=YarnRope(4.0, 16, truncate=False)), "it leaves out truncate=False"),
    ],
    ids=str,
)
def test_what_transformers_does_not_read_of_a_save_is_named(config, clause):
    (found,) = config_json.not_in_transformers(config, "gemma2" if isinstance(config, Gemma2Config) else "llama")
    assert found.startswith(clause)
    assert not config_json.not_in_transformers(type(config)(), "llama")


def test_both_bases_of_gemma_3_are_read_from_transformers_4_and_5():
    read = lambda values: config_json.read(values, Gemma3TextConfig, {})
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = read({"rope_theta": 7.0, "rope_local_base_freq": 5.0, "rope_scaling": scaling})
    new = {FULL: {"rope_theta": 7.0, **scaling}, SLIDING: {"rope_theta": 5.0, "rope_type": "default"}}
    assert old == read({"rope_parameters": new})
    assert old.rope_of(SLIDING) == (5.0, None) and old.rope_of(FULL)[0] == 7.0 and old.rope_of(FULL)[1].factor == 8.0
    with pytest.raises(ValueError, match="rope_parameters of 'sliding_attention' must have rope_type='default'"):
        read({"rope_parameters": {FULL: {}, SLIDING: scaling}})


def test_olmo_3_scales_layers_with_full_attention_alone_by_the_files_of_transformers_4_and_5():
    read = lambda values: config_json.read(values, Olmo3Config, {})
    scaling = {"rope_type": "linear", "factor": 8.0}
    with pytest.warns(UserWarning, match="rope_theta=7.0 is the base of all layers, as in transformers 4"):
        old = read({"rope_theta": 7.0, "rope_scaling": scaling})
    assert old == read(config_json.write(old, {}, "Olmo3ForCausalLM", "float32"))
    plain = {"rope_theta": 7.0, "rope_type": "default"}
    assert old == read({"rope_parameters": {FULL: plain | scaling, SLIDING: plain}})
    assert old.rope_of(SLIDING) == (7.0, None) and old.rope_of(FULL) == (7.0, LinearRope(8.0))
    two = read({"rope_parameters": {FULL: plain | scaling, SLIDING: plain | {"rope_theta": 5.0}}})
    assert two == read(config_json.write(two, {}, "Olmo3ForCausalLM", "float32"))
    assert two.rope_of(SLIDING) == (5.0, None) and two.rope_of(FULL) == (7.0, LinearRope(8.0))
    alone = read({"rope_parameters": {FULL: plain}})
    assert alone.rope_of(SLIDING) == (500_000.0, None)  # as transformers, which gives them the family's own base
    with pytest.raises(ValueError, match="rope_local_base_freq=5.0 must be absent"), pytest.warns(UserWarning):
        read({"rope_theta": 7.0, "rope_local_base_freq": 5.0})  # which transformers would not read


def test_layers_of_exaone_4_with_full_attention_rotate_where_no_layer_slides():
    read = lambda **values: config_json.read(values, Exaone4Config, Exaone4ForCausalLM.config_fixed)
    hybrid, full = read(sliding_window=4, sliding_window_pattern="LLLG"), read(sliding_window=None)
    assert hybrid.layer_types[:4] == (SLIDING, SLIDING, SLIDING, FULL) and set(full.layer_types) == {FULL}
    assert hybrid.rope_of(FULL) is None and hybrid.rope_of(SLIDING) == full.rope_of(FULL) == (10000.0, None)
    of_pattern = lambda n, **others: read(sliding_window_pattern=n, num_hidden_layers=5, **others).layer_types
    assert of_pattern(2) == (SLIDING, FULL) * 2 + (SLIDING,) and of_pattern("LGG") == ((SLIDING, FULL, FULL) * 2)[:5]
    assert of_pattern(10**9) == (SLIDING,) * 5 and of_pattern(2, layer_types=[FULL] * 5) == (FULL,) * 5
    for wrong in (-1, None, "LX", "", [4]):
        with pytest.raises(ValueError, match="sliding_window_pattern=.* must be a positive int, or letters L and G"):
            read(sliding_window_pattern=wrong)
    with pytest.raises(ValueError, match="sliding_window_pattern='LG' must end in G at the last layer"):
        of_pattern("LG")


def test_gemma_4_s_unified_models_have_their_own_defaults():
    read = lambda **values: config_json.read(values, models.Gemma4TextConfig, models.Gemma4ForCausalLM.config_fixed)
    config = read(model_type="gemma4_unified_text", sliding_window=7)
    assert (config.hidden_size_per_layer_input, config.sliding_window, config.max_position_embeddings) == (0, 7, 262144)


def test_an_empty_or_null_field_of_the_rotary_embedding_is_read_as_transformers_reads_it():
    read = lambda config_type, **values: config_json.read(values, config_type, {})
    assert read(models.GptOssConfig, rope_parameters=None).rope_scaling == models.GptOssConfig().rope_scaling
    assert read(models.GptOssConfig, rope_parameters={}).rope_scaling is None  # not the family's own
    assert read(models.Qwen3_5TextConfig, partial_rotary_factor=None).partial_rotary_factor == 1.0
    hybrid = lambda **values: read(models.OlmoHybridConfig, **values).rope_theta
    assert hybrid(rope_theta=None) is hybrid(rope_theta=None, rope_parameters={"rope_type": "default"}) is None
    assert (
        hybrid(rope_parameters={"rope_theta": None}, rope_scaling={"rope_theta": 7.0}) == 7.0
    )  # the second one counts


def test_older_names_of_lfm2_count_before_the_others_and_are_not_written_again(tmp_path):
    fields = dict(vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    config = models.Lfm2Config(**fields, intermediate_size=12, block_multiple_of=4)
    models.Lfm2ForCausalLM(config, rngs=nnx.Rngs(0)).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    older = {"block_ff_dim": 12, "intermediate_size": 99, "tie_embedding": True, "tie_word_embeddings": False}
    path.write_text(json.dumps(json.loads(path.read_text()) | older))
    model = models.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config == config
    model.save_pretrained(tmp_path)
    written = json.loads(path.read_text())
    assert not {"block_ff_dim", "tie_embedding"} & {*written} and written["intermediate_size"] == 12


def test_an_alpha_stretches_hunyuan_s_base():
    read = lambda **values: config_json.read(values, HunYuanDenseV1Config, {})
    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}
    config = read(rope_scaling=scaling, head_dim=128)
    assert config.rope_scaling is None and config.rope_theta == pytest.approx(1e4 * 1000 ** (128 / 126))
    assert read(**config_json.write(config, {}, "", "float32")) == config
    assert read(rope_scaling={"type": "dynamic", "factor": 2.0}).rope_scaling == DynamicRope(2.0, 2048)
    with pytest.raises(ValueError, match="alpha='much' must be a number above 0"):
        read(rope_scaling=scaling | {"alpha": "much"})
    with pytest.raises(ValueError, match="head_dim=2 must be more than 2"):
        read(rope_scaling=scaling, head_dim=2)


def test_ministral_3_has_its_own_scaling_where_config_json_has_none():
    read = lambda values: config_json.read(values, Ministral3Config, {})
    assert read({}) == read({"rope_theta": 5.0}) == Ministral3Config()  # as in transformers
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}
    config = read({"rope_parameters": yarn | {"llama_4_scaling_beta": 0.0, "max_position_embeddings": 16}})
    assert config.rope_theta == 10000.0 and config.query_growth == (0.0, 8)
    assert config == read(config_json.write(config, {}, "Ministral3ForCausalLM", "float32"))
    with pytest.raises(ValueError, match=r"llama_4_scaling_beta=None \(NoneType\) must be a finite float32"):
        read({"rope_parameters": yarn})
    with pytest.raises(ValueError, match="rope_scaling=None must be a YarnRope"):
        read({"rope_parameters": {"rope_theta": 7.0, "llama_4_scaling_beta": 0.1}})
    with pytest.raises(ValueError, match="partial_rotary_factor=0.5 must be 1: whole heads are rotated"):
        read({"partial_rotary_factor": 0.5})
