"""EXAONE 4: norms after attention and feed-forward, of queries and keys, too, and rotations in sliding layers alone."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from liger_jax.models.causal_lm import CausalLM
from liger_jax.models.core.config_fields import MOST_LAYERS, fixed_fields, short
from liger_jax.models.llama import LlamaConfig
from liger_jax.models.olmo2.modeling import Olmo2Layer
from liger_jax.ops import RopeScaling


@dataclasses.dataclass(frozen=True)
class Exaone4Config(LlamaConfig):
    """The architecture: `LlamaConfig`'s fields with Hugging Face's defaults for EXAONE 4, and these.

    Args:
        sliding_window: to how many positions a position attends in a sliding layer, including itself. Layers with full
            attention then have no rotary embedding. `None` for full attention with rotary embeddings in all layers.
        layer_types: the type of each layer, "sliding_attention" or "full_attention"; `None` for full attention in every
            fourth layer and a window in the others.

    Example:
        >>> Exaone4Config().rope_of("full_attention"), Exaone4Config(sliding_window=None).rope_of("full_attention")
        (None, (10000.0, None))
    """

    vocab_size: int = 102400
    intermediate_size: int = 16384
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = 4096
    layer_types: tuple[str, ...] | None = None

    never: ClassVar[tuple[str, ...]] = ("attention_bias", "mlp_bias")
    qk_norm: ClassVar[bool] = True
    norms_results: ClassVar[bool] = True
    sliding_window_pattern: ClassVar[int] = 4

    @staticmethod
    def as_published(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """The fields of config.json, whose pattern, a number n or letters L and G, says the types that it lacks."""
        values, types = dict(values), values.get("layer_types")
        pattern, layers = values.pop("sliding_window_pattern", 4), values.get("num_hidden_layers", 32)
        if types or values.get("sliding_window", 4096) is None or type(layers) is not int:
            return values, []
        is_number = type(pattern) is int and pattern > 0
        if is_number:
            pattern = "L" * (min(pattern, layers + 1) - 1) + "G"  # the letters beyond the last layer say nothing
        if not (isinstance(pattern, str) and pattern and {*pattern} <= {*"LG"}):
            return values, [f"sliding_window_pattern={short(pattern)} must be a positive int, or letters L and G"]
        letters = [pattern[i % len(pattern)] for i in range(min(layers, MOST_LAYERS))]
        if not is_number and letters[-1:] == ["L"]:  # which transformers' code and its words treat in two ways
            return values, [
                f"sliding_window_pattern={short(pattern)} must end in G at the last layer; or give layer_types"
            ]
        of_letter = {"L": "sliding_attention", "G": "full_attention"}
        return values | {"layer_types": [of_letter[letter] for letter in letters]}, []

    def type_of_layer(self, i: int) -> str:
        """Full attention in every fourth layer, or in all layers without a window."""
        return "full_attention" if self.sliding_window is None else super().type_of_layer(i)

    def rope_of(self, layer_type: str) -> tuple[float, RopeScaling | None] | None:
        """The rotary embedding of layers with a window, or of all layers without a window."""
        rotates = self.sliding_window is None or layer_type == "sliding_attention"
        return super().rope_of(layer_type) if rotates else None


class Exaone4ForCausalLM(CausalLM):
    """EXAONE 4 with a language-model head and its loss; arguments and call are `CausalLM`'s, with an `Exaone4Config`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = Exaone4Config(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=4,
        ...                        num_attention_heads=2, sliding_window=4)
        >>> Exaone4ForCausalLM(config, rngs=nnx.Rngs(0))(jnp.arange(8).reshape(1, 8)).logits.shape
        (1, 8, 32)
    """

    layer = Olmo2Layer
    config_type = Exaone4Config
    config_fixed = fixed_fields("exaone4", sliding_window_pattern=(4,))  # which `layer_types` decides instead
