"""Gemma 1, 2 and 3 with NNX, from the blocks that all families share.

All have embeddings times √D, norms that scale by 1 + w, and GeGLU. Gemma 2 and 3 have sliding windows; Gemma 2 has
softcaps of scores and logits; Gemma 3 has norms of queries and keys, and two bases of the rotary embedding.
"""

from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from liger_jax.models.causal_lm import CausalLM
from liger_jax.models.core.blocks import Blocks
from liger_jax.models.core.feed_forward import Aux
from liger_jax.models.gemma.config import Gemma2Config, Gemma3TextConfig, GemmaConfig
from liger_jax.models.llama.modeling import LlamaLayer

_GELU = "gelu_pytorch_tanh"
_ALL: dict[str, tuple[Any, ...]] = {"use_bidirectional_attention": (None, False), "is_causal": (None, True)}


class GemmaForCausalLM(CausalLM):
    """Gemma with a language-model head and its loss; arguments and call are `CausalLM`'s, with a `GemmaConfig`.

    Example:
        >>> import jax.numpy as jnp
        >>> config = GemmaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        ...                      num_attention_heads=2, head_dim=4)
        >>> GemmaForCausalLM(config, rngs=nnx.Rngs(0))(jnp.arange(8).reshape(1, 8)).logits.shape
        (1, 8, 32)
    """

    layer = LlamaLayer
    config_type = GemmaConfig
    # The first checkpoints say "gelu", and mean the tanh form.
    config_fixed = {"model_type": ("gemma",), "hidden_act": (_GELU, "gelu"), "hidden_activation": (_GELU, None), **_ALL}


class Gemma2Layer(nnx.Module):
    """h = x + norm(attention(norm(x))), then h + norm(mlp(norm(h)))."""

    def __init__(self, blocks: Blocks):
        self.input_layernorm = blocks.norm()
        self.self_attn = blocks.attention()
        self.post_attention_layernorm = blocks.norm()
        self.pre_feedforward_layernorm = blocks.norm()
        self.mlp = blocks.mlp()
        self.post_feedforward_layernorm = blocks.norm()

    def __call__(self, x: Float[Array, "B T D"], *attention_inputs) -> tuple[Float[Array, "B T D"], Aux]:
        normed, x = self.input_layernorm.fork(x)
        attended = self.post_attention_layernorm(self.self_attn(normed, *attention_inputs))
        normed, x = self.pre_feedforward_layernorm.add(attended, x)
        fed, aux = self.mlp(normed)
        return x + self.post_feedforward_layernorm(fed), aux


class Gemma2ForCausalLM(CausalLM):
    """Gemma 2 with a language-model head and its loss; arguments and call are `CausalLM`'s, with a `Gemma2Config`.

    Example:
        >>> import jax.numpy as jnp
        >>> config = Gemma2Config(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        ...                       num_attention_heads=2, num_key_value_heads=1, head_dim=4, sliding_window=4)
        >>> Gemma2ForCausalLM(config, rngs=nnx.Rngs(0))(jnp.arange(8).reshape(1, 8)).logits.shape
        (1, 8, 32)
    """

    layer = Gemma2Layer
    config_type = Gemma2Config
    config_fixed = {"model_type": ("gemma2",), "hidden_activation": (_GELU,), **_ALL}


class Gemma3ForCausalLM(CausalLM):
    """Gemma 3 with a language-model head and its loss; arguments and call are `CausalLM`'s, with a `Gemma3TextConfig`.

    Example:
        >>> import jax.numpy as jnp
        >>> config = Gemma3TextConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        ...                           num_attention_heads=2, num_key_value_heads=1, head_dim=4, sliding_window=4)
        >>> Gemma3ForCausalLM(config, rngs=nnx.Rngs(0))(jnp.arange(8).reshape(1, 8)).logits.shape
        (1, 8, 32)
    """

    layer = Gemma2Layer
    config_type = Gemma3TextConfig
    # Hugging Face reads the softcap and does not apply it.
    config_fixed = {
        "model_type": ("gemma3_text",), "hidden_activation": (_GELU,), "attn_logit_softcapping": (None,), **_ALL
    }  # fmt: skip
