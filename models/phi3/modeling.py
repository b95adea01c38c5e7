"""Phi-3 and Phi-4: LLaMA with fused projections, and perhaps windows, LongRoPE, and partial rotation of heads."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from liger_jax.models.core.config_fields import fixed_fields
from liger_jax.models.llama import LlamaConfig, LlamaForCausalLM
from liger_jax.ops import LongRope


@dataclasses.dataclass(frozen=True)
class Phi3Config(LlamaConfig):
    """The architecture: `LlamaConfig`'s fields with Hugging Face's defaults for Phi-3, and these.

    `rope_scaling` is a `LongRope` or `None`.

    Args:
        partial_rotary_factor: the fraction of a head's columns, at its start, that is rotated; Phi-4-mini has 0.75.
        sliding_window: to how many positions a position attends, including itself; `None` for all earlier positions.

    Example:
        >>> Phi3Config(num_attention_heads=24, num_key_value_heads=8, partial_rotary_factor=0.75).rotary_width
        96
    """

    vocab_size: int = 32064
    hidden_size: int = 3072
    intermediate_size: int = 8192
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    partial_rotary_factor: float = 1.0
    sliding_window: int | None = None

    never: ClassVar[tuple[str, ...]] = ("attention_bias", "mlp_bias")
    fused_qkv: ClassVar[bool] = True
    fused_gate_up: ClassVar[bool] = True
    # How transformers reads config.json in this family (`rope_fields`).
    rope_defaults: ClassVar[Mapping[str, Any]] = {"original_max_position_embeddings": 4096}
    rope_aliases: ClassVar[Mapping[str, str]] = {"su": "longrope", "yarn": "longrope"}

    def _misfits(self) -> Iterator[str]:
        yield from super()._misfits()
        if not isinstance(self.rope_scaling, LongRope | None):
            yield f"rope_scaling={self.rope_scaling} must be a LongRope or None, since transformers has no other here"


class Phi3ForCausalLM(LlamaForCausalLM):
    """Phi-3 with a language-model head and its loss; arguments and call are `CausalLM`'s, with a `Phi3Config`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = Phi3Config(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        ...                     num_attention_heads=2)
        >>> Phi3ForCausalLM(config, rngs=nnx.Rngs(0))(jnp.arange(8).reshape(1, 8)).logits.shape
        (1, 8, 32)
    """

    config_type = Phi3Config
    config_fixed = fixed_fields("phi3", resid_pdrop=(0.0,), embd_pdrop=(0.0,))
