"""GLM-4: LLaMA with norms before and after attention and feed-forward, and a rotation of adjacent columns of heads."""

import dataclasses
from typing import ClassVar

from flax import nnx
from jaxtyping import Array, Float

from liger_jax.models.causal_lm import CausalLM
from liger_jax.models.core.blocks import Blocks
from liger_jax.models.core.config_fields import fixed_fields
from liger_jax.models.core.feed_forward import Aux
from liger_jax.models.llama import LlamaConfig


@dataclasses.dataclass(frozen=True)
class Glm4Config(LlamaConfig):
    """The architecture: `LlamaConfig`'s fields with Hugging Face's defaults for GLM-4, and this.

    `attention_bias` adds biases to queries, keys and values only.

    Args:
        partial_rotary_factor: the fraction of a head's columns, at its start, that is rotated; columns 2i and 2i + 1
            are a pair.

    Example:
        >>> Glm4Config().rotary_width
        64
    """

    vocab_size: int = 151552
    intermediate_size: int = 13696
    num_hidden_layers: int = 40
    num_key_value_heads: int | None = 2
    head_dim: int | None = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1.5625e-07
    partial_rotary_factor: float = 0.5
    attention_bias: bool = True

    never: ClassVar[tuple[str, ...]] = ("mlp_bias",)
    fused_gate_up: ClassVar[bool] = True
    rope_layout: ClassVar[str] = "interleaved"
    norms_results: ClassVar[bool] = True

    @property
    def output_bias(self) -> bool:
        """Attention's output projection has no bias."""
        return False


class Glm4Layer(nnx.Module):
    """h = x + norm(attention(norm(x))), then h + norm(mlp(norm(h)))."""

    def __init__(self, blocks: Blocks):
        self.input_layernorm = blocks.norm()
        self.self_attn = blocks.attention()
        self.post_self_attn_layernorm = blocks.norm()
        self.post_attention_layernorm = blocks.norm()  # which is before the feed-forward
        self.mlp = blocks.mlp()
        self.post_mlp_layernorm = blocks.norm()

    def __call__(self, x: Float[Array, "B T D"], *attention_inputs) -> tuple[Float[Array, "B T D"], Aux]:
        normed, x = self.input_layernorm.fork(x)
        attended = self.post_self_attn_layernorm(self.self_attn(normed, *attention_inputs))
        normed, x = self.post_attention_layernorm.add(attended, x)
        fed, aux = self.mlp(normed)
        return x + self.post_mlp_layernorm(fed), aux


class Glm4ForCausalLM(CausalLM):
    """GLM-4 with a language-model head and its loss; arguments and call are `CausalLM`'s, with a `Glm4Config`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = Glm4Config(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        ...                     num_attention_heads=2, head_dim=8)
        >>> Glm4ForCausalLM(config, rngs=nnx.Rngs(0))(jnp.arange(8).reshape(1, 8)).logits.shape
        (1, 8, 32)
    """

    layer = Glm4Layer
    config_type = Glm4Config
    config_fixed = fixed_fields("glm4")
