"""Mixtral: Mistral with a mixture of experts in each layer."""

import dataclasses
from collections.abc import Iterator

from flax import nnx
from jaxtyping import Array, Float

from liger_jax.models.causal_lm import CausalLM
from liger_jax.models.core.blocks import Blocks
from liger_jax.models.core.config_fields import fixed_fields
from liger_jax.models.core.experts import EXPERTS, Experts, fed, misfits
from liger_jax.models.core.feed_forward import Aux
from liger_jax.models.mistral import MistralConfig


@dataclasses.dataclass(frozen=True)
class MixtralConfig(MistralConfig):
    """The architecture: `MistralConfig`'s fields with Hugging Face's defaults for Mixtral, and these.

    Args:
        num_local_experts: E, the experts of a layer, whose width is `intermediate_size`.
        num_experts_per_tok: k, the experts that each token goes to.
        output_router_logits: whether the balancing loss is added to the loss, as in transformers.
        router_aux_loss_coef: the factor of the balancing loss.
        router_z_loss_coef: the factor of the routers' z-loss, which transformers does not have.

    Example:
        >>> MixtralConfig().experts.count
        8
    """

    max_position_embeddings: int = 32768 * 4
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1_000_000.0
    sliding_window: int | None = None
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001
    router_z_loss_coef: float = 0.0

    @property
    def experts(self) -> Experts:
        """The experts of every layer."""
        return Experts(self.num_local_experts, self.num_experts_per_tok, self.intermediate_size)

    def feed_forward_of(self, i: int) -> str:
        """All layers have experts."""
        return EXPERTS

    def _misfits(self) -> Iterator[str]:
        yield from super()._misfits()
        yield from misfits(num_local_experts=self.num_local_experts, num_experts_per_tok=self.num_experts_per_tok)


class MixtralLayer(nnx.Module):
    """h = x + attention(norm(x)), then h + experts(norm(h))."""

    def __init__(self, blocks: Blocks):
        self.input_layernorm = blocks.norm()
        self.self_attn = blocks.attention()
        self.post_attention_layernorm = blocks.norm()
        self.block_sparse_moe = blocks.mlp()

    def __call__(self, x: Float[Array, "B T D"], *attention_inputs) -> tuple[Float[Array, "B T D"], Aux]:
        normed, x = self.input_layernorm.fork(x)
        attended = self.self_attn(normed, *attention_inputs)
        normed, x = self.post_attention_layernorm.add(attended, x)
        mixed, sums = fed(self.block_sparse_moe, normed, attention_inputs[2])
        return x + mixed, sums


class MixtralForCausalLM(CausalLM):
    """Mixtral with a language-model head and its loss; arguments and call are `CausalLM`'s, with a `MixtralConfig`.

    Example:
        >>> import jax.numpy as jnp
        >>> config = MixtralConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        ...                        num_attention_heads=2, num_key_value_heads=1, num_local_experts=4)
        >>> MixtralForCausalLM(config, rngs=nnx.Rngs(0))(jnp.arange(8).reshape(1, 8)).logits.shape
        (1, 8, 32)
    """

    layer = MixtralLayer
    config_type = MixtralConfig
    config_fixed = fixed_fields("mixtral", router_jitter_noise=(0.0, None))
