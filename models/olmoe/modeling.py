"""OLMoE: LLaMA with norms over all queries and all keys, and a mixture of experts in each layer."""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from liger_jax.models.core.config_fields import fixed_fields
from liger_jax.models.core.experts import EXPERTS, Experts, misfits
from liger_jax.models.llama import LlamaConfig, LlamaForCausalLM


@dataclasses.dataclass(frozen=True)
class OlmoeConfig(LlamaConfig):
    """The architecture: `LlamaConfig`'s fields with Hugging Face's defaults for OLMoE, and these.

    Args:
        num_experts: E, the experts of a layer, whose width is `intermediate_size`.
        num_experts_per_tok: k, the experts that each token goes to.
        norm_topk_prob: whether the weights of a token's experts add up to 1.
        output_router_logits: as in `MixtralConfig`, like the factors of the routers' losses.

    Example:
        >>> OlmoeConfig().experts.per_token
        8
    """

    vocab_size: int = 50304
    hidden_size: int = 2048
    intermediate_size: int = 2048
    num_hidden_layers: int = 16
    num_attention_heads: int = 16
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    num_experts: int = 64
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.01
    router_z_loss_coef: float = 0.0

    never: ClassVar[tuple[str, ...]] = ("mlp_bias",)
    qk_norm: ClassVar[bool] = True
    qk_norm_is_wide: ClassVar[bool] = True

    @property
    def experts(self) -> Experts:
        """The experts of every layer."""
        sizes = self.num_experts, self.num_experts_per_tok, self.intermediate_size
        return Experts(*sizes, normalized=self.norm_topk_prob)

    def feed_forward_of(self, i: int) -> str:
        """All layers have experts."""
        return EXPERTS

    def _misfits(self) -> Iterator[str]:
        yield from super()._misfits()
        yield from misfits(num_experts=self.num_experts, num_experts_per_tok=self.num_experts_per_tok)


class OlmoeForCausalLM(LlamaForCausalLM):
    """OLMoE with a language-model head and its loss; arguments and call are `CausalLM`'s, with an `OlmoeConfig`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = OlmoeConfig(vocab_size=32, hidden_size=16, intermediate_size=8, num_hidden_layers=2,
        ...                      num_attention_heads=2, num_experts=4, num_experts_per_tok=2)
        >>> OlmoeForCausalLM(config, rngs=nnx.Rngs(0))(jnp.arange(8).reshape(1, 8)).logits.shape
        (1, 8, 32)
    """

    config_type = OlmoeConfig
    config_fixed = fixed_fields("olmoe", clip_qkv=(None,))
