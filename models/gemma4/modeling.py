"""Gemma 4: Gemma 3 with inputs of each layer, keys that layers share, and wider heads in layers with full attention."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from liger_jax.models.causal_lm import CausalLM
from liger_jax.models.core.blocks import Blocks
from liger_jax.models.core.config_fields import short
from liger_jax.models.core.feed_forward import Aux
from liger_jax.models.core.layer_inputs import LayerInputsDecoder, LayerWithInput
from liger_jax.models.core.shared_keys import SharedKeysConfig, type_of
from liger_jax.models.core.stream import Stream
from liger_jax.models.core.wide_heads import WideHeadsConfig
from liger_jax.models.gemma.config import GemmaConfig
from liger_jax.ops import ProportionalRope, RopeScaling

_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True)
class Gemma4TextConfig(GemmaConfig, SharedKeysConfig, WideHeadsConfig):
    """The language model of Gemma 4: the fields of `LlamaConfig`, `SharedKeysConfig` and `WideHeadsConfig`, and these.

    Defaults are Hugging Face's. `rope_theta` and `rope_scaling` are those of layers with full attention.

    Args:
        hidden_size_per_layer_input: P: each layer has an additional input of P numbers per token, from a second
            embedding; 0 for none.
        vocab_size_per_layer_input: the vocabulary size of the second embedding.
        sliding_window: to how many positions a position attends in a sliding layer, including itself.
        layer_types: the type of each layer, "sliding_attention" or "full_attention", where the last layer must have
            full attention; `None` for full attention in every sixth layer and the last.
        rope_local_base_freq: the rotary embedding's base in sliding layers.
        final_logit_softcapping: bound of the logits; `None` for none.

    Raises:
        ValueError: as `LlamaConfig`; or the last layer has a window, or layers share keys and no layer of their type
            before them computes keys.

    Example:
        >>> config = Gemma4TextConfig(num_hidden_layers=12, num_kv_shared_layers=6)
        >>> config.attention_of(5), config.attention_of(6)
        ('full_attention_stored', 'sliding_attention_shared')
    """

    vocab_size: int = 262144
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 30
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 131072
    rope_theta: float = 1_000_000.0
    rope_scaling: RopeScaling | None = ProportionalRope(0.25)
    rope_local_base_freq: float = 10000.0
    sliding_window: int | None = 512
    layer_types: tuple[str, ...] | None = None
    final_logit_softcapping: float | None = None
    hidden_size_per_layer_input: int = 256
    vocab_size_per_layer_input: int = 262144

    norm_offset: ClassVar[float] = 0.0
    norms_results: ClassVar[bool] = True
    norms_values: ClassVar[bool] = True
    qk_norm: ClassVar[bool] = True
    attention_scale: ClassVar[float | None] = 1.0
    scales_full_layers: ClassVar[bool] = True
    nests_rope: ClassVar[bool] = True
    defaults_of_type: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "gemma4_unified_text": dict(hidden_size_per_layer_input=0, sliding_window=1024, max_position_embeddings=262144),
    }
    sliding_window_pattern: ClassVar[int | None] = 6

    def type_of_layer(self, i: int) -> str:
        """Every sixth layer and the last have full attention."""
        return _FULL if i == self.num_hidden_layers - 1 else super().type_of_layer(i)

    def rope_of(self, layer_type: str) -> tuple[float, RopeScaling | None] | None:
        """The rotary embedding's base and scaling in layers of this type."""
        return (self.rope_local_base_freq, None) if type_of(layer_type) == _SLIDING else super().rope_of(layer_type)

    def _misfits(self) -> Iterator[str]:
        yield from super()._misfits()
        if not isinstance(self.rope_scaling, ProportionalRope | None):
            yield f"rope_scaling={self.rope_scaling} must be a ProportionalRope or None"
        if self.layer_types and self.layer_types[-1] != _FULL:
            yield f"layer_types={short(self.layer_types)} must end with 'full_attention'"


class Gemma4Layer(LayerWithInput):
    """Gemma 2's layer, and then its own input and a factor of the whole."""

    def __init__(self, blocks: Blocks):
        self.input_layernorm = blocks.norm()
        self.self_attn = blocks.attention()
        self.post_attention_layernorm = blocks.norm()
        self.pre_feedforward_layernorm = blocks.norm()
        self.mlp = blocks.mlp()
        self.post_feedforward_layernorm = blocks.norm()
        self.type, self.is_stored = blocks.config.own_type, blocks.config.is_stored
        self.layer_scalar = nnx.Param(jnp.ones(1, blocks.param_dtype))
        self.make_input(blocks)

    def __call__(self, x: Stream, *attention_inputs) -> tuple[Stream, Aux]:
        hidden, own_inputs, keys = x
        normed, hidden = self.input_layernorm.fork(hidden)
        given = keys[self.type] if self.self_attn.owner is not None else None
        attended, own_keys = self.self_attn.with_keys(normed, *attention_inputs, given=given)
        normed, hidden = self.pre_feedforward_layernorm.add(self.post_attention_layernorm(attended), hidden)
        fed, aux = self.mlp(normed)
        hidden = self.add_input(hidden + self.post_feedforward_layernorm(fed), own_inputs, self.mlp.gated)
        hidden = hidden * jax.lax.stop_gradient(self.layer_scalar[0]).astype(hidden.dtype)  # which nobody trains
        return Stream(hidden, own_inputs[1:], keys | ({self.type: own_keys} if self.is_stored else {})), aux


class Gemma4ForCausalLM(CausalLM):
    """Gemma 4 with a language-model head and its loss; arguments and call are `CausalLM`'s, with a `Gemma4TextConfig`.

    Its layers differ, so they are always unrolled, whatever `scan_layers` says.

    Example:
        >>> import jax.numpy as jnp
        >>> config = Gemma4TextConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        ...                           num_attention_heads=2, num_key_value_heads=1, head_dim=4, global_head_dim=8,
        ...                           hidden_size_per_layer_input=4, vocab_size_per_layer_input=32, sliding_window=4)
        >>> Gemma4ForCausalLM(config, rngs=nnx.Rngs(0))(jnp.arange(8).reshape(1, 8)).logits.shape
        (1, 8, 32)
    """

    layer = Gemma4Layer
    decoder = LayerInputsDecoder
    config_type = Gemma4TextConfig
    config_fixed = {
        "model_type": ("gemma4_text", "gemma4_unified_text"),
        "hidden_activation": ("gelu_pytorch_tanh",),
        "enable_moe_block": (False, None),
        "use_bidirectional_attention": (None, "vision"),
        "is_causal": (None, True),
    }
