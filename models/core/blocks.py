"""The blocks from which the families' layers are put together: norm, gated feed-forward, attention."""

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
from liger_jax.layers import GeGLUMLP, SwiGLUMLP
from liger_jax.models.core import plain
from liger_jax.models.core.cache import LayerCache
from liger_jax.models.core.kernel_options import KernelOptions
from liger_jax.models.core.remat import ATTENDED, Remat
from liger_jax.models.core.sharding import on_batch_shards


class RMSNorm(nnx.Module):
    """x/√(mean(x²) + eps)·(offset + scale) over the last axis.

    Args:
        width: the axis' size.
        eps: added to the mean square.
        offset: added to the scale, which starts at 1 − offset.
        casting_mode: where `ops.rms_norm` rounds, "llama" or "gemma".
        kernels: whether and how that op, and its fusion with a sum before it, run.
        param_dtype: dtype of the scale.
    """

    def __init__(
        self, width: int, *, eps: float, offset: float, casting_mode: str, kernels: KernelOptions, param_dtype: Any
    ):
        self.scale = nnx.Param(jnp.full(width, 1.0 - offset, param_dtype))
        self.eps, self.offset, self.casting_mode, self.kernels = eps, offset, casting_mode, kernels

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        return self._run(ops.rms_norm if self.kernels.rms_norm else plain.rms_norm, x)

    def fork(self, x: Float[Array, "*rows D"]) -> Any:
        """Normalises the residual stream and hands it on; where kernels run, one pass makes the gradient by both.

        Args:
            x: the stream.

        Returns:
            The normalised stream, and the stream.
        """
        return self._fused(x, None)

    def add(self, x: Float[Array, "*rows D"], residual: Float[Array, "*rows D"]) -> Any:
        """Adds to the residual stream and normalises it, in one pass.

        Args:
            x: what a sublayer made.
            residual: the stream that it is added to.

        Returns:
            The normalised sum, and the sum.
        """
        return self._fused(x, residual)

    def _fused(self, x: Array, residual: Array | None) -> Any:
        fused = ops.fused_add_rms_norm if self.kernels.rms_norm else plain.fused_add_rms_norm
        return self._run(fused, x, residual)

    def _run(self, norm: Callable[..., Any], *rows: Array | None) -> Any:
        options: dict[str, Any] = dict(eps=self.eps, offset=self.offset, casting_mode=self.casting_mode)
        if self.kernels.rms_norm:
            options["implementation"] = self.kernels.implementation
        norm = functools.partial(norm, **options)
        return on_batch_shards(norm, self.kernels.batch_axes, rows, (self.scale[...],))


def _may_fuse(kernels: KernelOptions, remat: Remat, scan: bool) -> bool:
    """Whether a feed-forward is one op: where gate and up are made again or layers unrolled, and on one device.

    Kept ones come out of a scan's stack, and a kernel reads a copy: 3 % of a LLaMA's step. On a mesh, products stay
    with the compiler: in a shard_map, a step on 8 H200 would take 6 % more memory. What pays is measured on an H200.
    """
    kept = remat == "none" and not scan
    return kernels.glu and not kernels.batch_axes and (kept or remat in ("full", "offload"))


class _SwiGLU(SwiGLUMLP):
    kernels: KernelOptions

    def gated(self, gate, up):
        gated = super().gated if self.kernels.glu else plain.swiglu
        return on_batch_shards(gated, self.kernels.batch_axes, (gate, up))


class _GeGLU(GeGLUMLP):
    kernels: KernelOptions

    def gated(self, gate, up):
        gated = super().gated if self.kernels.glu else plain.geglu
        return on_batch_shards(gated, self.kernels.batch_axes, (gate, up))


_MLPS = {"silu": _SwiGLU, "gelu_tanh": _GeGLU}  # by the config's gate


def in_one_product(x: Float[Array, "*rows D"], *projections: Any) -> list[Array]:
    """What projections make of the same input: one product with all their weights, and one gradient by the input.

    Args:
        x: (..., D).
        *projections: those of `Blocks.linear`; where one of them is something else by now, such as a `nnx.LoRALinear`
            or a layer of another dtype, each is called by itself.

    Returns:
        An array for each.
    """
    first = projections[0]
    if not all(type(projection) is nnx.Linear and projection.dtype == first.dtype for projection in projections):
        return [projection(x) for projection in projections]
    kernel = jnp.concatenate([projection.kernel[...] for projection in projections], axis=1)
    ends = list(itertools.accumulate(projection.out_features for projection in projections))
    # The gradient meets a barrier as well, and is put together once. Without it XLA does so for each of the two
    # products that read it: on an H200 142 µs in a layer of Llama-3.2-1B, 8 × 2,048, with it 110.
    packed = jax.lax.optimization_barrier(x.astype(first.dtype) @ kernel.astype(first.dtype))
    parts = jnp.split(packed, ends[:-1], axis=-1)
    return [
        part if projection.bias is None else part + projection.bias[...].astype(first.dtype)
        for part, projection in zip(parts, projections, strict=True)
    ]


class Attention(nnx.Module):
    """Grouped-query causal self-attention with rotary positions, by the sizes and options of a config.

    Args:
        blocks: makes projections and norms.
    """

    def __init__(self, blocks: "Blocks"):
        config, self.kernels = blocks.config, blocks.kernels
        width, self.head_width = config.hidden_size, config.head_dim
        query_width, kv_width = (n * self.head_width for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = blocks.linear(width, query_width, use_bias=config.qkv_bias)
        self.k_proj = blocks.linear(width, kv_width, use_bias=config.qkv_bias)
        self.v_proj = blocks.linear(width, kv_width, use_bias=config.qkv_bias)
        self.o_proj = blocks.linear(query_width, width)
        self.q_norm = blocks.norm(self.head_width) if config.qk_norm else None
        self.k_norm = blocks.norm(self.head_width) if config.qk_norm else None
        self.scale, self.softcap = config.attention_scale, config.attn_logit_softcapping

    def __call__(
        self,
        x: Float[Array, "B T D"],
        cos: Float[Array, "#B T H"],
        sin: Float[Array, "#B T H"],
        segments: ops.Segments | None,
        window: int | None,
        cache: LayerCache | None = None,
    ) -> Float[Array, "B T D"]:
        def heads(y):
            return y.reshape(*y.shape[:2], y.shape[2] // self.head_width, self.head_width)

        q, k, v = map(heads, in_one_product(x, self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        rope = plain.apply_rope
        if self.kernels.rope:
            rope = functools.partial(ops.apply_rope, implementation=self.kernels.implementation)
        of_batch, shared = ((q, k), (cos, sin)) if cos.shape[0] == 1 else ((q, k, cos, sin), ())
        q, k = on_batch_shards(rope, self.kernels.batch_axes, of_batch, shared)
        if self.q_norm is None:  # else the projections are kept, for the norms' gradients, and these made of them
            q, k, v = checkpoint_name((q, k, v), ATTENDED)
        options = dict(window=window, softcap=self.softcap, scale=self.scale)
        if cache is None:
            attend = functools.partial(ops.causal_attention, **options, implementation=self.kernels.attention)
            out = on_batch_shards(attend, self.kernels.batch_axes, (q, k, v, segments))
        else:
            out = cache.attend(q, k, v, **options)
        return self.o_proj(out.reshape(*x.shape[:2], out.shape[2] * out.shape[3]))


class Blocks:
    """Makes the blocks of one layer as a config asks for them.

    Args:
        config: the architecture, a `LlamaConfig` or one that derives from it.
        kernels: which ops run as kernels.
        dtype: of the computation.
        param_dtype: of the parameters.
        rngs: source of the projections' keys; `None` where only norms are made.
        remat: what the layer keeps for the backward.
        scan: whether layers are scanned.
    """

    def __init__(
        self,
        config: Any,
        kernels: KernelOptions,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs | None = None,
        remat: Remat = "none",
        scan: bool = True,
    ):
        self.config, self.kernels, self.dtype, self.param_dtype = config, kernels, dtype, param_dtype
        self.rngs, self.remat, self.scan = rngs, remat, scan

    def linear(self, in_width: int, out_width: int, *, use_bias: bool = False) -> nnx.Linear:
        """A projection.

        Args:
            in_width: of what comes.
            out_width: of what goes.
            use_bias: whether it adds a bias.

        Returns:
            A layer whose kernel is (in_width, out_width).
        """
        return nnx.Linear(
            in_width,
            out_width,
            use_bias=use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=nnx.initializers.normal(self.config.initializer_range),
            rngs=self.rngs,
        )

    def norm(self, width: int | None = None) -> RMSNorm:
        """A norm.

        Args:
            width: of the axis; `None` for D.

        Returns:
            A layer with a scale.
        """
        return RMSNorm(
            self.config.hidden_size if width is None else width,
            eps=self.config.rms_norm_eps,
            offset=self.config.norm_offset,
            casting_mode=self.config.norm_casting_mode,
            kernels=self.kernels,
            param_dtype=self.param_dtype,
        )

    def attention(self) -> Attention:
        """Self-attention.

        Returns:
            A layer from hidden states to what is added to them.
        """
        return Attention(self)

    def mlp(self) -> SwiGLUMLP | GeGLUMLP:
        """The gated feed-forward.

        Returns:
            A layer from hidden states to what is added to them.
        """
        layer = _MLPS[self.config.gate](
            self.config.hidden_size,
            self.config.intermediate_size,
            linear=self.linear,
            fused=_may_fuse(self.kernels, self.remat, self.scan),
            recomputed=self.remat != "none",
            implementation=self.kernels.implementation,
        )
        layer.kernels = self.kernels
        return layer
