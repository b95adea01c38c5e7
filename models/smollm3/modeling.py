"""SmolLM3: LLaMA, where some layers rotate no queries and keys, and these may have a sliding window."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from liger_jax.models.core.config_fields import fixed_fields
from liger_jax.models.llama import LlamaConfig, LlamaForCausalLM
from liger_jax.ops import RopeScaling

_WITHOUT_ROPE = "_without_rope"  # end of the name of an attention that does not rotate


@dataclasses.dataclass(frozen=True)
class SmolLM3Config(LlamaConfig):
    """The architecture: `LlamaConfig`'s fields with Hugging Face's defaults for SmolLM3, and these.

    Args:
        no_rope_layers: for each layer, 0 if it has no rotary embedding, and 1 if it has one; `None` for
            `no_rope_layer_interval`. It may be longer than there are layers.
        no_rope_layer_interval: n: every nth layer then has no rotary embedding.
        use_sliding_window: whether layers without a rotary embedding have windows, if `layer_types` is `None`.
        sliding_window: to how many positions a position attends in a sliding layer, including itself.
        layer_types: the type of each layer, "full_attention" or "sliding_attention"; `None` for the fields above.

    Example:
        >>> SmolLM3Config(num_hidden_layers=5).no_rope_layers
        (1, 1, 1, 0, 1)
    """

    vocab_size: int = 128256
    hidden_size: int = 2048
    num_hidden_layers: int = 36
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 32768
    rope_theta: float = 2_000_000.0
    tie_word_embeddings: bool = True
    use_sliding_window: bool = False
    sliding_window: int | None = None
    no_rope_layers: tuple[int, ...] | None = None
    no_rope_layer_interval: int = 4
    layer_types: tuple[str, ...] | None = None

    def __post_init__(self, _followed: Mapping[str, Any] | None):
        super().__post_init__(_followed)
        count = self.num_hidden_layers
        own = tuple(int((i + 1) % self.no_rope_layer_interval != 0) for i in range(count))
        if self.no_rope_layers is None or self.no_rope_layers[:count] == own:  # checkpoints spell them out
            followed = {**vars(self)["_followed"], "no_rope_layers": own}
            self._set(no_rope_layers=own, _followed=followed)

    def rotates(self, i: int) -> bool:
        """Whether a layer has a rotary embedding.

        Args:
            i: the layer's number.

        Returns:
            False for a layer that uses positions only in its mask.
        """
        if self.no_rope_layers is None:
            return (i + 1) % self.no_rope_layer_interval != 0
        return self.no_rope_layers[i : i + 1] != (0,)

    def type_of_layer(self, i: int) -> str:
        """Layers without a rotary embedding have windows if `use_sliding_window` is set and there is a window."""
        slides = self.use_sliding_window and self.sliding_window is not None and not self.rotates(i)
        return "sliding_attention" if slides else "full_attention"

    def attention_of(self, i: int) -> str:
        """The layer's type, with whether it has a rotary embedding."""
        return super().attention_of(i) + ("" if self.rotates(i) else _WITHOUT_ROPE)

    def window_of(self, layer_type: str) -> int | None:
        """The window of the layer's type."""
        return super().window_of(layer_type.removesuffix(_WITHOUT_ROPE))

    def rope_of(self, layer_type: str) -> tuple[float, RopeScaling | None] | None:
        """The rotary embedding of layers that have one."""
        return None if layer_type.endswith(_WITHOUT_ROPE) else super().rope_of(layer_type)

    def _misfits(self) -> Iterator[str]:
        yield from super()._misfits()
        rope, count = self.no_rope_layers, self.num_hidden_layers
        if rope is not None and len(rope) < count:
            yield f"no_rope_layers has {len(rope)} numbers, and must have one for each of num_hidden_layers={count}"


class SmolLM3ForCausalLM(LlamaForCausalLM):
    """SmolLM3 with a language-model head and its loss; arguments and call are `CausalLM`'s, with a `SmolLM3Config`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = SmolLM3Config(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=4,
        ...                        num_attention_heads=2, num_key_value_heads=1)
        >>> SmolLM3ForCausalLM(config, rngs=nnx.Rngs(0))(jnp.arange(8).reshape(1, 8)).logits.shape
        (1, 8, 32)
    """

    config_type = SmolLM3Config
    config_fixed = fixed_fields("smollm3")
