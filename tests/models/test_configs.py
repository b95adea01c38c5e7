"""The configs of all families: defaults, layer types, and that no field is there for nothing."""

import dataclasses
import importlib
import importlib.util

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from liger_jax import models
from liger_jax.models import Gemma2Config, Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen2Config, config_json

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
    head_dim=4,
)
# They are read when a config is made, and say what layer_types is.
SAY_LAYER_TYPES = {"num_hidden_layers", "use_sliding_window", "max_window_layers", "sliding_window_pattern"}
SLIDING, FULL = "sliding_attention", "full_attention"
each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


@each_family
def test_every_config_field_is_read_by_the_model(family, monkeypatch):
    fields = {field.name for field in dataclasses.fields(family.config_type)}
    sizes = SIZES | ({"layer_types": (SLIDING, FULL)} if "layer_types" in fields else {})
    config, read = family.config_type(**sizes), set()

    def recording(self, name):
        read.add(name)
        return object.__getattribute__(self, name)

    monkeypatch.setattr(family.config_type, "__getattribute__", recording)
    for method in ("__hash__", "__eq__"):  # those of a dataclass read every field
        monkeypatch.setattr(family.config_type, method, getattr(object, method))
    tokens = jnp.zeros((1, 4), jnp.int32)
    jax.eval_shape(lambda: family(config, rngs=nnx.Rngs(0))(tokens, labels=tokens).loss)
    assert fields - read <= SAY_LAYER_TYPES


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@each_family
def test_defaults_are_hugging_face_s(family):
    transformers = importlib.import_module("transformers")
    theirs = getattr(transformers, family.config_type.__name__)().to_dict()
    theirs = {name: value for name, value in theirs.items() if name != "sliding_window" or value is not None}
    ours = family.config_type()
    read = config_json.read(theirs, family.config_type, family.config_fixed)
    assert dataclasses.replace(read, head_dim=ours.head_dim) == ours


@each_family
def test_a_config_is_read_back(family):
    config = family.config_type(**SIZES)
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


def test_layer_types_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="Gemma2Config: layer_types=.* for each of num_hidden_layers=3. Pass None"):
        Gemma2Config(num_hidden_layers=3, layer_types=(FULL,))
    with pytest.raises(ValueError, match="layer_types=.'chunked_attention',. must be a 'full_attention' or"):
        Gemma2Config(num_hidden_layers=1, layer_types=("chunked_attention",))
    with pytest.raises(ValueError, match="sliding_window=None must be positive, since layers slide"):
        Gemma2Config(num_hidden_layers=1, sliding_window=None)
    with pytest.raises(ValueError, match=r"LlamaConfig cannot be had .*layer_types=\['sliding_attention'\] must be"):
        config_json.read({"num_hidden_layers": 1, "layer_types": [SLIDING]}, LlamaConfig, {})


def test_both_bases_of_gemma_3_are_read_from_transformers_4_and_5():
    read = lambda values: config_json.read(values, Gemma3TextConfig, {})
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = read({"rope_theta": 7.0, "rope_local_base_freq": 5.0, "rope_scaling": scaling})
    new = {FULL: {"rope_theta": 7.0, **scaling}, SLIDING: {"rope_theta": 5.0, "rope_type": "default"}}
    assert old == read({"rope_parameters": new})
    assert old.rope_of(SLIDING) == (5.0, None) and old.rope_of(FULL)[0] == 7.0 and old.rope_of(FULL)[1].factor == 8.0
    with pytest.raises(ValueError, match="rope_parameters of 'sliding_attention' must have rope_type='default'"):
        read({"rope_parameters": {FULL: {}, SLIDING: scaling}})
