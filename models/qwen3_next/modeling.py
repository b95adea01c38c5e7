"""Qwen3-Next: linear attention in three of four layers, gated attention in the others, and a mixture of experts."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from liger_jax.models.causal_lm import CausalLM
from liger_jax.models.core.attention import in_one_product
from liger_jax.models.core.blocks import Blocks
from liger_jax.models.core.config_fields import fixed_fields
from liger_jax.models.core.expert_config import SparseLayersConfig
from liger_jax.models.core.hybrid_layer import HybridLayer
from liger_jax.models.core.linear_attention import LINEAR, LinearAttention, Projected
from liger_jax.models.core.linear_attention_config import LinearAttentionConfig


@dataclasses.dataclass(frozen=True)
class GatedDeltaNetConfig(LinearAttentionConfig):
    """The fields that Qwen3-Next and Qwen3.5 share, beside `LinearAttentionConfig`'s, of which none is `None`.

    Args:
        partial_rotary_factor: the share of a head's columns that is rotated, the first ones.
        full_attention_interval: n: every nth layer has full attention, if `layer_types` is `None`.
    """

    hidden_size: int = 2048
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 2
    head_dim: int | None = 256
    max_position_embeddings: int = 32768
    partial_rotary_factor: float = 0.25
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    full_attention_interval: int = 4

    never: ClassVar[tuple[str, ...]] = ("mlp_bias",)
    qk_norm: ClassVar[bool] = True
    gates_attention: ClassVar[bool] = True
    norm_offset: ClassVar[float] = 1.0
    norm_casting_mode: ClassVar[str] = "gemma"

    def type_of_layer(self, i: int) -> str:
        """Every nth layer has full attention, and the others have linear attention."""
        return LINEAR if (i + 1) % self.full_attention_interval else "full_attention"


@dataclasses.dataclass(frozen=True)
class Qwen3NextConfig(GatedDeltaNetConfig, SparseLayersConfig):
    """The architecture: the fields of `GatedDeltaNetConfig` and `SparseLayersConfig`, and this one.

    Defaults are Hugging Face's for Qwen3-Next.

    Args:
        shared_expert_intermediate_size: the width of the shared expert, which every token goes to beside the others.

    Raises:
        ValueError: as `LlamaConfig`; or the number of value heads of linear attention is not a multiple of that of key
            heads, a token goes to more experts than there are, or no layer has experts.

    Example:
        >>> Qwen3NextConfig(num_hidden_layers=4).layer_types
        ('linear_attention', 'linear_attention', 'linear_attention', 'full_attention')
    """

    vocab_size: int = 151936
    intermediate_size: int = 5632
    num_hidden_layers: int = 48
    shared_expert_intermediate_size: int = 512
    num_experts_per_tok: int = 10
    num_experts: int = 512


class Qwen3NextLinearAttention(LinearAttention):
    """Linear attention whose projections are in the order of the heads of keys: each head's q, k, v and z together."""

    def __init__(self, blocks: Blocks):
        super().__init__(blocks)
        heads, width = self.heads, blocks.config.hidden_size
        self.in_proj_qkvz = blocks.linear(width, heads.channels + heads.values)
        self.in_proj_ba = blocks.linear(width, 2 * heads.value_heads)

    def projected(self, x: Float[Array, "B T D"]) -> Projected:
        """What the projections give of x, in the order of q, k, v and z."""
        layers = self.in_proj_qkvz, self.in_proj_ba
        of_heads = self.over_tokens(lambda layers, x: in_one_product(x, *layers), layers, x)
        qkvz, ba = (y.reshape(*y.shape[:2], self.heads.key_heads, -1) for y in of_heads)
        width, values = self.heads.key_width, self.heads.values // self.heads.key_heads
        pieces = jnp.split(qkvz, [width, 2 * width, 2 * width + values], axis=-1)
        q, k, v, z, b, a = (y.reshape(*y.shape[:2], -1) for y in (*pieces, *jnp.split(ba, 2, axis=-1)))
        return Projected(jnp.concatenate([q, k, v], axis=-1), z, b, a)


class Qwen3NextLayer(HybridLayer):
    """Linear attention or gated attention, and a feed-forward that may be of experts."""

    recurrent = Qwen3NextLinearAttention


class Qwen3NextForCausalLM(CausalLM):
    """Qwen3-Next with a language-model head and its loss; the call is `CausalLM`'s, with a `Qwen3NextConfig`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = Qwen3NextConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        ...                          head_dim=8, full_attention_interval=2, linear_num_key_heads=1,
        ...                          linear_num_value_heads=2, linear_key_head_dim=4, linear_value_head_dim=4,
        ...                          num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
        ...                          shared_expert_intermediate_size=8)
        >>> Qwen3NextForCausalLM(config, rngs=nnx.Rngs(0))(jnp.arange(8).reshape(1, 8)).logits.shape
        (1, 8, 32)
    """

    layer = Qwen3NextLayer
    config_type = Qwen3NextConfig
    config_fixed = fixed_fields("qwen3_next")
