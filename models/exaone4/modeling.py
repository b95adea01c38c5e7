"""EXAONE 4: norms after attention and feed-forward, of queries and keys, too, and rotations in sliding layers alone."""

import dataclasses
from typing import ClassVar

from liger_jax.models.causal_lm import CausalLM
from liger_jax.models.core.config_fields import fixed_fields
from liger_jax.models.llama import LlamaConfig
from liger_jax.models.olmo2.modeling import Olmo2Layer
from liger_jax.ops import RopeScaling


@dataclasses.dataclass(frozen=True)
class Exaone4Config(LlamaConfig):
    """The architecture: `LlamaConfig`'s fields with Hugging Face's defaults for EXAONE 4, and these.

    Args:
        sliding_window: how many positions a position sees in a sliding layer, itself included. Layers with full
            attention then have no rotary embedding. `None` for a model whose layers all have full attention and rotate.
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

    def type_of_layer(self, i: int) -> str:
        """Full attention in every fourth layer, and in all without a window."""
        return "full_attention" if self.sliding_window is None else super().type_of_layer(i)

    def rope_of(self, layer_type: str) -> tuple[float, RopeScaling | None] | None:
        """The rotary embedding of layers that slide, and of all without a window."""
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
    # transformers computes `layer_types` from the pattern where a file lacks them, and writes 0 without a window.
    config_fixed = fixed_fields("exaone4", sliding_window_pattern=(4, "LLLG", 0, None))
