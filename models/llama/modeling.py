"""LLaMA 2 and 3 with NNX: the whole model on one page, from the blocks that all families share."""

import functools
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from liger_jax.models.blocks import Attention, LayerStack, Remat, RMSNorm, SwiGLU
from liger_jax.models.causal_lm import CausalLM, attention_segments
from liger_jax.models.common import KernelOptions
from liger_jax.models.embedding import embed
from liger_jax.models.llama.config import LlamaConfig
from liger_jax.models.llama.params import FIXED
from liger_jax.ops import rope_table


class LlamaForCausalLM(CausalLM):
    """LLaMA with a language-model head and its loss; the call is `CausalLM.__call__`.

    Args:
        config: the architecture.
        kernels: which ops run as kernels.
        dtype: dtype of the computation; norms, rotary embedding, logits and loss round from float32.
        param_dtype: dtype of the parameters.
        remat: what each layer keeps for the backward: `"none"` (all that costs), `"full"` (only its input), `"dots"`
            or `"offload"`.
        scan_layers: stack the layers' parameters and scan over them, so that one layer is compiled.
        rngs: `nnx.Rngs` with a stream `params`, or a default one.

    Raises:
        ValueError: `remat` is unknown.

    Example:
        >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        ...                      num_attention_heads=2)
        >>> model = LlamaForCausalLM(config, rngs=nnx.Rngs(0))
        >>> tokens = jnp.arange(8).reshape(1, 8)
        >>> model(tokens, labels=tokens).loss.shape, model(tokens, logits_to_keep=1).logits.shape
        ((), (1, 1, 32))
    """

    def __init__(
        self,
        config: LlamaConfig,
        *,
        kernels: KernelOptions = KernelOptions(),
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        remat: Remat = "none",
        scan_layers: bool = True,
        rngs: nnx.Rngs,
    ):
        self.config, self.kernels = config, kernels
        self.model: LlamaModel = LlamaModel(
            config,
            kernels=kernels,
            dtype=dtype,
            param_dtype=param_dtype,
            remat=remat,
            scan_layers=scan_layers,
            rngs=rngs,
        )
        if not config.tie_word_embeddings:
            normal = nnx.initializers.normal(config.initializer_range)
            self.lm_head = nnx.Param(normal(rngs.params(), (config.vocab_size, config.hidden_size), param_dtype))

    config_type = LlamaConfig
    config_fixed = FIXED

    @property
    def head(self) -> Float[Array, "V D"]:
        """The head's weight: the embedding's where the two are tied."""
        return self.model.embed_tokens[...] if self.config.tie_word_embeddings else self.lm_head[...]


class LlamaModel(nnx.Module):
    """Token ids to normalised hidden states; arguments as `LlamaForCausalLM`'s."""

    def __init__(
        self,
        config: LlamaConfig,
        *,
        kernels: KernelOptions,
        dtype: Any,
        param_dtype: Any,
        remat: Remat,
        scan_layers: bool,
        rngs: nnx.Rngs,
    ):
        self.config, self.dtype = config, dtype
        normal = nnx.initializers.normal(config.initializer_range)
        self.embed_tokens = nnx.Param(normal(rngs.params(), (config.vocab_size, config.hidden_size), param_dtype))
        make_layer = functools.partial(_DecoderLayer, config, kernels, dtype, param_dtype)
        self.layers = LayerStack(make_layer, config.num_hidden_layers, scan=scan_layers, remat=remat, rngs=rngs)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, kernels=kernels, param_dtype=param_dtype)

    def __call__(
        self,
        input_ids: Int[Array, "B T"],
        *,
        positions: Int[Array, "#B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        attention_mask: Bool[Array, "B T"] | Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        length, longest = input_ids.shape[1], self.config.max_position_embeddings
        if length > longest:
            raise ValueError(
                f"input_ids has {length} positions, and max_position_embeddings={longest} is the most that this "
                "model takes. Shorten the sequence, or raise the config's field."
            )
        positions = jnp.arange(length)[None] if positions is None else positions
        cos, sin = rope_table(
            positions, self.config.head_dim, theta=self.config.rope_theta, scaling=self.config.rope_scaling
        )
        x = embed(self.embed_tokens[...], input_ids, self.dtype)
        x = self.layers(x, cos, sin, attention_segments(segment_ids, attention_mask))
        return self.norm(x)


class _DecoderLayer(nnx.Module):
    def __init__(self, config: LlamaConfig, kernels: KernelOptions, dtype: Any, param_dtype: Any, rngs: nnx.Rngs):
        linear = functools.partial(
            nnx.Linear,
            use_bias=False,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=nnx.initializers.normal(config.initializer_range),
            rngs=rngs,
        )
        norm = functools.partial(
            RMSNorm, config.hidden_size, eps=config.rms_norm_eps, kernels=kernels, param_dtype=param_dtype
        )
        self.input_layernorm = norm()
        self.self_attn = Attention(
            config.hidden_size,
            query_heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_width=config.head_dim,
            qkv_bias=config.qkv_bias,
            linear=linear,
            kernels=kernels,
        )
        self.post_attention_layernorm = norm()
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, linear=linear, kernels=kernels)

    def __call__(self, x, cos, sin, segment_ids):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, segment_ids)
        return x + self.mlp(self.post_attention_layernorm(x))
