"""Granite: LLaMA with factors of the embeddings, the attention scores, the residual branches and the logits."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from liger_jax.models.causal_lm import CausalLM
from liger_jax.models.core.blocks import Blocks
from liger_jax.models.core.config_fields import fixed_fields
from liger_jax.models.core.feed_forward import Aux
from liger_jax.models.llama import LlamaConfig
from liger_jax.models.llama.modeling import LlamaLayer


@dataclasses.dataclass(frozen=True)
class GraniteConfig(LlamaConfig):
    """The architecture: `LlamaConfig`'s fields with Hugging Face's defaults for Granite, and these.

    `logit_scale` is the inverse of config.json's `logits_scaling`.

    Args:
        embedding_multiplier: a factor of the embeddings, rounded to the dtype of the computation.
        attention_multiplier: the factor of the attention scores, instead of 1/√H.
        residual_multiplier: a factor of the outputs of attention and feed-forward before they are added to the residual
            stream.

    Example:
        >>> GraniteConfig(attention_multiplier=0.0078125).attention_scale
        0.0078125
    """

    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0

    divides_logits: ClassVar[bool] = True

    @property
    def embedding_scale(self) -> float:
        """Factor of the embeddings."""
        return self.embedding_multiplier

    @property
    def attention_scale(self) -> float:
        """Factor of the attention scores."""
        return self.attention_multiplier


class GraniteLayer(LlamaLayer):
    """h = x + m·attention(norm(x)), then h + m·mlp(norm(h)), where m is `residual_multiplier`."""

    def __init__(self, blocks: Blocks):
        super().__init__(blocks)
        self.residual_multiplier = blocks.config.residual_multiplier

    def __call__(self, x: Float[Array, "B T D"], *attention_inputs) -> tuple[Float[Array, "B T D"], Aux]:
        normed, x = self.input_layernorm.fork(x)
        attended = self._scaled(self.self_attn(normed, *attention_inputs))
        normed, x = self.post_attention_layernorm.add(attended, x)
        fed, aux = self.mlp(normed)
        return x + self._scaled(fed), aux

    def _scaled(self, branch: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The product in float32, rounded once."""
        return (branch.astype(jnp.float32) * self.residual_multiplier).astype(branch.dtype)


class GraniteForCausalLM(CausalLM):
    """Granite with a language-model head and its loss; arguments and call are `CausalLM`'s, with a `GraniteConfig`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = GraniteConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        ...                        num_attention_heads=2, residual_multiplier=0.22)
        >>> GraniteForCausalLM(config, rngs=nnx.Rngs(0))(jnp.arange(8).reshape(1, 8)).logits.shape
        (1, 8, 32)
    """

    layer = GraniteLayer
    config_type = GraniteConfig
    config_fixed = fixed_fields("granite")
