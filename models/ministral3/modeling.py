"""Ministral 3: Mistral with YaRN, and with queries that grow with their positions."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from liger_jax.models.core.config_fields import fixed_fields
from liger_jax.models.llama import LlamaForCausalLM
from liger_jax.models.mistral import MistralConfig
from liger_jax.ops import RopeScaling, YarnRope


@dataclasses.dataclass(frozen=True)
class Ministral3Config(MistralConfig):
    """The architecture: `MistralConfig`'s fields with Hugging Face's defaults for Ministral 3, and this.

    `rope_scaling` is a `YarnRope`.

    Args:
        llama_4_scaling_beta: β: the query at position p is multiplied by 1 + β·ln(1 + ⌊p/n⌋), where n is
            `original_max_position_embeddings` of `rope_scaling`.

    Example:
        >>> Ministral3Config().query_growth
        (0.1, 16384)
    """

    vocab_size: int = 131072
    num_hidden_layers: int = 34
    head_dim: int | None = 128
    max_position_embeddings: int = 262144
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1_000_000.0
    rope_scaling: RopeScaling | None = YarnRope(16.0, 16384, mscale=1.0, mscale_all_dim=1.0)
    sliding_window: int | None = None
    llama_4_scaling_beta: float = 0.1

    # How transformers reads config.json in this family, if it has a scaling without a base (`rope_fields`).
    rope_defaults: ClassVar[Mapping[str, Any]] = {"rope_theta": 10000.0}

    @property
    def query_growth(self) -> tuple[float, int]:
        """β and n."""
        scaling: Any = self.rope_scaling
        return self.llama_4_scaling_beta, scaling.original_max_position_embeddings

    def _misfits(self) -> Iterator[str]:
        yield from super()._misfits()
        if not isinstance(self.rope_scaling, YarnRope):
            yield f"rope_scaling={self.rope_scaling} must be a YarnRope, whose length in training queries grow by"


class Ministral3ForCausalLM(LlamaForCausalLM):
    """Ministral 3 with a language-model head and its loss; the call is `CausalLM`'s, with a `Ministral3Config`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = Ministral3Config(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        ...                           num_attention_heads=2, num_key_value_heads=1, head_dim=8)
        >>> Ministral3ForCausalLM(config, rngs=nnx.Rngs(0))(jnp.arange(8).reshape(1, 8)).logits.shape
        (1, 8, 32)
    """

    config_type = Ministral3Config
    config_fixed = fixed_fields("ministral3")
