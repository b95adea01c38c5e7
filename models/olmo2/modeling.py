"""OLMo 2: LLaMA with norms after attention and feed-forward, and norms over all queries and all keys."""

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
class Olmo2Config(LlamaConfig):
    """The architecture: `LlamaConfig`'s fields with Hugging Face's defaults for OLMo 2.

    Example:
        >>> Olmo2Config(hidden_size=2048, num_attention_heads=16).head_dim
        128
    """

    vocab_size: int = 50304
    rms_norm_eps: float = 1e-5

    never: ClassVar[tuple[str, ...]] = ("mlp_bias",)
    qk_norm: ClassVar[bool] = True
    qk_norm_is_wide: ClassVar[bool] = True
    norm_casting_mode: ClassVar[str] = "gemma"  # rounds after the scale, as Gemma does; the scale is w, and not 1 + w
    norms_results: ClassVar[bool] = True


class Olmo2Layer(nnx.Module):
    """h = x + norm(attention(x)), then h + norm(mlp(h))."""

    def __init__(self, blocks: Blocks):
        self.self_attn = blocks.attention()
        self.post_attention_layernorm = blocks.norm()
        self.mlp = blocks.mlp()
        self.post_feedforward_layernorm = blocks.norm()

    def __call__(self, x: Float[Array, "B T D"], *attention_inputs) -> tuple[Float[Array, "B T D"], Aux]:
        x = x + self.post_attention_layernorm(self.self_attn(x, *attention_inputs))
        fed, aux = self.mlp(x)
        return x + self.post_feedforward_layernorm(fed), aux


class Olmo2ForCausalLM(CausalLM):
    """OLMo 2 with a language-model head and its loss; arguments and call are `CausalLM`'s, with an `Olmo2Config`.

    Example:
        >>> import jax.numpy as jnp
        >>> config = Olmo2Config(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        ...                      num_attention_heads=2)
        >>> Olmo2ForCausalLM(config, rngs=nnx.Rngs(0))(jnp.arange(8).reshape(1, 8)).logits.shape
        (1, 8, 32)
    """

    layer = Olmo2Layer
    config_type = Olmo2Config
    config_fixed = fixed_fields("olmo2")
