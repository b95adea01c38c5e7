"""Normalisation layers: the parameters of the ops of the same names.

Parameters are called as in Flax, `scale` and `bias`; statistics are computed in float32, and results have the input's
dtype.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from liger_jax import ops


class RMSNorm(nnx.Module):
    """`ops.rms_norm` over the last axis, with the parameter `scale`.

    Args:
        num_features: the axis' size, D.
        eps: added to the mean square.
        offset: added to the scale, which starts at 1 − offset; 1.0 for Gemma.
        casting_mode: where the result is rounded, "llama", "gemma" or "none".
        param_dtype: dtype of `scale`.
        implementation: as the op takes it.

    Example:
        >>> RMSNorm(2, eps=0.0)(jnp.array([3.0, 4.0])).tolist()
        [0.849, 1.131]
    """

    def __init__(
        self,
        num_features: int,
        *,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        param_dtype: Any = jnp.float32,
        implementation: str | tuple[str, ...] | None = None,
    ):
        self.scale = nnx.Param(jnp.full(num_features, 1.0 - offset, param_dtype))
        self.eps, self.offset, self.casting_mode, self.implementation = eps, offset, casting_mode, implementation

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        options = {"eps": self.eps, "offset": self.offset, "casting_mode": self.casting_mode}
        return ops.rms_norm(x, self.scale, **options, implementation=self.implementation)


class LayerNorm(nnx.Module):
    """`ops.layer_norm` over the last axis, with the parameters `scale` and `bias`.

    Args:
        num_features: the axis' size, D.
        eps: added to the variance.
        use_bias: False for no `bias`.
        param_dtype: dtype of the parameters.
        implementation: as the op takes it.

    Example:
        >>> LayerNorm(2, eps=0.0)(jnp.array([3.0, 5.0])).tolist()
        [-1.0, 1.0]
    """

    def __init__(
        self,
        num_features: int,
        *,
        eps: float = 1e-6,
        use_bias: bool = True,
        param_dtype: Any = jnp.float32,
        implementation: str | tuple[str, ...] | None = None,
    ):
        self.scale = nnx.Param(jnp.ones(num_features, param_dtype))
        self.bias = nnx.Param(jnp.zeros(num_features, param_dtype)) if use_bias else None
        self.eps, self.implementation = eps, implementation

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return ops.layer_norm(x, self.scale, self.bias, eps=self.eps, implementation=self.implementation)


class GroupNorm(nnx.Module):
    """`ops.group_norm` over groups of channels, with the parameters `scale` and `bias`.

    Args:
        num_features: the number of channels, C.
        num_groups: a divisor of C.
        eps: added to the variance.
        channel_axis: 1 as in PyTorch, -1 for Flax's layout.
        param_dtype: dtype of the parameters.

    Example:
        >>> GroupNorm(4, num_groups=2, eps=0.0)(jnp.array([[3.0, 5.0, 1.0, 7.0]])).tolist()
        [[-1.0, 1.0, -1.0, 1.0]]
    """

    def __init__(
        self,
        num_features: int,
        num_groups: int,
        *,
        eps: float = 1e-6,
        channel_axis: int = 1,
        param_dtype: Any = jnp.float32,
    ):
        self.scale = nnx.Param(jnp.ones(num_features, param_dtype))
        self.bias = nnx.Param(jnp.zeros(num_features, param_dtype))
        self.num_groups, self.eps, self.channel_axis = num_groups, eps, channel_axis

    def __call__(self, x: Float[Array, "B *axes"]) -> Float[Array, "B *axes"]:
        options = {"num_groups": self.num_groups, "eps": self.eps, "channel_axis": self.channel_axis}
        return ops.group_norm(x, self.scale, self.bias, **options)


class DyT(nnx.Module):
    """`ops.dyt`, with the parameters `alpha`, `scale` and `bias`.

    Args:
        num_features: the last axis' size, D.
        init_alpha: where `alpha` starts.
        use_bias: False for no `bias`.
        param_dtype: dtype of the parameters.

    Example:
        >>> DyT(2)(jnp.array([0.0, 2.0])).tolist()
        [0.0, 0.7616]
    """

    def __init__(
        self, num_features: int, *, init_alpha: float = 0.5, use_bias: bool = True, param_dtype: Any = jnp.float32
    ):
        self.alpha = nnx.Param(jnp.full((), init_alpha, param_dtype))
        self.scale = nnx.Param(jnp.ones(num_features, param_dtype))
        self.bias = nnx.Param(jnp.zeros(num_features, param_dtype)) if use_bias else None

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return ops.dyt(x, self.alpha, self.scale, self.bias)


class PolyNorm(nnx.Module):
    """`ops.poly_norm` over the last axis, with the parameters `weight`, a third each, and `bias`.

    Args:
        eps: added to each mean square.
        param_dtype: dtype of the parameters.

    Example:
        >>> PolyNorm(eps=0.0)(jnp.array([1.0, -1.0])).tolist()
        [1.0, -0.3333]
    """

    def __init__(self, *, eps: float = 1e-6, param_dtype: Any = jnp.float32):
        self.weight = nnx.Param(jnp.full(3, 1 / 3, param_dtype))
        self.bias = nnx.Param(jnp.zeros((), param_dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return ops.poly_norm(x, self.weight, self.bias, eps=self.eps)
