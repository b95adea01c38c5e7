"""Mistral: LLaMA, where all layers may have a sliding window."""

import dataclasses
from typing import ClassVar

from liger_jax.models.core.config_fields import fixed_fields
from liger_jax.models.llama import LlamaConfig, LlamaForCausalLM


@dataclasses.dataclass(frozen=True)
class MistralConfig(LlamaConfig):
    """The architecture: `LlamaConfig`'s fields with Hugging Face's defaults for Mistral, and this.

    Args:
        sliding_window: to how many positions a position attends, including itself; `None` for all earlier positions.

    Example:
        >>> MistralConfig(num_hidden_layers=1).layer_types, MistralConfig(sliding_window=None).layer_types[0]
        (('sliding_attention',), 'full_attention')
    """

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096

    never: ClassVar[tuple[str, ...]] = ("attention_bias", "mlp_bias")


class MistralForCausalLM(LlamaForCausalLM):
    """Mistral with a language-model head and its loss; arguments and call are `CausalLM`'s, with a `MistralConfig`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = MistralConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        ...                        num_attention_heads=2, num_key_value_heads=1, sliding_window=4)
        >>> MistralForCausalLM(config, rngs=nnx.Rngs(0))(jnp.arange(8).reshape(1, 8)).logits.shape
        (1, 8, 32)
    """

    config_type = MistralConfig
    config_fixed = fixed_fields("mistral")
