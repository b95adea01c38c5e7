"""Phi-3: LongRoPE in config.json and in generation, and adapters and codes of fused projections."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from liger_jax.models import AutoModelForCausalLM, Phi3Config, Phi3ForCausalLM, stream
from liger_jax.models.hugging_face import config_json
from liger_jax.models.lora import add_lora, load_adapters, save_adapters
from liger_jax.models.quantized import dequantize, quantize
from liger_jax.ops import LongRope
from tests.models import _hugging_face as hugging_face
from tests.ops._oracle import first

SIZES = dict(
    vocab_size=13, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=16,
    num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.3,
)  # fmt: skip
FACTORS = dict(short_factor=[1.0, 1.5], long_factor=[2, 4.0])
LONG = LongRope((1.0, 1.5), (2.0, 4.0), factor=4.0, original_max_position_embeddings=8)


def tokens(start, end):
    return jnp.arange(start, end, dtype=jnp.int32)[None]


def read(**fields):
    return config_json.read(SIZES | fields, Phi3Config, Phi3ForCausalLM.config_fixed)


@pytest.fixture(scope="module")
def model():
    return Phi3ForCausalLM(Phi3Config(**SIZES, rope_scaling=LONG), rngs=nnx.Rngs(0))


# --- LongRoPE ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])  # as Phi-3's first files call it
def test_longrope_is_read_as_transformers_does(kind):
    config = Phi3Config(**SIZES, rope_scaling=LONG)
    assert read(original_max_position_embeddings=8, rope_scaling=FACTORS | {"type": kind}) == config
    parameters = FACTORS | dict(rope_type=kind, original_max_position_embeddings=8, rope_theta=7.0, factor=3.0)
    found = read(original_max_position_embeddings=8, rope_parameters=parameters)
    assert (found.rope_theta, found.rope_scaling.factor, found.longest_sequence) == (7.0, 3.0, 32)
    usual = read(rope_scaling=FACTORS | {"type": kind}).rope_scaling
    assert isinstance(usual, LongRope) and (usual.original_max_position_embeddings, usual.scale) == (4096, 1.0)
    with pytest.raises(ValueError, match="original_max_position_embeddings=4096 differs from rope_parameters's 8"):
        read(rope_parameters=parameters)


@pytest.mark.parametrize(
    ["fields", "message"],
    [
        (dict(rope_scaling=dict(type="linear", factor=2.0)), "rope_scaling=LinearRope.* must be a LongRope or None"),
        (
            dict(rope_scaling=dict(type="longrope", **FACTORS), head_dim=8),
            "has 2 factors, and must have one for each two",
        ),
        (dict(rope_scaling=dict(type="longrope", short_factor=[1.0, 1.0])), "lacks .'long_factor'"),
        (
            dict(rope_scaling=dict(type="longrope", **FACTORS | {"long_factor": [0, 1]})),
            "long_factor=.0, 1. must be a list",
        ),
        (dict(partial_rotary_factor=0.25), "partial_rotary_factor=0.25 must be at most 1 and rotate an even number"),
        (dict(partial_rotary_factor=1.5), "partial_rotary_factor=1.5 must be at most 1"),
    ],
)
def test_what_does_not_fit_is_refused(fields, message):
    with pytest.raises(ValueError, match=f"Phi3Config cannot be read .*{message}"):
        read(**fields)


def test_a_text_that_grows_beyond_the_length_in_training_is_hugging_face_s():
    folder, expected = hugging_face.committed("phi3")
    prompts = jnp.asarray(expected.tokens[:, : hugging_face.PROMPT.shape[1]], jnp.int32)
    model = AutoModelForCausalLM.from_pretrained(folder)
    at, length = model.config.rope_changes_at, prompts.shape[1] + expected.greedy.shape[1]
    assert prompts.shape[1] < at < length
    options: Any = dict(attention_mask=jnp.asarray(hugging_face.PROMPT), eos_token_id=())
    options |= dict(max_new_tokens=length - prompts.shape[1])
    np.testing.assert_array_equal(model.generate(prompts, **options)[:, prompts.shape[1] :], expected.greedy)
    np.testing.assert_array_equal(np.stack([*stream(model, prompts, **options)], axis=1), expected.greedy)


@pytest.mark.parametrize("rows", first(1, [slice(1, 2), slice(0, 1)]), ids=["padded", "whole"])
def test_each_new_token_is_the_likeliest_after_all_tokens_before_it(model, rows, rng):
    """By forwards over all of them, which are beyond the length in training from the ninth token on."""
    mask = np.array([[1] * 5, [0, 1, 1, 1, 1]], bool)[rows]
    prompts = rng.integers(0, 13, mask.shape)
    out = np.asarray(model.generate(jnp.asarray(prompts), attention_mask=jnp.asarray(mask), max_new_tokens=6))
    text, logits = out[0][np.append(mask[0], [True] * 6)], nnx.jit(lambda model, tokens: model(tokens).logits[0, -1])
    for place in range(mask.sum(), len(text)):
        scores = logits(model, jnp.asarray(text[None, :place], jnp.int32))
        assert scores[text[place]] >= scores.max() - 1e-4 * np.abs(scores).max()


def test_keys_that_were_turned_otherwise_are_never_mixed(model):
    prompt, later = tokens(0, 7), tokens(7, 9)
    call = nnx.jit(lambda model, tokens, cache: model(tokens, cache=cache))
    cache = call(model, prompt, model.init_cache(1, 12)).cache
    inside = call(model, later[:, :1], cache)
    assert np.isfinite(inside.logits).all()
    with pytest.raises(
        ValueError, match="cache holds keys of 8 positions, and with 9, .* rope_scaling rotates all of them"
    ):
        model(later[:, 1:], cache=inside.cache)
    assert np.isnan(call(model, later, cache).logits).all()


# --- fused projections ------------------------------------------------------------------------------------------------


def test_adapters_are_on_the_fused_projections_by_default(tmp_path):
    make = lambda: Phi3ForCausalLM(Phi3Config(**SIZES), rngs=nnx.Rngs(0))
    adapted = add_lora(make(), 2, alpha=4, rngs=nnx.Rngs(1))
    adapted.model.layers.mlp.gate_up_proj.lora_b[...] += 0.1
    save_adapters(adapted, tmp_path)
    config = config_json.load(tmp_path / "adapter_config.json")
    assert config["target_modules"] == ["down_proj", "gate_up_proj", "o_proj", "qkv_proj"]
    logits = adapted(tokens(0, 12)).logits
    assert np.abs(logits - make()(tokens(0, 12)).logits).max() > 0.01
    np.testing.assert_array_equal(load_adapters(make(), tmp_path)(tokens(0, 12)).logits, logits)


@pytest.mark.parametrize("case", first(1, [("nf4", "full"), ("nf4", "none"), ("int8", "full")]), ids=str)
def test_codes_of_fused_projections_compute_what_they_say(case):
    kind, remat = case
    make = lambda: Phi3ForCausalLM(Phi3Config(**SIZES), remat=remat, rngs=nnx.Rngs(0))
    coded = quantize(make(), kind)
    loss = nnx.jit(lambda model: model(tokens(0, 12), labels=tokens(0, 12)).loss)
    found, whole = loss(coded), loss(make())
    np.testing.assert_allclose(found, loss(dequantize(coded)), rtol=1e-6)
    assert abs(found - whole) > 1e-4 * whole
