"""The architecture of a LLaMA."""

import dataclasses
from typing import ClassVar

from liger_jax.ops import RopeScaling


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The architecture, in Hugging Face's field names.

    Args:
        vocab_size: V.
        hidden_size: D.
        intermediate_size: F.
        num_hidden_layers: L.
        num_attention_heads: Q.
        num_key_value_heads: K, a divisor of Q; `None` for Q.
        head_dim: H, even; `None` for D/Q.
        max_position_embeddings: the longest sequence that the model takes, but for what `rope_scaling` adds.
        rms_norm_eps: added to the mean square in every norm.
        rope_theta: the rotary embedding's base.
        rope_scaling: how it reaches contexts longer than in training: a `LinearRope`, `DynamicRope`, `Llama3Rope` or
            `YarnRope`, or `None`.
        tie_word_embeddings: the head is the embedding.
        initializer_range: standard deviation of the initial weights.

    Raises:
        ValueError: sizes that do not fit together.

    Example:
        >>> LlamaConfig(hidden_size=64, num_attention_heads=4).head_dim
        16
    """

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02

    # What other families have otherwise, as constants or as fields of their configs.
    qkv_bias: ClassVar[bool] = False
    qk_norm: ClassVar[bool] = False
    norm_offset: ClassVar[float] = 0.0
    norm_casting_mode: ClassVar[str] = "llama"
    gate: ClassVar[str] = "silu"
    embedding_scale: ClassVar[float | None] = None
    attention_scale: ClassVar[float | None] = None  # 1/√H
    attn_logit_softcapping: ClassVar[float | None] = None
    final_logit_softcapping: ClassVar[float | None] = None
    sliding_window: ClassVar[int | None] = None
    layer_types: ClassVar[tuple[str, ...] | None] = None  # of each layer; never None in an instance

    @property
    def longest_sequence(self) -> int:
        """How many positions the model takes: `max_position_embeddings`, or as many as its `rope_scaling` reaches.

        A scaling reaches its factor times the length in training, which is `max_position_embeddings` where the scaling
        does not say it.
        """
        scaling, most = self.rope_scaling, self.max_position_embeddings
        if scaling is None:
            return most
        in_training = getattr(scaling, "original_max_position_embeddings", most)
        return max(most, int(scaling.factor * in_training))

    def type_of_layer(self, i: int) -> str:
        """The type of a layer of which no `layer_types` says it.

        Args:
            i: the layer's number.

        Returns:
            The type, "full_attention" or "sliding_attention".
        """
        return "full_attention"

    def window_of(self, layer_type: str) -> int | None:
        """How many positions a layer sees, its own included.

        Args:
            layer_type: the layer's.

        Returns:
            A number, or `None` for all before it.
        """
        return self.sliding_window if layer_type == "sliding_attention" else None

    def rope_of(self, layer_type: str) -> tuple[float, RopeScaling | None]:
        """The rotary embedding of a layer.

        Args:
            layer_type: the layer's.

        Returns:
            Its base and its scaling.
        """
        return self.rope_theta, self.rope_scaling

    def __post_init__(self):
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        for name in (*sizes, "num_key_value_heads", "head_dim", "max_position_embeddings"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{type(self).__name__}: {name}={size} must be at least 1.")
        kv_heads = self.num_key_value_heads or self.num_attention_heads
        if self.num_attention_heads % kv_heads:
            raise ValueError(
                f"{type(self).__name__}: num_key_value_heads={kv_heads} must divide "
                f"num_attention_heads={self.num_attention_heads}, since query heads share key heads evenly."
            )
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"{type(self).__name__}: num_attention_heads={self.num_attention_heads} must divide "
                f"hidden_size={self.hidden_size}. Otherwise pass head_dim."
            )
        head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        if head_dim % 2:
            raise ValueError(f"{type(self).__name__}: head_dim={head_dim} must be even: RoPE rotates halves of a head.")
        object.__setattr__(self, "num_key_value_heads", kv_heads)
        object.__setattr__(self, "head_dim", head_dim)
        self._set_layer_types()

    def _set_layer_types(self):
        name, num_layers = type(self).__name__, self.num_hidden_layers
        types = tuple(self.layer_types or map(self.type_of_layer, range(num_layers)))
        if len(types) != num_layers or not set(types) <= {"full_attention", "sliding_attention"}:
            raise ValueError(
                f"{name}: layer_types={types} must be a 'full_attention' or 'sliding_attention' for each of "
                f"num_hidden_layers={num_layers}. Pass None for the family's own."
            )
        if "sliding_attention" in types and (self.sliding_window is None or self.sliding_window < 1):
            raise ValueError(f"{name}: sliding_window={self.sliding_window} must be positive, since layers slide.")
        object.__setattr__(self, "layer_types", types)
