"""LFM2: gated short convolutions in most layers, and attention in the others; its dense models."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import ClassVar

from liger_jax.models.causal_lm import CausalLM
from liger_jax.models.core.blocks import Blocks
from liger_jax.models.core.config_fields import fixed_fields
from liger_jax.models.core.feed_forward import DenseFeedForward
from liger_jax.models.core.gated_convolution import CONVOLUTION, GatedConvolution
from liger_jax.models.core.hybrid_layer import HybridLayer
from liger_jax.models.core.linear_attention import RecurrentSizes
from liger_jax.models.llama import LlamaConfig


@dataclasses.dataclass(frozen=True)
class Lfm2Config(LlamaConfig):
    """The architecture: `LlamaConfig`'s fields with Hugging Face's defaults for LFM2, and these.

    Args:
        intermediate_size: F, from which the width of the feed-forward follows if `block_auto_adjust_ff_dim`.
        rms_norm_eps: added to the mean square in every norm; config.json calls it `norm_eps`.
        conv_bias: whether the convolution and its projections add biases.
        conv_L_cache: the tokens that the convolution sees.
        block_multiple_of: what the adjusted width is rounded up to a multiple of.
        block_ffn_dim_multiplier: what 2/3 of `intermediate_size` is multiplied by before.
        block_auto_adjust_ff_dim: whether the width is adjusted.
        full_attn_idxs: the numbers of the layers with attention, if `layer_types` is `None`; `None` for all.
        layer_types: the type of each layer, "conv" or "full_attention".

    Raises:
        ValueError: as `LlamaConfig`; or the adjusted width is 0.

    Example:
        >>> Lfm2Config(num_hidden_layers=3, full_attn_idxs=(2,)).layer_types
        ('conv', 'conv', 'full_attention')
    """

    vocab_size: int = 65536
    hidden_size: int = 2560
    intermediate_size: int = 12288
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 128000
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1000000.0
    tie_word_embeddings: bool = True
    conv_bias: bool = False
    conv_L_cache: int = 3  # noqa: N815
    block_multiple_of: int = 256
    block_ffn_dim_multiplier: float = 1.0
    block_auto_adjust_ff_dim: bool = True
    full_attn_idxs: tuple[int, ...] | None = None
    layer_types: tuple[str, ...] | None = None

    never: ClassVar[tuple[str, ...]] = ("attention_bias", "mlp_bias")
    known_types: ClassVar[tuple[str, ...]] = (CONVOLUTION, "full_attention")
    names_in_files: ClassVar[Mapping[str, str]] = {"rms_norm_eps": "norm_eps"}
    older_names: ClassVar[Mapping[str, str]] = {
        "block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"
    }  # fmt: skip
    qk_norm: ClassVar[bool] = True
    qk_norm_names: ClassVar[tuple[str, str]] = ("q_layernorm", "k_layernorm")
    output_name: ClassVar[str] = "out_proj"
    last_norm_name: ClassVar[str] = "embedding_norm"

    @property
    def recurrent_sizes(self) -> RecurrentSizes:
        """What a convolution keeps for each row."""
        return RecurrentSizes(None, self.conv_L_cache, self.hidden_size)

    @property
    def feed_forward_width(self) -> int:
        """The width of the feed-forward: 2/3 of `intermediate_size`, rounded up, if it is adjusted."""
        if not self.block_auto_adjust_ff_dim:
            return self.intermediate_size
        width = int(self.block_ffn_dim_multiplier * int(2 * self.intermediate_size / 3))
        return -(-width // self.block_multiple_of) * self.block_multiple_of

    def type_of_layer(self, i: int) -> str:
        """The layers that `full_attn_idxs` names have attention, and the others a convolution."""
        has_attention = self.full_attn_idxs is None or i in self.full_attn_idxs
        return "full_attention" if has_attention else CONVOLUTION

    def _misfits(self) -> Iterator[str]:
        yield from super()._misfits()
        if self.feed_forward_width < 1:
            yield f"intermediate_size={self.intermediate_size} must be larger: the feed-forward has a width of 0"


class Lfm2FeedForward(DenseFeedForward):
    """The dense feed-forward by LFM2's names."""

    names = "w1", "w3", "w2"


class Lfm2Layer(HybridLayer):
    """A gated convolution or attention, and a dense feed-forward, by LFM2's names."""

    names = "operator_norm", "ffn_norm", "conv", "feed_forward"

    def recurrent(self, blocks: Blocks) -> GatedConvolution:
        """The gated convolution."""
        return GatedConvolution(blocks, blocks.config.conv_L_cache, use_bias=blocks.config.conv_bias)

    def feed_forward_of(self, blocks: Blocks) -> Lfm2FeedForward:
        """The feed-forward by its names."""
        return Lfm2FeedForward(blocks)


class Lfm2ForCausalLM(CausalLM):
    """LFM2 with a language-model head and its loss; the call is `CausalLM`'s, with an `Lfm2Config`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = Lfm2Config(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        ...                     num_key_value_heads=1, block_multiple_of=8, intermediate_size=24, full_attn_idxs=(1,))
        >>> Lfm2ForCausalLM(config, rngs=nnx.Rngs(0))(jnp.arange(8).reshape(1, 8)).logits.shape
        (1, 8, 32)
    """

    layer = Lfm2Layer
    config_type = Lfm2Config
    config_fixed = fixed_fields("lfm2")
