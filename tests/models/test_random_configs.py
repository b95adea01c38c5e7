"""Random configs of every family, saved by us and read by transformers, and back: the logits are equal."""

import dataclasses
import importlib

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from liger_jax.models import AutoModelForCausalLM
from liger_jax.ops import DynamicRope, LinearRope, Llama3Rope, LongRope, ProportionalRope, YarnRope
from tests.models.test_configs import FAMILIES, FULL, SLIDING
from tests.models.test_parity import live, relative

LENGTH = 20  # more than many scalings' length in training
# A rounding may send a token to other experts, after which logits differ. So models are drawn until every token's
# choice is clear: what it chose last and what it did not choose have logits that differ by this part of the largest.
CLEAR = 1e-4
NOT_IN_TRANSFORMERS = {"router_z_loss_coef", "logit_scale"}  # the second but in Granite
each_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def sizes(rng) -> dict:
    """Widths that divide as transformers asks it of some families."""
    heads = int(rng.integers(1, 5))
    return dict(
        vocab_size=int(rng.integers(10, 40)),
        hidden_size=heads * int(rng.choice([4, 6, 8])),
        intermediate_size=int(rng.integers(8, 30)),
        num_hidden_layers=int(rng.integers(1, 4)),
        num_attention_heads=heads,
        num_key_value_heads=int(rng.choice([n for n in range(1, heads + 1) if heads % n == 0])),
        head_dim=int(rng.choice([4, 6, 10])) if rng.random() < 0.7 else None,
        max_position_embeddings=int(rng.integers(LENGTH, 64)),
        initializer_range=float(rng.uniform(0.1, 0.4)),
        tie_word_embeddings=bool(rng.integers(2)),
        rms_norm_eps=float(10 ** rng.uniform(-8, -1)),
        rope_theta=float(rng.uniform(10, 10_000)),
    )


def scaling(rng, family, width):
    """No scaling, or one of any type, with any of its fields, for heads of which so many columns are rotated."""
    factor, original = float(rng.uniform(1, 8)), int(rng.integers(4, 40))
    maybe = lambda value: value if rng.random() < 0.5 else None
    yarn = dict(
        beta_fast=float(rng.uniform(8, 40)),
        beta_slow=float(rng.uniform(0.5, 4)),
        attention_factor=maybe(float(rng.uniform(0.5, 1.5))),
        mscale=maybe(float(rng.uniform(0.5, 1.5))),
        mscale_all_dim=maybe(float(rng.uniform(0.5, 1.5))),
        truncate=family.config_type.scales_full_layers or bool(rng.integers(2)),  # transformers then always truncates
    )
    low = float(rng.uniform(0.5, 2))
    factors = lambda: tuple(map(float, rng.uniform(1, 5, width // 2)))
    choices = [
        None,
        LinearRope(factor),
        DynamicRope(factor, original),
        Llama3Rope(factor, low, low + float(rng.uniform(0.5, 4)), original),
        YarnRope(factor, original, **yarn),
        LongRope(factors(), factors(), factor, original, maybe(float(rng.uniform(0.5, 1.5)))),
    ]
    choices = [choices[0], choices[-1]] if "Phi3" in family.__name__ else choices
    choices = [None, ProportionalRope(float(rng.uniform(0, 1)), factor)] if "Gemma4" in family.__name__ else choices
    choices = [choices[4]] if "Ministral3" in family.__name__ else choices
    return choices[rng.integers(len(choices))]


def of_experts(rng, layers):
    """The fields of a mixture; the last layer has experts in any case."""
    count = int(rng.integers(1, 9))
    return dict(
        num_experts=count,
        num_local_experts=count,
        num_experts_per_tok=int(rng.integers(1, count + 1)),
        moe_intermediate_size=int(rng.integers(4, 20)),
        norm_topk_prob=bool(rng.integers(2)),
        decoder_sparse_step=int(rng.choice([n for n in (1, 2, 3) if layers % n == 0])),
        mlp_only_layers=tuple(int(i) for i in range(layers - 1) if rng.random() < 0.3),
        output_router_logits=bool(rng.integers(2)),
        router_aux_loss_coef=float(rng.uniform(0, 1)),
    )


def of_linear_attention(rng):
    heads = int(rng.integers(1, 3))
    return dict(
        full_attention_interval=int(rng.integers(1, 4)),
        linear_num_key_heads=heads,
        linear_num_value_heads=heads * int(rng.integers(1, 3)),
        linear_key_head_dim=int(rng.integers(1, 9)),
        linear_value_head_dim=int(rng.integers(1, 9)),
        linear_conv_kernel_dim=int(rng.integers(1, 5)),
        linear_allow_neg_eigval=bool(rng.integers(2)),
        linear_a_log_min=float(rng.uniform(0, 1)),
        linear_a_log_max=float(rng.uniform(2, 9)),
        linear_dt_min=1e-3,
        linear_dt_max=1e-1,
        linear_dt_init_floor=1e-4,
        shared_expert_intermediate_size=int(rng.integers(4, 20)),
    )


def of_convolutions(rng, layers):
    return dict(
        conv_bias=bool(rng.integers(2)),
        conv_L_cache=int(rng.integers(1, 5)),
        block_multiple_of=int(rng.integers(1, 9)),
        block_ffn_dim_multiplier=float(rng.uniform(0.5, 2)),
        block_auto_adjust_ff_dim=bool(rng.integers(2)),
        full_attn_idxs=tuple(range(0, layers, 2)) if rng.random() < 0.5 else None,
    )


def of_gemma_4(rng, fields):
    """The fields of layers that differ; of each type of layers, one is before those that share keys."""
    layers, heads = fields["num_hidden_layers"], fields["num_attention_heads"]
    types = (*map(str, rng.choice([FULL, SLIDING], layers - 1)), FULL)
    first = max(map(types.index, types)) + 1
    shared = int(rng.integers(0, layers - first + 1))
    return dict(
        layer_types=types,
        num_kv_shared_layers=shared,
        use_double_wide_mlp=bool(rng.integers(2)),
        attention_k_eq_v=bool(rng.integers(2)),
        global_head_dim=int(rng.choice([4, 8, 10])),
        num_global_key_value_heads=int(rng.choice([n for n in range(1, heads + 1) if heads % n == 0])),
        hidden_size_per_layer_input=int(rng.choice([4, 5])) if shared or rng.integers(2) else 0,
        vocab_size_per_layer_input=fields["vocab_size"],
    )


def is_clear(router_logits, per_token):
    """Whether no rounding changes what the tokens choose, by all layers' logits."""
    for logits in router_logits:
        falling = -np.sort(-np.asarray(logits, np.float64), axis=-1)
        if per_token < falling.shape[-1]:
            gaps = falling[..., per_token - 1] - falling[..., per_token]
            if gaps.min() < CLEAR * np.abs(falling).max():
                return False
    return True


def drawn(rng, family):
    """A random config of the family."""
    fields = sizes(rng)
    if "Olmoe" in family.__name__ or "OlmoHybrid" in family.__name__:  # which know no other width of heads
        fields["head_dim"] = None
    if "OlmoHybrid" in family.__name__:  # transformers wants layers of both types
        fields["num_hidden_layers"] += 1
    for name in {*family.config_type.never} & fields.keys():
        del fields[name]
    width, part = fields["head_dim"] or fields["hidden_size"] // fields["num_attention_heads"], 1.0
    if "Glm4" in family.__name__:
        width = fields["head_dim"] = int(rng.choice([4, 8, 12]))
        part = float(rng.choice([n / width for n in range(2, width + 1, 2)]))
    if "Phi3" in family.__name__:
        width, fields["head_dim"] = fields["hidden_size"] // fields["num_attention_heads"], None
        part = 0.5 if width % 4 == 0 and rng.random() < 0.7 else 1.0
    fields["rope_scaling"] = scaling(rng, family, int(width * part))
    layers = fields["num_hidden_layers"]
    own = dict(
        sliding_window=int(rng.integers(2, 12)),
        use_sliding_window=bool(rng.integers(2)),
        max_window_layers=int(rng.integers(0, 4)),
        layer_types=tuple(map(str, rng.choice([FULL, SLIDING], layers))) if rng.random() < 0.6 else None,
        query_pre_attn_scalar=int(rng.integers(1, 40)) * (1.0 if rng.random() < 0.5 else 1),
        attn_logit_softcapping=float(rng.uniform(1, 10)) if rng.random() < 0.5 else None,
        final_logit_softcapping=float(rng.uniform(1, 10)) if rng.random() < 0.5 else None,
        sliding_window_pattern=int(rng.integers(1, 4)),
        no_rope_layers=tuple(map(int, rng.integers(0, 2, layers))) if rng.random() < 0.6 else None,
        no_rope_layer_interval=int(rng.integers(1, 4)),
        partial_rotary_factor=part,
        rope_local_base_freq=float(rng.uniform(10, 10_000)),
        attention_bias=bool(rng.integers(2)),
        mlp_bias=bool(rng.integers(2)),
        embedding_multiplier=float(rng.uniform(0.3, 12)),
        attention_multiplier=float(rng.uniform(0.1, 1)),
        residual_multiplier=float(rng.uniform(0.1, 1)),
        llama_4_scaling_beta=float(rng.uniform(0, 1)),
    )
    own |= of_experts(rng, layers)
    if "Gemma4" in family.__name__:
        own |= of_gemma_4(rng, fields)
    own |= {name: None if name == "intermediate_size" else False for name in family.config_type.never}
    if family.config_type.known_types[0] in ("linear_attention", "conv"):
        types = map(str, rng.choice(family.config_type.known_types, layers - 1))
        own["layer_types"] = (*types, FULL)  # without keys transformers' cache has no length
        own |= of_linear_attention(rng) | of_convolutions(rng, layers)
    if "OlmoHybrid" in family.__name__:
        own["layer_types"] = None
    if "Qwen3Moe" in family.__name__:
        own["layer_types"] = None  # transformers does not read them in this family: all layers slide, or none
    if "Gemma3" in family.__name__:
        own["attn_logit_softcapping"] = None  # transformers reads it and does not apply it
    if family.__name__.startswith(("Mistral", "Ministral3", "Phi3")) and rng.random() < 0.3:
        own["sliding_window"] = None
    if "Exaone4" in family.__name__ and rng.random() < 0.3:
        own["sliding_window"] = own["layer_types"] = None
    if family.config_type.divides_logits:
        own["logit_scale"] = float(rng.uniform(0.1, 2))
    names = {field.name for field in dataclasses.fields(family.config_type)}
    assert names - fields.keys() - own.keys() == (NOT_IN_TRANSFORMERS & names) - own.keys()
    return family.config_type(**fields, **{name: value for name, value in own.items() if name in names})


@live
@pytest.mark.parametrize("draw", range(2))
@each_family
def test_transformers_computes_the_same_with_a_random_config_both_ways(family, draw, rng, tmp_path):
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    config = drawn(rng, family)
    kinds = {config.feed_forward_of(i) for i in range(config.num_hidden_layers)}
    scan = bool(draw % 2) and len(kinds) == 1
    tokens = rng.integers(0, config.vocab_size, (2, LENGTH))
    logits = nnx.jit(lambda model: model(jnp.asarray(tokens, jnp.int32)).logits)
    asked, options = {}, dict(attn_implementation="eager")
    if config.experts is not None:  # torch's grouped products need rows of multiples of 16 bytes
        asked, options = dict(output_router_logits=True), options | dict(experts_implementation="eager")

    def models(folder):
        """Our model of random numbers, transformers' of its files, and what that computes."""
        model = family(config, scan_layers=scan, rngs=nnx.Rngs(int(rng.integers(2**31))))
        for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param)):
            if path[-1] in ("scale", "bias", "sinks", "A_log", "layer_scalar") or str(path[-1]).endswith("_bias"):
                parameter[...] += jnp.asarray(rng.normal(0, 0.3, parameter.shape), jnp.float32)
        # Some families' padding token in transformers is beyond these vocabularies.
        model.save_pretrained(folder, config_fields={"pad_token_id": None})
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()
        ids = torch.from_numpy(tokens)
        with torch.no_grad():
            return model, theirs, theirs(input_ids=ids, labels=ids, **asked)

    model, theirs, found = models(tmp_path / "ours")
    while config.experts is not None and not is_clear(found.router_logits, config.experts.per_token):
        model, theirs, found = models(tmp_path / "ours")
    truth = found.logits.numpy()
    assert relative(logits(model), truth) < 1e-4, config
    if config.experts is not None:
        model.config = dataclasses.replace(config, output_router_logits=True)
        ids = jnp.asarray(tokens, jnp.int32)
        out = nnx.jit(lambda model: model(ids, labels=ids, return_metrics=True))(model)
        np.testing.assert_allclose(out.experts.balancing_loss, found.aux_loss, rtol=1e-4)
        np.testing.assert_allclose(out.loss, found.loss, rtol=1e-4)

    theirs.save_pretrained(tmp_path / "theirs")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", scan_layers=scan)
    assert relative(logits(again), truth) < 1e-4, config
