"""The architectures of Gemma 1, 2 and 3."""

import dataclasses
import math
from typing import ClassVar

from liger_jax.models.core.config import LlamaConfig
from liger_jax.ops import RopeScaling


@dataclasses.dataclass(frozen=True)
class GemmaConfig(LlamaConfig):
    """Gemma: `LlamaConfig`'s fields with Hugging Face's defaults for Gemma.

    Example:
        >>> GemmaConfig().head_dim, GemmaConfig(hidden_size=2048, num_attention_heads=8).embedding_scale
        (256, 45.254833995939045)
    """

    vocab_size: int = 256000
    hidden_size: int = 3072
    intermediate_size: int = 24576
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    head_dim: int | None = 256
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True

    never: ClassVar[tuple[str, ...]] = ("mlp_bias",)
    norm_offset: ClassVar[float] = 1.0
    norm_casting_mode: ClassVar[str] = "gemma"
    gate: ClassVar[str] = "gelu_tanh"

    @property
    def embedding_scale(self) -> float:
        """√D, by which embeddings are multiplied."""
        return math.sqrt(self.hidden_size)


@dataclasses.dataclass(frozen=True)
class Gemma2Config(GemmaConfig):
    """Gemma 2: `LlamaConfig`'s fields with Hugging Face's defaults for Gemma 2, and these.

    Args:
        query_pre_attn_scalar: attention scores are divided by its root.
        sliding_window: to how many positions a position attends in a sliding layer, including itself.
        layer_types: the type of each layer, "sliding_attention" or "full_attention"; `None` for alternating types.
        attn_logit_softcapping: bound of the attention scores; `None` for none.
        final_logit_softcapping: bound of the logits; `None` for none.

    Example:
        >>> Gemma2Config(num_hidden_layers=3).layer_types
        ('sliding_attention', 'full_attention', 'sliding_attention')
    """

    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    query_pre_attn_scalar: int | float = 256
    sliding_window: int | None = 4096
    layer_types: tuple[str, ...] | None = None
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0

    norms_results: ClassVar[bool] = True
    sliding_window_pattern: ClassVar[int] = 2

    @property
    def attention_scale(self) -> float:
        """Factor of the attention scores."""
        return self.query_pre_attn_scalar**-0.5


@dataclasses.dataclass(frozen=True)
class Gemma3TextConfig(Gemma2Config):
    """The language model of Gemma 3: `Gemma2Config`'s fields with Hugging Face's defaults for Gemma 3, and these.

    `rope_theta` and `rope_scaling` belong to layers with full attention.

    Args:
        sliding_window_pattern: n: every nth layer has full attention, and the others have windows. `layer_types`, if
            given, takes precedence.
        rope_local_base_freq: the rotary embedding's base in sliding layers.

    Example:
        >>> Gemma3TextConfig().layer_types.index("full_attention")
        5
    """

    vocab_size: int = 262208
    max_position_embeddings: int = 131072
    rope_theta: float = 1_000_000.0
    rope_local_base_freq: float = 10000.0
    sliding_window_pattern: int = 6
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None

    qk_norm: ClassVar[bool] = True
    scales_full_layers: ClassVar[bool] = True

    @property
    def longest_sequence(self) -> int:
        """`max_position_embeddings`: in Gemma 3 it includes what `rope_scaling` adds."""
        return self.max_position_embeddings

    def rope_of(self, layer_type: str) -> tuple[float, RopeScaling | None] | None:
        """The rotary embedding's base and scaling in layers of this type."""
        return (self.rope_local_base_freq, None) if layer_type == "sliding_attention" else super().rope_of(layer_type)
