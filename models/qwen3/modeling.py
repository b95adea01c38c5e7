"""Qwen3: Qwen2 with norms of queries and keys in place of biases."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from liger_jax.models.core.config_fields import fixed_fields
from liger_jax.models.llama import LlamaForCausalLM
from liger_jax.models.qwen2 import Qwen2Config


@dataclasses.dataclass(frozen=True)
class Qwen3Config(Qwen2Config):
    """The architecture: `Qwen2Config`'s fields with Hugging Face's defaults for Qwen3.

    Example:
        >>> Qwen3Config(hidden_size=1024, num_attention_heads=16, num_key_value_heads=8).head_dim
        128
    """

    head_dim: int | None = 128

    qkv_bias: ClassVar[bool] = False
    never: ClassVar[tuple[str, ...]] = ("mlp_bias",)
    qk_norm: ClassVar[bool] = True
    # The values of fields that a config.json of Qwen3-VL's language model lacks.
    defaults_of_type: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "qwen3_vl_text": dict(num_key_value_heads=32, max_position_embeddings=128000, rope_theta=500000.0)
    }


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Qwen3 with a language-model head and its loss; arguments and call are `CausalLM`'s, with a `Qwen3Config`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = Qwen3Config(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        ...                      num_attention_heads=2, head_dim=8)
        >>> Qwen3ForCausalLM(config, rngs=nnx.Rngs(0))(jnp.arange(8).reshape(1, 8)).logits.shape
        (1, 8, 32)
    """

    config_type = Qwen3Config
    config_fixed = fixed_fields("qwen3") | {"model_type": ("qwen3", "qwen3_vl_text")}
