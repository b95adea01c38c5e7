"""`nnx.tabulate` draws a model, scanned or not, and leaves the process as it was."""

import jax.numpy as jnp
import pytest
from flax import nnx

from liger_jax.models import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

SIZES = dict(vocab_size=32, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1)
LLAMA = LlamaForCausalLM, LlamaConfig(**SIZES, num_hidden_layers=2), {}


@pytest.mark.usefixtures("unchecked_types")  # a checker of annotations calls methods that nnx.tabulate replaces
@pytest.mark.parametrize(
    "family, config, options",
    [
        LLAMA,
        pytest.param(*LLAMA[:2], {"scan_layers": False}, marks=pytest.mark.full),
        # A pattern of 6 layers, and one that is left over.
        pytest.param(
            Gemma3ForCausalLM, Gemma3TextConfig(**SIZES, head_dim=8, num_hidden_layers=7), {}, marks=pytest.mark.full
        ),
    ],
    ids=["scanned", "unrolled", "left over"],
)
def test_a_model_is_tabulated(family, config, options):
    model, tokens = family(config, rngs=nnx.Rngs(0), **options), jnp.arange(8).reshape(1, 8)
    table = nnx.tabulate(model, tokens, depth=1, console_kwargs=dict(width=200, force_terminal=False))
    count = sum(x.size for x in nnx.to_flat_state(nnx.state(model, nnx.Param)).leaves)
    assert f"Total Parameters: {count:,}" in table and "float32[1,8,32]" in table
    assert list(nnx.List([3])) == [3] and model(tokens).logits.shape == (1, 8, 32)
