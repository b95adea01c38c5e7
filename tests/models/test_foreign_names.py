"""Names of transformers that are not ours: the error names ours."""

import copy

import jax.numpy as jnp
import pytest
from flax import nnx

from liger_jax.models import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_attention_heads=2)


@pytest.fixture(scope="module")
def model():
    return nnx.eval_shape(lambda: LlamaForCausalLM(CONFIG, rngs=nnx.Rngs(0)))


TOKENS = jnp.ones((1, 4), jnp.int32)


@pytest.mark.parametrize(
    "call, name, ours",
    [
        (lambda model, **named: model(TOKENS, **named), "position_ids", "positions"),
        (lambda model, **named: model(TOKENS, **named), "inputs_embeds", "input_ids"),
        (lambda model, **named: model.log_probs(TOKENS, **named), "output_hidden_states", "model.hidden_states"),
        (lambda model, **named: model.generate(TOKENS, **named), "do_sample", "temperature"),
        (lambda _, **named: LlamaForCausalLM(CONFIG, rngs=nnx.Rngs(0), **named), "torch_dtype", "param_dtype"),
        (lambda _, **named: LlamaForCausalLM.from_pretrained("no/folder", **named), "torch_dtype", "param_dtype"),
    ],
)
def test_an_argument_of_transformers_is_answered_with_ours(call, name, ours, model):
    with pytest.raises(TypeError, match=rf": {name} is the name in transformers\. Here .*{ours}"):
        call(model, **{name: 1})


def test_an_attribute_of_transformers_is_answered_with_ours(model):
    with pytest.raises(AttributeError, match=r"no attribute 'num_parameters', which is transformers'.*nnx.Param"):
        model.num_parameters()
    assert not hasattr(model, "num_parameters")


def test_other_unknown_names_get_pythons_own_error(model):
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        model(TOKENS, colour=1)
    with pytest.raises(AttributeError, match="no attribute 'colour'"):
        _ = model.colour
    assert copy.copy(model).config == CONFIG
