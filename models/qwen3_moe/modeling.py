"""Qwen3-MoE: Qwen3 with a mixture of experts in some layers or in all."""

import dataclasses
from typing import Any

from liger_jax.models.core.config_fields import fixed_fields
from liger_jax.models.core.expert_config import SparseLayersConfig
from liger_jax.models.llama import LlamaForCausalLM
from liger_jax.models.qwen3 import Qwen3Config


@dataclasses.dataclass(frozen=True)
class Qwen3MoeConfig(Qwen3Config, SparseLayersConfig):
    """The architecture: the fields of `Qwen3Config` and `SparseLayersConfig`, with Hugging Face's defaults.

    Example:
        >>> Qwen3MoeConfig(num_hidden_layers=2, mlp_only_layers=(0,)).feed_forward_of(0)
        'dense'
    """

    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_hidden_layers: int = 24
    num_key_value_heads: int | None = 4
    head_dim: int | None = None
    moe_intermediate_size: int = 768
    norm_topk_prob: bool = False

    def type_of_layer(self, i: int) -> str:
        """All layers slide if `use_sliding_window` is set."""
        slides = self.use_sliding_window and self.sliding_window is not None
        return "sliding_attention" if slides else "full_attention"


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    """Qwen3-MoE with a language-model head and its loss; arguments and call are `CausalLM`'s, with a `Qwen3MoeConfig`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = Qwen3MoeConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        ...                         num_key_value_heads=1, num_experts=4, num_experts_per_tok=2,
        ...                         moe_intermediate_size=8)
        >>> Qwen3MoeForCausalLM(config, rngs=nnx.Rngs(0))(jnp.arange(8).reshape(1, 8)).logits.shape
        (1, 8, 32)
    """

    config_type = Qwen3MoeConfig

    def __init__(self, config: Qwen3MoeConfig, *, scan_layers: bool = True, **options: Any):
        kinds = {config.feed_forward_of(i) for i in range(config.num_hidden_layers)}
        if scan_layers and len(kinds) > 1:
            raise ValueError(
                f"scan_layers=True needs equal layers, but with decoder_sparse_step={config.decoder_sparse_step} and "
                f"mlp_only_layers={config.mlp_only_layers} only some layers have experts. Pass "
                "scan_layers=False."
            )
        super().__init__(config, scan_layers=scan_layers, **options)

    config_fixed = fixed_fields("qwen3_moe")
