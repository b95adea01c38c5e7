"""Self-attention: projections, rotary positions, and the op or the key-value cache."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from liger_jax import ops
from liger_jax.layers.mlp import is_plain_product
from liger_jax.models.core import plain
from liger_jax.models.core.cache import LayerCache
from liger_jax.models.core.kernel_options import KernelOptions
from liger_jax.models.core.remat import ATTENTION_OUTPUT
from liger_jax.models.core.tensor_parts import all_positions, axis_of_part, summed


def in_one_product(x: Float[Array, "*rows D"], *projections: Any) -> list[Array]:
    """Projects an input several ways by one product with all weights, which also gives one gradient of the input.

    Args:
        x: (..., D).
        *projections: layers of `Blocks.linear`. If one has been replaced, for example by a `nnx.LoRALinear`, by a layer
            of another dtype or by one with its own product, each projection is called separately.

    Returns:
        One array for each projection.
    """
    first = projections[0]
    alike = lambda projection: projection.dtype == first.dtype and projection.precision is None
    if not all(is_plain_product(projection) and alike(projection) for projection in projections):
        return [projection(x) for projection in projections]
    kernel = jnp.concatenate([projection.kernel[...] for projection in projections], axis=1)
    ends = list(itertools.accumulate(projection.kernel.shape[1] for projection in projections))
    # The barrier holds for the gradient too, so that XLA concatenates it once. Without the barrier XLA concatenates it
    # for each of the two products that read it: 142 µs against 110 in a layer of Llama-3.2-1B, 8 × 2,048, on an H200.
    packed = jax.lax.optimization_barrier(x.astype(first.dtype) @ kernel.astype(first.dtype))
    parts = jnp.split(packed, ends[:-1], axis=-1)
    of_rows = lambda bias: jnp.expand_dims(bias[...].astype(first.dtype), tuple(range(x.ndim - 1)))
    return [
        part if projection.bias is None else part + of_rows(projection.bias)
        for part, projection in zip(parts, projections, strict=True)
    ]


class Attention(nnx.Module):
    """Grouped-query causal self-attention with rotary positions.

    Args:
        config: the architecture, a `LlamaConfig` or one that derives from it.
        kernels: which ops run as kernels.
        linear: makes a projection from its two widths, as `Blocks.linear` does.
        norm: makes a norm of a width, as `Blocks.norm` does.
        parameter: makes a parameter of a shape, as `Blocks.parameter` does.
    """

    def __init__(
        self,
        config: Any,
        kernels: KernelOptions,
        *,
        linear: Callable[..., nnx.Module],
        norm: Callable[[int], nnx.Module],
        parameter: Callable[[int], nnx.Param],
    ):
        self.kernels = kernels
        width, self.head_width = config.hidden_size, config.head_dim
        query_width, kv_width = (n * self.head_width for n in (config.num_attention_heads, config.num_key_value_heads))
        self.query_width, self.kv_width, self.has_qkv = query_width, kv_width, config.fused_projections
        qkv_bias = config.qkv_bias or config.attention_bias
        if self.has_qkv:
            self.qkv_proj = linear(width, query_width + 2 * kv_width, use_bias=qkv_bias)
        else:
            self.q_proj = linear(width, query_width, use_bias=qkv_bias)
            self.k_proj = linear(width, kv_width, use_bias=qkv_bias)
            self.v_proj = linear(width, kv_width, use_bias=qkv_bias)
        self.o_proj = linear(query_width, width, use_bias=config.attention_bias)
        self.norm_is_wide = config.qk_norm_is_wide
        norm_widths = (query_width, kv_width) if self.norm_is_wide else (self.head_width, self.head_width)
        self.q_norm, self.k_norm = (norm(width) if config.qk_norm else None for width in norm_widths)
        self.sinks = parameter(config.num_attention_heads) if config.has_sinks else None
        self.scale, self.softcap = config.attention_scale, config.attn_logit_softcapping

    def __call__(
        self,
        x: Float[Array, "B own D"],
        cos: Float[Array, "#B T R"] | None,
        sin: Float[Array, "#B T R"] | None,
        segments: ops.Segments | None,
        window: int | None,
        cache: LayerCache | None = None,
    ) -> Float[Array, "B own D"]:
        layout = self.kernels.mesh_layout
        tensor, heads_lie, tokens_lie = axis_of_part(layout.tensor, self.o_proj), layout.in_attention, layout.in_loss
        x = all_positions(x, tensor)

        def heads(y):
            return y.reshape(*y.shape[:2], y.shape[2] // self.head_width, self.head_width)

        if self.has_qkv:
            q, k, v = jnp.split(self.qkv_proj(x), [self.query_width, self.query_width + self.kv_width], axis=-1)
        else:
            q, k, v = in_one_product(x, self.q_proj, self.k_proj, self.v_proj)
        v = heads(v)
        if self.q_norm is None or self.k_norm is None:
            q, k = heads(q), heads(k)
        elif self.norm_is_wide:
            q, k = heads(self.q_norm(q)), heads(self.k_norm(k))
        else:
            q, k = self.q_norm(heads(q)), self.k_norm(heads(k))
        if cos is not None and sin is not None:
            rope = plain.apply_rope
            if self.kernels.rope:
                rope = functools.partial(ops.apply_rope, implementation=self.kernels.implementation)
            of_batch, shared = ((q, k), (cos, sin)) if cos.shape[0] == 1 else ((q, k, cos, sin), ())
            of_rope = (heads_lie, heads_lie, tokens_lie, tokens_lie)[: len(of_batch)]
            q, k = layout.run(rope, of_batch, shared, spec=of_rope, out=heads_lie)
        if self.q_norm is None:  # with norms, their inputs are kept for the backward, and q and k are computed again
            q, k, v = checkpoint_name((q, k, v), ATTENTION_OUTPUT)
        options: dict[str, Any] = dict(window=window, softcap=self.softcap, scale=self.scale)

        sinks = None if self.sinks is None else self.sinks[...]

        def attend(q, k, v, segments, sinks):
            implementation = self.kernels.attention
            return ops.causal_attention(q, k, v, segments, **options, sinks=sinks, implementation=implementation)

        def attend_to_own(q, k, v):
            specs = heads_lie, heads_lie, heads_lie, tokens_lie
            return layout.run(attend, (q, k, v, segments), (sinks,), spec=specs, out=heads_lie)

        if cache is None:
            out = attend_to_own(q, k, v)
        else:
            out = cache.attend(q, k, v, attend_to_own=attend_to_own, **options, sinks=sinks)
        return summed(self.o_proj(out.reshape(*x.shape[:2], out.shape[2] * out.shape[3])), tensor)
