"""LLaMA 2 and 3 with NNX, from the blocks that all families share."""

from flax import nnx
from jaxtyping import Array, Float

from liger_jax.models.causal_lm import CausalLM
from liger_jax.models.core.blocks import Blocks
from liger_jax.models.core.config import LlamaConfig
from liger_jax.models.core.config_fields import fixed_fields
from liger_jax.models.core.experts import fed
from liger_jax.models.core.feed_forward import Aux


class LlamaLayer(nnx.Module):
    """h = x + attention(norm(x)), then h + mlp(norm(h)), where the feed-forward may be of experts."""

    def __init__(self, blocks: Blocks):
        self.input_layernorm = blocks.norm()
        self.self_attn = blocks.attention()
        self.post_attention_layernorm = blocks.norm()
        self.mlp = blocks.mlp()

    def __call__(self, x: Float[Array, "B T D"], *attention_inputs) -> tuple[Float[Array, "B T D"], Aux]:
        normed, x = self.input_layernorm.fork(x)
        attended = self.self_attn(normed, *attention_inputs)
        normed, x = self.post_attention_layernorm.add(attended, x)
        y, aux = fed(self.mlp, normed, attention_inputs[2])
        return x + y, aux


class LlamaForCausalLM(CausalLM):
    """LLaMA with a language-model head and its loss; arguments and call are `CausalLM`'s, with a `LlamaConfig`.

    Example:
        >>> import jax.numpy as jnp
        >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        ...                      num_attention_heads=2)
        >>> model = LlamaForCausalLM(config, rngs=nnx.Rngs(0))
        >>> tokens = jnp.arange(8).reshape(1, 8)
        >>> model(tokens, labels=tokens).loss.shape, model(tokens, logits_to_keep=1).logits.shape
        ((), (1, 1, 32))
    """

    layer = LlamaLayer
    config_type = LlamaConfig
    config_fixed = fixed_fields("llama")
