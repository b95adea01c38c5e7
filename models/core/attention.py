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
from liger_jax.models.core.parallel.tensor_collectives import (
    all_tokens,
    axis_of_shard,
    by_device,
    in_rows,
    product_of_shards,
)
from liger_jax.models.core.remat import ATTENTION_INPUT, Remat
from liger_jax.models.core.row_tokens import RowTokens
from liger_jax.models.core.tiles import over_tokens
from liger_jax.ops.decode_attention import DECODERS, decode_attention


def in_one_product(x: Float[Array, "*rows D"], *projections: Any) -> list[Array]:
    """Projects an input several ways by one product with all weights, which also gives one gradient of the input.

    `*projections`: layers of `Blocks.linear`. If one has been replaced, for example by a `nnx.LoRALinear`, by a layer
    of another dtype or by one with its own product, each projection is called separately.
    """
    first = projections[0]
    alike = lambda projection: projection.dtype == first.dtype and projection.precision is None
    if not all(is_plain_product(projection) and alike(projection) for projection in projections):
        of_adapted = getattr(type(first), "several", None)
        return (of_adapted and of_adapted(x, projections)) or [projection(x) for projection in projections]
    kernel = jnp.concatenate([projection.kernel[...] for projection in projections], axis=1)
    ends = list(itertools.accumulate(projection.kernel.shape[1] for projection in projections))
    # The barrier holds for the gradient too, so that XLA concatenates it once. Without the barrier XLA concatenates it
    # for each of the two products that read it: 142 µs against 110 in a layer of Llama-3.2-1B, 8 × 2,048, on an H200.
    packed = jax.lax.optimization_barrier(x.astype(first.dtype) @ kernel.astype(first.dtype))
    outputs = jnp.split(packed, ends[:-1], axis=-1)
    of_rows = lambda bias: jnp.expand_dims(bias[...].astype(first.dtype), tuple(range(x.ndim - 1)))
    return [
        output if projection.bias is None else output + of_rows(projection.bias)
        for output, projection in zip(outputs, projections, strict=True)
    ]


class Attention(nnx.Module):
    """Grouped-query causal self-attention with rotary positions."""

    def __init__(
        self,
        config: Any,
        kernels: KernelOptions,
        *,
        linear: Callable[..., Any],  # `nnx.Linear`, or what may replace it
        norm: Callable[[int], Any],
        parameter: Callable[[int], nnx.Param],
        remat: Remat = "none",
    ):
        self.kernels, self.remat = kernels, remat
        width, self.head_width = config.hidden_size, config.head_dim
        query_width, kv_width = (n * self.head_width for n in (config.num_attention_heads, config.num_key_value_heads))
        self.has_qkv, self.is_gated = config.fused_qkv, config.gates_attention
        qkv_bias = config.qkv_bias or config.attention_bias
        self.owner = config.takes_keys_of
        if self.owner is not None:
            self.q_proj = linear(width, query_width, use_bias=qkv_bias)
        elif self.has_qkv:
            self.qkv_proj = linear(width, query_width + 2 * kv_width, use_bias=qkv_bias)
        else:
            self.q_proj = linear(width, (2 if config.gates_attention else 1) * query_width, use_bias=qkv_bias)
            self.k_proj = linear(width, kv_width, use_bias=qkv_bias)
            self.v_proj = None if config.shares_keys_with_values else linear(width, kv_width, use_bias=qkv_bias)
        self.out_name, self.norm_names = config.output_name, config.qk_norm_names
        setattr(self, self.out_name, linear(query_width, width, use_bias=config.output_bias))
        self.norm_is_wide = config.qk_norm_is_wide
        norm_widths = (query_width, kv_width) if self.norm_is_wide else (self.head_width, self.head_width)
        self.norms_rotated = config.norms_rotated
        has_norms = config.qk_norm, config.qk_norm and self.owner is None
        for name, norm_width, has_norm in zip(self.norm_names, norm_widths, has_norms, strict=True):
            setattr(self, name, norm(norm_width) if has_norm else None)
        self.value_eps = config.rms_norm_eps if config.norms_values else None
        self.sinks = parameter(config.num_attention_heads) if config.has_sinks else None
        self.rope_layout = config.rope_layout
        self.scale, self.softcap = config.attention_scale, config.attn_logit_softcapping

    def __call__(
        self,
        x: Float[Array, "B own D"],
        cos: Float[Array, "#B T R"] | None,
        sin: Float[Array, "#B T R"] | None,
        rows: RowTokens | None,
        window: int | None,
        cache: LayerCache | None = None,
    ) -> Float[Array, "B own D"]:
        return self.with_keys(x, cos, sin, rows, window, cache)[0]

    def with_keys(
        self,
        x: Float[Array, "B own D"],
        cos: Float[Array, "#B T R"] | None,
        sin: Float[Array, "#B T R"] | None,
        rows: RowTokens | None,
        window: int | None,
        cache: LayerCache | None = None,
        *,
        given: tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]] | None = None,
    ) -> tuple[Float[Array, "B own D"], tuple[Float[Array, "B T K H"], Float[Array, "B T K H"]]]:
        """Returns the keys and values too, with which a later layer may be `given` them; it makes none."""
        layout, o_proj = self.kernels.mesh_layout, getattr(self, self.out_name)
        tensor, heads_lie = axis_of_shard(layout.tensor, o_proj), layout.in_attention
        norms = [getattr(self, name) for name in self.norm_names]
        q_norm, k_norm = (None, None) if self.norms_rotated else norms

        def heads(y):
            y = in_rows(y, tensor)
            return y.reshape(*y.shape[:2], y.shape[2] // self.head_width, self.head_width)

        q, k, v = self._projected(x, tensor)
        gate = None
        if self.is_gated:  # a head's gate follows its query
            q, gate = jnp.split(q.reshape(*q.shape[:2], -1, 2 * self.head_width), 2, axis=-1)
            q, gate = (array.reshape(*array.shape[:2], -1) for array in (q, gate))
        if given is None:
            v = heads(v) if self.value_eps is None else plain.normalised(heads(v), self.value_eps)
        if given is not None:
            q = heads(q) if q_norm is None else q_norm(heads(q))
        elif q_norm is None or k_norm is None:
            q, k = heads(q), heads(k)
        elif self.norm_is_wide:
            q, k = heads(q_norm.of_shard(q, tensor)), heads(k_norm.of_shard(k, tensor))
        else:
            q, k = q_norm(heads(q)), k_norm(heads(k))
        if cos is not None and sin is not None:
            rope = functools.partial(ops.apply_rope if self.kernels.rope else plain.apply_rope, layout=self.rope_layout)
            table_lies = layout.of_all_rows if cos.shape[0] == 1 else layout.in_loss
            specs = heads_lie, heads_lie, table_lies, table_lies
            q, k = layout.run(rope, (q, q if given is not None else k, cos, sin), spec=specs, out=heads_lie)
        if given is not None:
            k, v = given
        if rows is not None and rows.query_scale is not None:
            q = q * rows.query_scale.astype(q.dtype)[..., None]
        if self.norms_rotated:
            q, k = norms[0](q), norms[1](k)
        elif q_norm is None:  # with norms, their inputs are kept for the backward, and q and k are computed again
            q, k, v = checkpoint_name((q, k, v), ATTENTION_INPUT)
        options: dict[str, Any] = dict(window=window, softcap=self.softcap, scale=self.scale)
        segments = None if rows is None else rows.segments
        sequence = layout.sequence_shards()
        sinks = None if self.sinks is None else self.sinks[...]

        def attend(q, k, v, segments, sinks):
            axis = {} if sequence is None else dict(sequence_axis=sequence.axis)
            implementation = self.kernels.attention
            return ops.causal_attention(
                q, k, v, segments, **options, **axis, sinks=sinks, implementation=implementation
            )

        def attend_to_own(q, k, v):
            specs = heads_lie, heads_lie, heads_lie, layout.of_rows
            return layout.run(attend, (q, k, v, segments), (sinks,), spec=specs, out=heads_lie)

        def attend_to_cache(q, keys, values, positions, layer, filled):
            arrays, specs = (q, keys, values, positions), (heads_lie, layout.of_cache, layout.of_cache, layout.of_rows)
            return layout.run(decode, arrays, (layer, filled, sinks), spec=specs, out=heads_lie)

        def decode(q, keys, values, positions, layer, filled, sinks):
            by = self.kernels.attention if self.kernels.attention in DECODERS else None
            cache = keys, values, positions, layer, filled
            return decode_attention(q[:, 0], *cache, **options, sinks=sinks, implementation=by)[:, None]

        if cache is None:
            out = attend_to_own(q, k, v)
        else:
            attends = dict(attend_to_own=attend_to_own, attend_to_cache=attend_to_cache)
            out = cache.attend(q, k, v, **attends, **options, sinks=sinks, owner=self.owner)
        out = out.reshape(*out.shape[:2], out.shape[2] * out.shape[3])
        if gate is not None:
            out = out * jax.nn.sigmoid(in_rows(gate, tensor).astype(jnp.float32)).astype(out.dtype)
        if tensor is not None or cache is not None:
            return product_of_shards(o_proj, by_device(out, tensor), tensor), (k, v)
        return over_tokens(lambda layers, tile: layers[0](tile), (o_proj,), out, self.remat, layout), (k, v)

    def _projected(self, x: Float[Array, "B own D"], tensor: str | None) -> Any:
        """Queries, keys and values before heads are cut: (B, T, …), or of `all_tokens`."""
        if self.owner is not None:
            layers, project = (self.q_proj,), lambda layers, x: (layers[0](x), None, None)
        elif self.has_qkv:
            layers, project = (self.qkv_proj,), lambda layers, x: self._split(layers[0](x))
        elif self.v_proj is None:
            layers = self.q_proj, self.k_proj
            project = lambda layers, x: [*(projected := in_one_product(x, *layers)), projected[1]]
        else:
            layers = self.q_proj, self.k_proj, self.v_proj
            project = lambda layers, x: in_one_product(x, *layers)
        if tensor is not None:  # tiles of own tokens would not come out in rows
            return project(layers, all_tokens(x, tensor))
        return over_tokens(project, layers, x, self.remat, self.kernels.mesh_layout)

    def _split(self, qkv: Float[Array, "B T both"]) -> Any:
        """This device's queries, keys and values from one projection's."""
        query_width = getattr(self, self.out_name).kernel.shape[-2]
        return jnp.split(qkv, [query_width, (query_width + qkv.shape[-1]) // 2], axis=-1)
