"""gpt-oss: attention sinks, windows in every other layer, biases, and a mixture of experts with a clamped unit."""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from liger_jax.models.core.config_fields import fixed_fields
from liger_jax.models.core.experts import EXPERTS, Experts, misfits
from liger_jax.models.llama import LlamaConfig, LlamaForCausalLM
from liger_jax.ops import RopeScaling, YarnRope


@dataclasses.dataclass(frozen=True)
class GptOssConfig(LlamaConfig):
    """The architecture: `LlamaConfig`'s fields with Hugging Face's defaults for gpt-oss, and these.

    Args:
        sliding_window: to how many positions a position attends in a sliding layer, including itself.
        layer_types: the type of each layer, "full_attention" or "sliding_attention"; `None` for a window in every other
            layer, starting with the first.
        num_local_experts: as in `MixtralConfig`, like all fields of experts and routers.

    Example:
        >>> GptOssConfig(num_hidden_layers=3).layer_types
        ('sliding_attention', 'full_attention', 'sliding_attention')
    """

    vocab_size: int = 201088
    hidden_size: int = 2880
    intermediate_size: int = 2880
    num_hidden_layers: int = 36
    num_attention_heads: int = 64
    num_key_value_heads: int | None = 8
    head_dim: int | None = 64
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    rope_theta: float = 150_000.0
    rope_scaling: RopeScaling | None = YarnRope(factor=32.0, original_max_position_embeddings=4096, truncate=False)
    attention_bias: bool = True
    sliding_window: int | None = 128
    layer_types: tuple[str, ...] | None = None
    num_local_experts: int = 128
    num_experts_per_tok: int = 4
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.9
    router_z_loss_coef: float = 0.0

    never: ClassVar[tuple[str, ...]] = ("mlp_bias",)
    has_sinks: ClassVar[bool] = True
    sliding_window_pattern: ClassVar[int] = 2
    norm_casting_mode: ClassVar[str] = "gemma"  # rounds after the scale, which is w, and not 1 + w

    @property
    def experts(self) -> Experts:
        """The experts of every layer."""
        return Experts(
            self.num_local_experts,
            self.num_experts_per_tok,
            self.intermediate_size,
            activation="clamped_swiglu",
            softmax_of_chosen=True,
            biases=True,
            router="router",
            one_tensor=True,
        )

    def feed_forward_of(self, i: int) -> str:
        """All layers have experts."""
        return EXPERTS

    def _misfits(self) -> Iterator[str]:
        yield from super()._misfits()
        yield from misfits(num_local_experts=self.num_local_experts, num_experts_per_tok=self.num_experts_per_tok)


class GptOssForCausalLM(LlamaForCausalLM):
    """gpt-oss with a language-model head and its loss; arguments and call are `CausalLM`'s, with a `GptOssConfig`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = GptOssConfig(vocab_size=32, hidden_size=16, intermediate_size=8, num_hidden_layers=2, head_dim=8,
        ...                       num_attention_heads=2, num_key_value_heads=1, num_local_experts=4,
        ...                       num_experts_per_tok=2)
        >>> GptOssForCausalLM(config, rngs=nnx.Rngs(0))(jnp.arange(8).reshape(1, 8)).logits.shape
        (1, 8, 32)
    """

    config_type = GptOssConfig
    config_fixed = fixed_fields("gpt_oss", swiglu_limit=(7.0,))
