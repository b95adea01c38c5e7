"""Normalisation layers: the parameters of the ops of the same names.

`RMSNorm`, `LayerNorm` and `GroupNorm` have Flax's arguments, defaults, parameters and values, and are computed by the
ops. Axes other than the last, or the groups', a mask and statistics over a mesh axis are a `ValueError`.
`use_fast_variance` makes no difference: statistics are accurate, in float32.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from liger_jax import ops


def _adds_to(layer: type[nnx.Module]) -> Callable[[Any], Any]:
    """Gives an `__init__` the signature of a layer of Flax, followed by what it adds to that."""

    def decorate(init: Any) -> Any:
        theirs = inspect.signature(layer.__init__).parameters
        own = [p for p in inspect.signature(init).parameters.values() if p.kind is p.KEYWORD_ONLY]
        init.__signature__ = inspect.Signature([*theirs.values(), *own])
        return init

    return decorate


def _check_options(layer: Any, default_axes: tuple[Any, ...] = (-1, (-1,), [-1])) -> None:
    """Raises a ValueError for an option of Flax that the op does not have. Its variance is accurate, fast or not."""
    refused = {name: getattr(layer, name) for name in ("axis_name", "axis_index_groups")}
    refused = {name: value for name, value in refused.items() if value is not None}
    axes = {name: getattr(layer, name, default_axes[0]) for name in ("reduction_axes", "feature_axes")}
    refused |= {name: value for name, value in axes.items() if value not in default_axes}
    for name, value in refused.items():
        kind = type(layer).__name__
        raise ValueError(
            f"layers.{kind}: {name}={value!r}, but the op has whole rows, of one device. Leave it out, or take "
            f"flax.nnx.{kind}."
        )


def _promoted(layer: Any, x: Any, mask: Any, *parameters: Any) -> tuple[Any, ...]:
    """x and parameters in the dtype of the result, as Flax has it."""
    if mask is not None:
        kind = type(layer).__name__
        raise ValueError(f"layers.{kind}: mask is given, but the op has whole rows. Take flax.nnx.{kind}.")
    return layer.promote_dtype((x, *(None if p is None else p[...] for p in parameters)), dtype=layer.dtype)


class RMSNorm(nnx.RMSNorm):
    """`flax.nnx.RMSNorm` over the last axis, by `ops.rms_norm`.

    Axes other than the last, a mask and statistics over a mesh axis are refused, and `use_fast_variance` makes no
    difference: the mean of squares is accurate.

    Args:
        *args: `num_features`, the axis' size.
        offset: added to `scale`, which is initialised with scale_init's value minus offset; 1.0 for Gemma.
        casting_mode: where the result is rounded: "gemma", once, "llama", before the scale, or "none".
        implementation: as in the op.
        **flax: `epsilon`, `dtype`, `param_dtype`, `use_scale`, `scale_init`, `promote_dtype`, `rngs` and
            `scale_metadata`, as in Flax. With dtype None the result has the promoted dtype of x and scale.

    Example:
        >>> RMSNorm(2, epsilon=0.0, rngs=nnx.Rngs(0))(jnp.array([3.0, 4.0])).tolist()
        [0.849, 1.131]
    """

    @_adds_to(nnx.RMSNorm)
    def __init__(
        self,
        *args: Any,
        offset: float = 0.0,
        casting_mode: str = "gemma",
        implementation: str | tuple[str, ...] | None = None,
        **flax: Any,
    ):
        super().__init__(*args, **flax)
        _check_options(self)
        if offset and self.scale is not None:
            self.scale[...] = self.scale[...] - jnp.asarray(offset, self.param_dtype)
        self.offset, self.casting_mode, self.implementation = offset, casting_mode, implementation

    def __call__(self, x: Float[Array, "*batch D"], mask: Bool[Array, "..."] | None = None) -> Float[Array, "*batch D"]:
        x, scale = _promoted(self, x, mask, self.scale)
        options: dict[str, Any] = dict(eps=self.epsilon, offset=self.offset, casting_mode=self.casting_mode)
        return ops.rms_norm(x, scale, **options, implementation=self.implementation)


class LayerNorm(nnx.LayerNorm):
    """`flax.nnx.LayerNorm` over the last axis, by `ops.layer_norm`.

    Args:
        *args: `num_features`, the axis' size.
        implementation: as in the op.
        **flax: the arguments of `flax.nnx.LayerNorm`, with the exceptions of `RMSNorm`.

    Example:
        >>> LayerNorm(2, epsilon=0.0, rngs=nnx.Rngs(0))(jnp.array([3.0, 5.0])).tolist()
        [-1.0, 1.0]
    """

    @_adds_to(nnx.LayerNorm)
    def __init__(self, *args: Any, implementation: str | tuple[str, ...] | None = None, **flax: Any):
        super().__init__(*args, **flax)
        _check_options(self)
        self.implementation = implementation

    def __call__(
        self, x: Float[Array, "*batch D"], *, mask: Bool[Array, "..."] | None = None
    ) -> Float[Array, "*batch D"]:
        x, scale, bias = _promoted(self, x, mask, self.scale, self.bias)
        return ops.layer_norm(x, scale, bias, eps=self.epsilon, implementation=self.implementation)


class GroupNorm(nnx.GroupNorm):
    """`flax.nnx.GroupNorm` over groups of channels, by `ops.group_norm`.

    Args:
        *args: `num_features`, `num_groups` and `group_size`, as in Flax.
        channel_axis: -1 for Flax's layout, 1 for PyTorch's.
        **flax: the arguments of `flax.nnx.GroupNorm`, with the exceptions of `RMSNorm`.

    Example:
        >>> GroupNorm(4, num_groups=2, epsilon=0.0, rngs=nnx.Rngs(0))(jnp.array([[3.0, 5.0, 1.0, 7.0]])).tolist()
        [[-1.0, 1.0, -1.0, 1.0]]
    """

    @_adds_to(nnx.GroupNorm)
    def __init__(self, *args: Any, channel_axis: int = -1, **flax: Any):
        super().__init__(*args, **flax)
        _check_options(self, default_axes=(None,))
        self.channel_axis = channel_axis

    def __call__(
        self, x: Float[Array, "B *axes"], *, mask: Bool[Array, "..."] | None = None
    ) -> Float[Array, "B *axes"]:
        x, scale, bias = _promoted(self, x, mask, self.scale, self.bias)
        options: dict[str, Any] = dict(num_groups=self.num_groups, eps=self.epsilon, channel_axis=self.channel_axis)
        return ops.group_norm(x, scale, bias, **options)


class DyT(nnx.Module):
    """`ops.dyt`, with the parameters `alpha`, `scale` and `bias`.

    Args:
        num_features: the last axis' size, D.
        init_alpha: the initial value of `alpha`.
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
        epsilon: added to each mean square.
        param_dtype: dtype of the parameters.

    Example:
        >>> PolyNorm(epsilon=0.0)(jnp.array([1.0, -1.0])).tolist()
        [1.0, -0.3333]
    """

    def __init__(self, *, epsilon: float = 1e-6, param_dtype: Any = jnp.float32):
        self.weight = nnx.Param(jnp.full(3, 1 / 3, param_dtype))
        self.bias = nnx.Param(jnp.zeros((), param_dtype))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return ops.poly_norm(x, self.weight, self.bias, eps=self.epsilon)
