"""Qwen3.5's language models: Qwen3-Next with separate projections, dense or with a mixture of experts."""

import dataclasses
from typing import ClassVar

from jaxtyping import Array, Float

from liger_jax.models.causal_lm import CausalLM
from liger_jax.models.core.attention import in_one_product
from liger_jax.models.core.blocks import Blocks
from liger_jax.models.core.config_fields import fixed_fields
from liger_jax.models.core.expert_config import ExpertConfig
from liger_jax.models.core.hybrid_layer import HybridLayer
from liger_jax.models.core.linear_attention import LinearAttention, Projected
from liger_jax.models.qwen3_next.modeling import GatedDeltaNetConfig


@dataclasses.dataclass(frozen=True)
class Qwen3_5TextConfig(GatedDeltaNetConfig):
    """The architecture: `GatedDeltaNetConfig`'s fields with Hugging Face's defaults for Qwen3.5.

    Its rotary embedding has sections for images and videos, which all have the same positions for text.

    Raises:
        ValueError: as `LlamaConfig`; or the number of value heads of linear attention is not a multiple of that of key
            heads.

    Example:
        >>> Qwen3_5TextConfig(num_hidden_layers=4).layer_types
        ('linear_attention', 'linear_attention', 'linear_attention', 'full_attention')
    """

    vocab_size: int = 248320
    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_hidden_layers: int = 32
    num_key_value_heads: int | None = 4

    rope_sections: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class Qwen3_5MoeTextConfig(GatedDeltaNetConfig, ExpertConfig):
    """The architecture: the fields of `GatedDeltaNetConfig` and `ExpertConfig`, and this one.

    Defaults are Hugging Face's for Qwen3.5-MoE.

    Args:
        shared_expert_intermediate_size: the width of the shared expert, which every token goes to beside the others.

    Raises:
        ValueError: as `Qwen3_5TextConfig`; or a token goes to more experts than there are.

    Example:
        >>> Qwen3_5MoeTextConfig().experts.per_token
        8
    """

    vocab_size: int = 248320
    intermediate_size: int | None = None  # pyright: ignore[reportIncompatibleVariableOverride] -- no layer is dense
    num_hidden_layers: int = 40
    shared_expert_intermediate_size: int = 512
    num_experts: int = 256

    never: ClassVar[tuple[str, ...]] = ("mlp_bias", "intermediate_size")
    rope_sections: ClassVar[bool] = True

    @property
    def feed_forward_width(self) -> int:
        """The width of the shared expert: no other feed-forward is dense."""
        return self.shared_expert_intermediate_size


class Qwen3_5LinearAttention(LinearAttention):
    """Linear attention with a projection for queries, keys and values together, and one for each of the rest."""

    def __init__(self, blocks: Blocks):
        super().__init__(blocks)
        heads, width = self.heads, blocks.config.hidden_size
        self.in_proj_qkv = blocks.linear(width, heads.channels)
        self.in_proj_z = blocks.linear(width, heads.values)
        self.in_proj_b = blocks.linear(width, heads.value_heads)
        self.in_proj_a = blocks.linear(width, heads.value_heads)

    def projected(self, x: Float[Array, "B T D"]) -> Projected:
        """What the projections give of x."""
        layers = self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a
        return Projected(*self.over_tokens(lambda layers, x: in_one_product(x, *layers), layers, x))


class Qwen3_5Layer(HybridLayer):
    """Linear attention or gated attention, and a feed-forward that may be of experts."""

    recurrent = Qwen3_5LinearAttention


class Qwen3_5ForCausalLM(CausalLM):
    """Qwen3.5 with a language-model head and its loss; the call is `CausalLM`'s, with a `Qwen3_5TextConfig`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = Qwen3_5TextConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        ...                            num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        ...                            full_attention_interval=2, linear_num_key_heads=1, linear_num_value_heads=2,
        ...                            linear_key_head_dim=4, linear_value_head_dim=4)
        >>> Qwen3_5ForCausalLM(config, rngs=nnx.Rngs(0))(jnp.arange(8).reshape(1, 8)).logits.shape
        (1, 8, 32)
    """

    layer = Qwen3_5Layer
    config_type = Qwen3_5TextConfig
    config_fixed = fixed_fields("qwen3_5_text")


class Qwen3_5MoeForCausalLM(CausalLM):
    """Qwen3.5's mixture of experts with a head and its loss; the call is `CausalLM`'s, with a `Qwen3_5MoeTextConfig`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = Qwen3_5MoeTextConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        ...                               num_key_value_heads=1, head_dim=8, full_attention_interval=2,
        ...                               linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=4,
        ...                               linear_value_head_dim=4, num_experts=4, num_experts_per_tok=2,
        ...                               moe_intermediate_size=8, shared_expert_intermediate_size=8)
        >>> Qwen3_5MoeForCausalLM(config, rngs=nnx.Rngs(0))(jnp.arange(8).reshape(1, 8)).logits.shape
        (1, 8, 32)
    """

    layer = Qwen3_5Layer
    config_type = Qwen3_5MoeTextConfig
    config_fixed = fixed_fields("qwen3_5_moe_text")
