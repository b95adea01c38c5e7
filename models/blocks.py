"""The blocks from which the families are put together: norm, gated feed-forward, attention, the stack of layers."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from liger_jax import ops
from liger_jax.layers import SwiGLUMLP
from liger_jax.models import plain
from liger_jax.models.attention import causal_attention
from liger_jax.models.common import KernelOptions

Remat = Literal["none", "full", "dots", "offload"]

_INPUT, _ATTENDED = "layer_input", "attended"


def _more_than_one_pass(primitive: Any, *shapes: Any, **params: Any) -> bool:
    """Whether a result costs more than one pass over memory: all do but norms, gates, rotations and sums."""
    if primitive.name == "pallas_call":
        return not any(kind in params["name"] for kind in ("norm", "glu"))
    if primitive.name == "name":
        return params["name"] == _ATTENDED
    is_cudnn = primitive.name.startswith("dot_product_attention")
    return is_cudnn or jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *shapes, **params)


# What a layer keeps for the backward. With "none" the gated product, which is a third of what a LLaMA would keep, is
# made again in the very pass that makes the gate's gradients, and a norm's output in one pass.
_POLICIES = {
    "none": _more_than_one_pass,
    "full": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


class RMSNorm(nnx.Module):
    """x/√(mean(x²) + eps)·scale over the last axis, LLaMA's rounding.

    Args:
        width: the axis' size, D.
        eps: added to the mean square.
        kernels: whether and how `ops.rms_norm` runs.
        param_dtype: dtype of the scale.
    """

    def __init__(self, width: int, *, eps: float, kernels: KernelOptions, param_dtype: Any):
        self.scale = nnx.Param(jnp.ones(width, param_dtype))
        self.eps, self.kernels = eps, kernels

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        if self.kernels.rms_norm:
            return ops.rms_norm(x, self.scale[...], eps=self.eps, implementation=self.kernels.implementation)
        return plain.rms_norm(x, self.scale[...], self.eps)


class SwiGLU(SwiGLUMLP):
    """down(silu(gate(x))·up(x)).

    Args:
        width: D.
        inner_width: F.
        linear: makes the projections: `linear(in_width, out_width)`.
        kernels: whether and how `ops.swiglu` runs.
    """

    def __init__(
        self, width: int, inner_width: int, *, linear: Callable[[int, int], nnx.Module], kernels: KernelOptions
    ):
        super().__init__(width, inner_width, linear=linear, implementation=kernels.implementation)
        self.kernels = kernels

    def gated(self, gate: Float[Array, "B T F"], up: Float[Array, "B T F"]) -> Float[Array, "B T F"]:
        """silu(gate)·up, by the kernel or without.

        Args:
            gate: (B, T, F), any float dtype.
            up: (B, T, F), any float dtype.

        Returns:
            (B, T, F) in up.dtype.
        """
        return super().gated(gate, up) if self.kernels.glu else plain.swiglu(gate, up)


class Attention(nnx.Module):
    """Grouped-query causal self-attention with rotary positions.

    Args:
        width: D.
        query_heads: Q.
        kv_heads: K, a divisor of Q.
        head_width: H.
        qkv_bias: whether queries, keys and values have a bias.
        linear: makes the projections: `linear(in_width, out_width, use_bias=…)`.
        kernels: whether and how `ops.apply_rope` runs.
    """

    def __init__(
        self,
        width: int,
        *,
        query_heads: int,
        kv_heads: int,
        head_width: int,
        qkv_bias: bool,
        linear: Callable[..., nnx.Module],
        kernels: KernelOptions,
    ):
        self.q_proj = linear(width, query_heads * head_width, use_bias=qkv_bias)
        self.k_proj = linear(width, kv_heads * head_width, use_bias=qkv_bias)
        self.v_proj = linear(width, kv_heads * head_width, use_bias=qkv_bias)
        self.o_proj = linear(query_heads * head_width, width, use_bias=False)
        self.head_width, self.kernels = head_width, kernels

    def __call__(
        self,
        x: Float[Array, "B T D"],
        cos: Float[Array, "#B T H"],
        sin: Float[Array, "#B T H"],
        segment_ids: Int[Array, "B T"] | None,
    ) -> Float[Array, "B T D"]:
        def heads(y):
            return y.reshape(*y.shape[:2], -1, self.head_width)

        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        if self.kernels.rope:
            q, k = ops.apply_rope(q, k, cos, sin, implementation=self.kernels.implementation)
        else:
            q, k = plain.apply_rope(q, k, cos, sin)
        q, k, v = checkpoint_name((q, k, v), _ATTENDED)
        out = checkpoint_name(causal_attention(q, k, v, segment_ids), _ATTENDED)
        return self.o_proj(out.reshape(*x.shape[:2], -1))


class LayerStack(nnx.Module):
    """Equal layers one after the other: a scan over stacked parameters, or a Python loop.

    Both start from the same random numbers. A scan compiles the body once, and holds the gradients of all
    layers until the optimizer runs.

    Args:
        make_layer: makes one layer from its `rngs`.
        length: L.
        scan: stack the parameters along a leading axis L and scan over it.
        remat: what a layer keeps for the backward: `"none"` all but norms, gates and sums, which one pass over memory
            makes again; `"full"` only its input; `"dots"` its matrix products too; `"offload"` its input, in the
            host's memory.
        rngs: source of the layers' keys.

    Raises:
        ValueError: `remat` is unknown.
    """

    layers: Any  # one layer with stacked parameters, or an nnx.List of layers

    def __init__(
        self, make_layer: Callable[[nnx.Rngs], nnx.Module], length: int, *, scan: bool, remat: Remat, rngs: nnx.Rngs
    ):
        if remat not in _POLICIES:
            raise ValueError(f"remat={remat!r} must be one of {list(_POLICIES)}.")
        keys = jax.random.split(rngs.params(), length)
        self.scan, self.remat = scan, remat
        if scan:
            self.layers = nnx.vmap(lambda key: make_layer(nnx.Rngs(key)))(keys)
        else:
            self.layers = nnx.List([make_layer(nnx.Rngs(key)) for key in keys])

    def __call__(self, x: Float[Array, "B T D"], *shared: Any) -> Float[Array, "B T D"]:
        def layer_call(graphdef):
            def call(x, state):
                return nnx.merge(graphdef, state)(checkpoint_name(x, _INPUT), *shared)

            # A scan's loop keeps the recomputation apart from the forward by itself: no barriers needed.
            return jax.checkpoint(call, prevent_cse=not self.scan, policy=_POLICIES[self.remat])

        if not self.scan:
            for layer in self.layers:
                graphdef, state = nnx.split(layer)
                x = layer_call(graphdef)(x, state)
            return x
        graphdef, stacked = nnx.split(self.layers)
        call = layer_call(graphdef)
        return jax.lax.scan(lambda x, state: (call(x, state), None), x, stacked)[0]
