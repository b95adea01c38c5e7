"""OLMo Hybrid: linear attention in three of four layers, and OLMo 2's layers in between, which may not rotate."""

import dataclasses
import math
from collections.abc import Iterator
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from liger_jax.models.causal_lm import CausalLM
from liger_jax.models.core.attention import in_one_product
from liger_jax.models.core.blocks import Blocks
from liger_jax.models.core.config_fields import fixed_fields
from liger_jax.models.core.hybrid_layer import HybridLayer
from liger_jax.models.core.linear_attention import LINEAR, LinearAttention, Projected
from liger_jax.models.core.linear_attention_config import LinearAttentionConfig
from liger_jax.models.olmo2.modeling import Olmo2Config, Olmo2Layer
from liger_jax.ops import RopeScaling


@dataclasses.dataclass(frozen=True)
class OlmoHybridConfig(Olmo2Config, LinearAttentionConfig):
    """The architecture: `LinearAttentionConfig`'s fields with Hugging Face's defaults for OLMo Hybrid, and these.

    Args:
        rope_theta: the rotary embedding's base in layers with full attention; `None` for no rotation.
        layer_types: the type of each layer, "linear_attention" or "full_attention"; `None` for full attention in every
            fourth layer, or in the last one if there are fewer.
        linear_a_log_min: the smallest initial decay, of which A_log is the logarithm.
        linear_a_log_max: the largest initial decay.
        linear_dt_min: the smallest initial step, of which dt_bias is the inverse softplus.
        linear_dt_max: the largest initial step.
        linear_dt_init_floor: the lower bound of initial steps.
        linear_allow_neg_eigval: whether beta is in [0, 2] instead of [0, 1], so that a component of the state may
            change its sign.

    Raises:
        ValueError: as `LlamaConfig`; or the number of value heads of linear attention is not a multiple of that of key
            heads.

    Example:
        >>> OlmoHybridConfig().linear_heads.value_width
        192
    """

    vocab_size: int = 100352
    hidden_size: int = 3840
    num_attention_heads: int = 30
    max_position_embeddings: int = 65536
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = 10000.0  # pyright: ignore[reportIncompatibleVariableOverride]
    layer_types: tuple[str, ...] | None = None  # which Olmo2Config has as a constant
    linear_a_log_min: float = 0.0
    linear_a_log_max: float = 16.0
    linear_dt_min: float = 0.001
    linear_dt_max: float = 0.1
    linear_dt_init_floor: float = 1e-4
    linear_allow_neg_eigval: bool = True

    may_not_rotate: ClassVar[bool] = True

    def type_of_layer(self, i: int) -> str:
        """Every fourth layer, or the last one of fewer, has full attention, and the others have linear attention."""
        is_full = (i + 1) % 4 == 0 or i + 1 == self.num_hidden_layers < 4
        return "full_attention" if is_full else LINEAR

    def rope_of(self, layer_type: str) -> tuple[float, RopeScaling | None] | None:
        """The rotary embedding of layers with full attention, if there is one."""
        return None if self.rope_theta is None else super().rope_of(layer_type)

    def _misfits(self) -> Iterator[str]:
        yield from super()._misfits()
        if self.linear_a_log_min >= self.linear_a_log_max or self.linear_dt_min >= self.linear_dt_max:
            yield "linear_a_log_min and linear_dt_min must be less than linear_a_log_max and linear_dt_max"


class OlmoHybridLinearAttention(LinearAttention):
    """Linear attention with a projection for each of its inputs."""

    out, out_norm = "o_proj", "o_norm"

    def __init__(self, blocks: Blocks):
        super().__init__(blocks, eps=1e-5)
        heads, width = self.heads, blocks.config.hidden_size
        self.q_proj, self.k_proj = blocks.linear(width, heads.keys), blocks.linear(width, heads.keys)
        self.v_proj, self.g_proj = blocks.linear(width, heads.values), blocks.linear(width, heads.values)
        self.b_proj, self.a_proj = (blocks.linear(width, heads.value_heads) for _ in range(2))

    def first_decays(self, blocks: Blocks) -> tuple[jax.Array, jax.Array]:
        """dt_bias (H,), the inverse softplus of random steps, and random exp(A_log) (H,)."""
        config, shape = blocks.config, (self.heads.value_heads,)
        assert blocks.rngs is not None
        key, wide = blocks.rngs.params, jnp.float32
        uniform = lambda least, most: jax.random.uniform(key(), shape, wide, minval=least, maxval=most)
        step = jnp.exp(uniform(math.log(config.linear_dt_min), math.log(config.linear_dt_max)))
        step = jnp.maximum(step, config.linear_dt_init_floor)
        decay = uniform(max(config.linear_a_log_min, 1e-6), config.linear_a_log_max)  # whose logarithm is finite
        return step + jnp.log(-jnp.expm1(-step)), decay

    def projected(self, x: Float[Array, "B T D"]) -> Projected:
        """What the projections give of x."""
        layers = self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.b_proj, self.a_proj
        q, k, v, z, b, a = self.over_tokens(lambda layers, x: in_one_product(x, *layers), layers, x)
        return Projected(jnp.concatenate([q, k, v], axis=-1), z, b, a)


class OlmoHybridLinearLayer(HybridLayer):
    """A layer of linear attention."""

    recurrent = OlmoHybridLinearAttention


class OlmoHybridForCausalLM(CausalLM):
    """OLMo Hybrid with a language-model head and its loss; the call is `CausalLM`'s, with an `OlmoHybridConfig`.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> config = OlmoHybridConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        ...                           num_attention_heads=2)
        >>> OlmoHybridForCausalLM(config, rngs=nnx.Rngs(0))(jnp.arange(8).reshape(1, 8)).logits.shape
        (1, 8, 32)
    """

    layer = staticmethod(lambda blocks: (OlmoHybridLinearLayer if blocks.is_recurrent else Olmo2Layer)(blocks))
    config_type = OlmoHybridConfig
    config_fixed = fixed_fields("olmo_hybrid")
