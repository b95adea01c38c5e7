"""OLMo 3: OLMo 2 with a sliding window in three of four layers, whose rotary embedding is never scaled."""

import dataclasses
from typing import ClassVar

from liger_jax.models.core.config_fields import fixed_fields
from liger_jax.models.olmo2 import Olmo2Config, Olmo2ForCausalLM
from liger_jax.ops import RopeScaling


@dataclasses.dataclass(frozen=True)
class Olmo3Config(Olmo2Config):
    """The architecture: `LlamaConfig`'s fields with Hugging Face's defaults for OLMo 3, and these.

    `rope_scaling` applies to layers with full attention.

    Args:
        sliding_window: to how many positions a position attends in a sliding layer, including itself.
        layer_types: the type of each layer, "sliding_attention" or "full_attention"; `None` for full attention in every
            fourth layer and a window in the others.
        rope_local_base_freq: the rotary embedding's base in sliding layers; `None` for `rope_theta`.

    Example:
        >>> Olmo3Config().layer_types.index("full_attention")
        3
    """

    rope_theta: float = 500_000.0
    sliding_window: int | None = 4096
    layer_types: tuple[str, ...] | None = None
    rope_local_base_freq: float | None = None

    scales_full_layers: ClassVar[bool] = True
    sliding_window_pattern: ClassVar[int] = 4

    def rope_of(self, layer_type: str) -> tuple[float, RopeScaling | None] | None:
        """The rotary embedding's base and scaling in layers of this type."""
        slides = layer_type == "sliding_attention"
        return (self.rope_local_base_freq or self.rope_theta, None) if slides else super().rope_of(layer_type)


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """OLMo 3 with a language-model head and its loss; arguments and call are `CausalLM`'s, with an `Olmo3Config`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = Olmo3Config(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=4,
        ...                      num_attention_heads=2, sliding_window=4)
        >>> Olmo3ForCausalLM(config, rngs=nnx.Rngs(0))(jnp.arange(8).reshape(1, 8)).logits.shape
        (1, 8, 32)
    """

    config_type = Olmo3Config
    config_fixed = fixed_fields("olmo3")
