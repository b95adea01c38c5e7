"""Qwen3-MoE: Qwen3 with a mixture of experts in some layers or in all."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from liger_jax.models.core.config_fields import fixed_fields
from liger_jax.models.core.experts import EXPERTS, Experts, misfits
from liger_jax.models.core.feed_forward import DENSE
from liger_jax.models.llama import LlamaForCausalLM
from liger_jax.models.qwen3 import Qwen3Config


@dataclasses.dataclass(frozen=True)
class Qwen3MoeConfig(Qwen3Config):
    """The architecture: `Qwen3Config`'s fields with Hugging Face's defaults for Qwen3-MoE, and these.

    Args:
        num_experts: E, the number of experts in a layer with experts.
        num_experts_per_tok: k, the experts that each token goes to.
        moe_intermediate_size: the width of an expert; `intermediate_size` is that of a dense layer.
        norm_topk_prob: whether the weights of a token's experts add up to 1.
        decoder_sparse_step: n: every nth layer has experts.
        mlp_only_layers: the numbers of layers that never have experts.
        output_router_logits: as in `MixtralConfig`, like the factors of the routers' losses.

    Example:
        >>> Qwen3MoeConfig(num_hidden_layers=2, mlp_only_layers=(0,)).feed_forward_of(0)
        'dense'
    """

    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_hidden_layers: int = 24
    num_key_value_heads: int | None = 4
    head_dim: int | None = None
    num_experts: int = 128
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    router_z_loss_coef: float = 0.0

    other_names: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}  # as transformers 5 writes it

    @property
    def experts(self) -> Experts:
        """The experts of layers that have them."""
        sizes = self.num_experts, self.num_experts_per_tok, self.moe_intermediate_size
        return Experts(*sizes, normalized=self.norm_topk_prob)

    def feed_forward_of(self, i: int) -> str:
        """Every nth layer has experts, except for those that `mlp_only_layers` names."""
        has_experts = i not in self.mlp_only_layers and (i + 1) % self.decoder_sparse_step == 0
        return EXPERTS if has_experts else DENSE

    def type_of_layer(self, i: int) -> str:
        """All layers slide if `use_sliding_window` is set."""
        slides = self.use_sliding_window and self.sliding_window is not None
        return "sliding_attention" if slides else "full_attention"

    def _misfits(self) -> Iterator[str]:
        yield from super()._misfits()
        yield from misfits(num_experts=self.num_experts, num_experts_per_tok=self.num_experts_per_tok)
        if all(self.feed_forward_of(i) == DENSE for i in range(self.num_hidden_layers)):
            yield (
                f"decoder_sparse_step={self.decoder_sparse_step} and mlp_only_layers={self.mlp_only_layers} must leave "
                "experts to a layer"
            )


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
