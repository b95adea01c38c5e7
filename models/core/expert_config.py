"""The fields of a config with a mixture of experts whose width is not that of a dense layer."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import ClassVar

from liger_jax.models.core.config import LlamaConfig
from liger_jax.models.core.experts import EXPERTS, Experts, misfits
from liger_jax.models.core.feed_forward import DENSE


@dataclasses.dataclass(frozen=True)
class ExpertConfig(LlamaConfig):
    """The fields of families with experts of a width of their own, beside `LlamaConfig`'s.

    Args:
        num_experts: E, the number of experts in a layer with experts.
        num_experts_per_tok: k, the number of them that each token goes to.
        moe_intermediate_size: the width of an expert; `intermediate_size` is that of a dense layer.
        output_router_logits: whether the balancing loss is added to the loss, as in transformers.
        router_aux_loss_coef: the factor of the balancing loss.
        router_z_loss_coef: the factor of the routers' z-loss, which transformers does not have.
    """

    num_experts: int = 128
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 512
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    router_z_loss_coef: float = 0.0

    other_names: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}  # as transformers 5 writes it
    norm_topk_prob: ClassVar[bool] = True
    shared_expert_intermediate_size: ClassVar[int] = 0  # the width of an expert that every token goes to; 0 for none

    @property
    def experts(self) -> Experts:
        """The experts of layers that have them."""
        return Experts(
            self.num_experts,
            self.num_experts_per_tok,
            self.moe_intermediate_size,
            normalized=self.norm_topk_prob,
            shared_width=self.shared_expert_intermediate_size,
        )

    def feed_forward_of(self, i: int) -> str:
        """All layers have experts."""
        return EXPERTS

    def _misfits(self) -> Iterator[str]:
        yield from super()._misfits()
        yield from misfits(num_experts=self.num_experts, num_experts_per_tok=self.num_experts_per_tok)


@dataclasses.dataclass(frozen=True)
class SparseLayersConfig(ExpertConfig):
    """The fields of families with experts in some layers, beside `ExpertConfig`'s.

    Args:
        norm_topk_prob: whether the weights of a token's experts add up to 1.
        decoder_sparse_step: n: every nth layer has experts.
        mlp_only_layers: the numbers of layers that never have experts.
    """

    norm_topk_prob: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    def feed_forward_of(self, i: int) -> str:
        """Every nth layer has experts, except for those that `mlp_only_layers` names."""
        has_experts = i not in self.mlp_only_layers and (i + 1) % self.decoder_sparse_step == 0
        return EXPERTS if has_experts else DENSE

    def _misfits(self) -> Iterator[str]:
        yield from super()._misfits()
        if all(self.feed_forward_of(i) == DENSE for i in range(self.num_hidden_layers)):
            yield (
                f"decoder_sparse_step={self.decoder_sparse_step} and mlp_only_layers={self.mlp_only_layers} must leave "
                "experts to a layer"
            )
