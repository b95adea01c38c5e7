"""Qwen2 and Qwen2.5: LLaMA with biases in the projections to queries, keys and values, and perhaps sliding windows."""

import dataclasses
from typing import ClassVar

from liger_jax.models.core.config_fields import fixed_fields
from liger_jax.models.llama import LlamaConfig, LlamaForCausalLM


@dataclasses.dataclass(frozen=True)
class Qwen2Config(LlamaConfig):
    """The architecture: `LlamaConfig`'s fields with Hugging Face's defaults for Qwen2, and these.

    Args:
        use_sliding_window: whether some layers have windows, if `layer_types` is `None`.
        max_window_layers: the number of layers at the start that then have full attention; later layers have windows.
        sliding_window: to how many positions a position attends in a sliding layer, including itself.
        layer_types: the type of each layer, "full_attention" or "sliding_attention"; `None` for the fields above.

    Example:
        >>> Qwen2Config(hidden_size=896, num_attention_heads=14, num_key_value_heads=2).head_dim
        64
    """

    vocab_size: int = 151936
    intermediate_size: int = 22016
    max_position_embeddings: int = 32768
    use_sliding_window: bool = False
    max_window_layers: int = 28
    sliding_window: int | None = 4096
    layer_types: tuple[str, ...] | None = None

    qkv_bias: ClassVar[bool] = True
    never: ClassVar[tuple[str, ...]] = ("attention_bias", "mlp_bias")

    def type_of_layer(self, i: int) -> str:
        """Full attention in the first `max_window_layers`; later layers have windows if `use_sliding_window` is set."""
        slides = self.use_sliding_window and self.sliding_window and i >= self.max_window_layers
        return "sliding_attention" if slides else "full_attention"


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Qwen2 with a language-model head and its loss; arguments and call are `CausalLM`'s, with a `Qwen2Config`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        ...                      num_attention_heads=2)
        >>> Qwen2ForCausalLM(config, rngs=nnx.Rngs(0))(jnp.arange(8).reshape(1, 8)).logits.shape
        (1, 8, 32)
    """

    config_type = Qwen2Config
    config_fixed = fixed_fields("qwen2")
