"""The blocks that a family's layer is made of: norm, feed-forward, attention."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from liger_jax import ops
from liger_jax.models.core import plain
from liger_jax.models.core.attention import Attention
from liger_jax.models.core.experts import EXPERTS
from liger_jax.models.core.feed_forward import DENSE, FEED_FORWARDS, SharedExpertFeedForward
from liger_jax.models.core.kernel_options import KernelOptions
from liger_jax.models.core.remat import Remat


class RMSNorm(nnx.Module):
    """x/√(mean(x²) + eps)·(offset + scale) over the last axis; the scale starts at 1 − offset."""

    def __init__(
        self, width: int, *, eps: float, offset: float, casting_mode: str, kernels: KernelOptions, param_dtype: Any
    ):
        self.scale = nnx.Param(jnp.full(width, 1.0 - offset, param_dtype))
        self.eps, self.offset, self.casting_mode, self.kernels = eps, offset, casting_mode, kernels

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        return self._run(ops.rms_norm if self.kernels.rms_norm else plain.rms_norm, x)

    def of_shard(self, x: Float[Array, "*rows own"], axis: str | None) -> Float[Array, "*rows own"]:
        """Normalises rows whose columns and scale a mesh axis splits in `jax.shard_map`; `None` for whole rows."""
        if axis is None:
            return self(x)
        options: dict[str, Any] = dict(eps=self.eps, offset=self.offset, casting_mode=self.casting_mode)
        return plain.rms_norm(x, self.scale[...], **options, axis=axis)

    def fork(self, x: Float[Array, "*rows D"]) -> Any:
        """Normalises the residual stream and returns the stream too, so that one kernel sums the gradients of both."""
        return self._fused(x, None)

    def add(self, x: Float[Array, "*rows D"], residual: Float[Array, "*rows D"]) -> Any:
        """Adds a sublayer's output to the residual stream, and returns the normalised sum and the sum, in one pass."""
        return self._fused(x, residual)

    def _fused(self, x: Array, residual: Array | None) -> Any:
        fused = ops.fused_add_rms_norm if self.kernels.rms_norm else plain.fused_add_rms_norm
        return self._run(fused, x, residual)

    def _run(self, norm: Callable[..., Any], *activations: Array | None) -> Any:
        options: dict[str, Any] = dict(eps=self.eps, offset=self.offset, casting_mode=self.casting_mode)
        if self.kernels.rms_norm:
            options["implementation"] = self.kernels.implementation
        norm = functools.partial(norm, **options)
        return self.kernels.mesh_layout.run(norm, activations, (self.scale[...],))


class Blocks:
    """Makes the blocks of one layer from a config."""

    def __init__(
        self,
        config: Any,
        kernels: KernelOptions,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs | None = None,
        remat: Remat = "none",
        scan: bool = True,
        feed_forward: str = DENSE,
        is_recurrent: bool = False,
    ):
        self.config, self.kernels, self.dtype, self.param_dtype = config, kernels, dtype, param_dtype
        self.rngs, self.remat, self.scan = rngs, remat, scan
        self.feed_forward, self.is_recurrent = feed_forward, is_recurrent  # of which kinds they are

    def linear(self, in_width: int, out_width: int, *, use_bias: bool = False) -> nnx.Linear:
        """Makes a projection."""
        return nnx.Linear(
            in_width,
            out_width,
            use_bias=use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=nnx.initializers.normal(self.config.initializer_range),
            rngs=self.rngs,
        )

    def parameter(self, *shape: int) -> nnx.Param:
        """Makes a parameter that belongs to no projection."""
        normal = nnx.initializers.normal(self.config.initializer_range)
        assert self.rngs is not None
        return nnx.Param(normal(self.rngs.params(), shape, self.param_dtype))

    def norm(self, width: int | None = None) -> RMSNorm:
        """Makes a norm."""
        return RMSNorm(
            self.config.hidden_size if width is None else width,
            eps=self.config.rms_norm_eps,
            offset=self.config.norm_offset,
            casting_mode=self.config.norm_casting_mode,
            kernels=self.kernels,
            param_dtype=self.param_dtype,
        )

    def attention(self) -> Attention:
        """Makes the self-attention."""
        made_by = dict(linear=self.linear, norm=self.norm, parameter=self.parameter)
        return Attention(self.config, self.kernels, **made_by, remat=self.remat)

    def mlp(self) -> Any:
        """Makes the feed-forward of the layer's kind.

        Returns a layer from (B, T, D) to (B, T, D) and its sums over tokens.
        """
        experts = self.config.experts
        has_shared = self.feed_forward == EXPERTS and experts is not None and experts.shared_width
        return SharedExpertFeedForward(self) if has_shared else FEED_FORWARDS[self.feed_forward](self)
