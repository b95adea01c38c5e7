"""Hunyuan's dense models: LLaMA with norms of queries and keys after their rotation."""

import dataclasses
from typing import ClassVar

from liger_jax.models.core.config_fields import fixed_fields
from liger_jax.models.llama import LlamaConfig, LlamaForCausalLM


@dataclasses.dataclass(frozen=True)
class HunYuanDenseV1Config(LlamaConfig):
    """The architecture: `LlamaConfig`'s fields with Hugging Face's defaults for Hunyuan.

    A `rope_scaling` of type "dynamic" with an `alpha` in config.json becomes part of the base: `rope_theta` is
    theta·alpha^(H/(H − 2)), as in transformers.

    Example:
        >>> HunYuanDenseV1Config(hidden_size=2048, num_attention_heads=16).head_dim
        128
    """

    vocab_size: int = 290943
    rms_norm_eps: float = 1e-5

    never: ClassVar[tuple[str, ...]] = ("mlp_bias",)
    qk_norm: ClassVar[bool] = True
    norms_rotated: ClassVar[bool] = True
    qk_norm_names: ClassVar[tuple[str, str]] = ("query_layernorm", "key_layernorm")
    alpha_stretches_base: ClassVar[bool] = True


class HunYuanDenseV1ForCausalLM(LlamaForCausalLM):
    """Hunyuan with a language-model head and its loss; the call is `CausalLM`'s, with a `HunYuanDenseV1Config`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = HunYuanDenseV1Config(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        ...                               num_attention_heads=2)
        >>> HunYuanDenseV1ForCausalLM(config, rngs=nnx.Rngs(0))(jnp.arange(8).reshape(1, 8)).logits.shape
        (1, 8, 32)
    """

    config_type = HunYuanDenseV1Config
    config_fixed = fixed_fields("hunyuan_v1_dense")
