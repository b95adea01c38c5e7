"""Qwen2 and Qwen2.5: LLaMA with biases in the projections to queries, keys and values."""

import dataclasses
from typing import ClassVar

from liger_jax.models.llama import LlamaConfig, LlamaForCausalLM
from liger_jax.models.qwen2.params import FIXED


@dataclasses.dataclass(frozen=True)
class Qwen2Config(LlamaConfig):
    """The architecture: `LlamaConfig`'s fields with Hugging Face's defaults for Qwen2, and no sliding windows.

    Example:
        >>> Qwen2Config(hidden_size=896, num_attention_heads=14, num_key_value_heads=2).head_dim
        64
    """

    vocab_size: int = 151936
    intermediate_size: int = 22016
    max_position_embeddings: int = 32768
    qkv_bias: ClassVar[bool] = True


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Qwen2 with a language-model head and its loss; arguments and call as `LlamaForCausalLM`'s.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        ...                      num_attention_heads=2)
        >>> Qwen2ForCausalLM(config, rngs=nnx.Rngs(0))(jnp.arange(8).reshape(1, 8)).logits.shape
        (1, 8, 32)
    """

    config_type = Qwen2Config
    config_fixed = FIXED
