"""Random configs of every family, saved by us and read by transformers, and back: the logits are equal."""

import dataclasses
import importlib

import jax.numpy as jnp
import pytest
from flax import nnx

from liger_jax.models import AutoModelForCausalLM
from liger_jax.ops import DynamicRope, LinearRope, Llama3Rope, LongRope, YarnRope
from tests.models.test_configs import FAMILIES, FULL, SLIDING
from tests.models.test_parity import live, relative

LENGTH = 20  # more than many scalings' length in training
NOT_DRAWN = {"logit_scale"}  # which transformers lacks in these families
# A rounding may send a token to other experts, after which logits differ: families of experts have fixed checkpoints.
DENSE = {name: family for name, family in FAMILIES.items() if family.config_type().experts is None}
each_family = pytest.mark.parametrize("family", DENSE.values(), ids=DENSE)


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
        truncate="Gemma3" in family.__name__ or bool(rng.integers(2)),  # transformers always truncates Gemma 3's
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
    return choices[rng.integers(len(choices))]


def drawn(rng, family):
    """A random config of the family."""
    fields = sizes(rng)
    width, part = fields["head_dim"] or fields["hidden_size"] // fields["num_attention_heads"], 1.0
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
    )
    own |= dict.fromkeys(family.config_type.never, False)
    if "Gemma3" in family.__name__:
        own["attn_logit_softcapping"] = None  # transformers reads it and does not apply it
    if family.__name__.startswith(("Mistral", "Phi3")) and rng.random() < 0.3:
        own["sliding_window"] = None
    names = {field.name for field in dataclasses.fields(family.config_type)}
    assert names - fields.keys() - own.keys() == NOT_DRAWN
    return family.config_type(**fields, **{name: value for name, value in own.items() if name in names})


@live
@pytest.mark.parametrize("draw", range(2))
@each_family
def test_transformers_computes_the_same_with_a_random_config_both_ways(family, draw, rng, tmp_path):
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    config = drawn(rng, family)
    model = family(config, scan_layers=bool(draw % 2), rngs=nnx.Rngs(int(rng.integers(2**31))))
    for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if path[-1] in ("scale", "bias"):
            parameter[...] += jnp.asarray(rng.normal(0, 0.3, parameter.shape), jnp.float32)
    tokens = rng.integers(0, config.vocab_size, (2, LENGTH))
    logits = nnx.jit(lambda model: model(jnp.asarray(tokens, jnp.int32)).logits)

    # Some families' padding token in transformers is beyond these vocabularies.
    model.save_pretrained(tmp_path / "ours", config_fields={"pad_token_id": None})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    with torch.no_grad():
        truth = theirs(input_ids=torch.from_numpy(tokens)).logits.numpy()
    assert relative(logits(model), truth) < 1e-4, config

    theirs.save_pretrained(tmp_path / "theirs")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", scan_layers=bool(draw % 2))
    assert relative(logits(again), truth) < 1e-4, config
