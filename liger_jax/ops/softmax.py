"""Softmax and sparsemax."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from liger_jax.ops import _explicit, checks
from liger_jax.ops.checks import ArrayLike
from liger_jax.ops.kernels import Implementation, only_xla
from liger_jax.pallas_kernels.tiles import in_float32

_KERNELS = {op: only_xla(op) for op in ("softmax", "sparsemax")}


@jax.checkpoint
def _softmax(x):
    return jax.nn.softmax(in_float32(x), axis=-1).astype(x.dtype)


@jax.checkpoint
def _projected(x, outside, count):
    """max(x − τ, 0) over the last axis. Beside the support τ is linear in x: only the support is kept."""
    x32 = in_float32(x)
    shifted = x32 - jax.lax.stop_gradient(jnp.max(x32, axis=-1, keepdims=True))
    threshold = (jnp.sum(jnp.where(outside, 0.0, shifted), axis=-1, keepdims=True) - 1.0) / count
    return jnp.where(outside, 0.0, shifted - threshold).astype(x.dtype)


def _sparsemax(x):
    x32 = in_float32(jax.lax.stop_gradient(x))
    # τ is −1 or more, so that values below −1 make no difference.
    clipped = jnp.maximum(x32 - jnp.max(x32, axis=-1, keepdims=True), -1.0)
    descending = jnp.sort(clipped, axis=-1, stable=False, descending=True)
    ranks = jax.lax.broadcasted_iota(descending.dtype, x.shape, x.ndim - 1) + 1.0
    # x₍ₖ₎ is in the support if Σ_{j ≤ k} (x₍ⱼ₎ − x₍ₖ₎) < 1. Where x₍ₖ₎ = −1 the sum is 1 or more, in any rounding.
    inside = (1.0 + ranks * descending > jnp.cumsum(descending, axis=-1)) & (descending > -1.0)
    count = jnp.sum(inside.astype(x32.dtype), axis=-1, keepdims=True)
    threshold = (jnp.sum(jnp.where(inside, descending, 0.0), axis=-1, keepdims=True) - 1.0) / count
    return _projected(x, clipped <= threshold, count)


def softmax(
    x: Float[ArrayLike, "..."],
    axis: int | tuple[int, ...] | None = -1,
    where: Bool[ArrayLike, "..."] | None = None,
    *,
    implementation: Implementation = None,
) -> Float[Array, "..."]:
    """Turns scores into probabilities: y_i = exp(x_i) / Σ_j exp(x_j) along an axis.

    It is `jax.nn.softmax` computed in float32: value and gradient are rounded once. The largest score is subtracted
    from all scores first. Only `x` is kept for the backward pass.

    Args:
        x: at least one axis, any float dtype. A score of −inf gets probability 0; if all are −inf,
            probabilities are NaN, as in `jax.nn.softmax`.
        axis: the axis of the sum, several, or None for all.
        where: bool, which scores count, of a shape that broadcasts to x's; others get probability 0. None counts all.
        implementation: None or "xla".

    Returns:
        An array like `x`.

    Example:
        >>> softmax(jnp.log(jnp.array([1.0, 3.0]))).tolist()
        [0.25, 0.75]

    References:
        Bridle, "Probabilistic Interpretation of Feedforward Classification Network Outputs", 1990.
    """
    op = "softmax"
    (x,) = checks.floating(op, x=x)
    if where is not None:
        where = checks.broadcast_mask(op, where, x.shape)
        x = jnp.where(where, x, jnp.asarray(-jnp.inf, x.dtype))
    if axis is not None and _is_axis(axis):
        y = _along_axis(op, x, axis, implementation)
    else:
        axes = tuple(range(x.ndim)) if axis is None else axis
        if not (isinstance(axes, (tuple, list)) and all(map(_is_axis, axes))):
            raise TypeError(f"{op}: axis={axis!r} must be a Python int, a tuple of them, or None for all axes.")
        for each in axes:
            _check_axis(op, x, each)
        if len({each % x.ndim for each in axes}) < len(axes):
            raise ValueError(f"{op}: axis={axis} names an axis of x twice, which has shape {x.shape}; name it once.")
        last = tuple(range(x.ndim - len(axes), x.ndim))
        moved = jnp.moveaxis(x, axes, last)
        shape = moved.shape
        rows = _along_axis(op, moved.reshape(*shape[: x.ndim - len(axes)], -1), -1, implementation)
        y = jnp.moveaxis(rows.reshape(shape), last, axes)
    return y if where is None else jnp.where(where, y, jnp.zeros((), y.dtype))


def sparsemax(
    x: Float[ArrayLike, "..."], *, axis: int = -1, implementation: Implementation = None
) -> Float[Array, "..."]:
    """Turns scores into sparse probabilities: y_i = max(x_i − τ, 0), with τ such that Σ_j y_j = 1 along an axis.

    y is the distribution nearest to x. With S = {i: y_i > 0}, dx_i = dy_i − mean of dy over S for i in S, and 0
    elsewhere. τ is exact: it comes from a sort of the scores. Computed in float32 and rounded once. Only a mask of S is
    kept for the backward pass.

    Args:
        x: at least one axis, any float dtype.
        axis: the axis of the sum, a Python int.
        implementation: None or "xla".

    Returns:
        An array like `x`.

    Example:
        >>> sparsemax(jnp.array([1.0, 0.5, -2.0])).tolist()
        [0.75, 0.25, 0.0]

    References:
        Martins and Astudillo, "From Softmax to Sparsemax: A Sparse Model of Attention and Multi-Label
        Classification", 2016 (arXiv:1602.02068).
    """
    if not _is_axis(axis):
        raise TypeError(f"sparsemax: axis={axis!r} must be a Python int.")
    return _along_axis("sparsemax", x, axis, implementation)


def _along_axis(op: str, x: ArrayLike, axis: int, implementation: Implementation) -> jax.Array:
    (x,) = checks.floating(op, x=x)
    _check_axis(op, x, axis)
    rows = jnp.moveaxis(x, axis, -1)
    if (spec := _explicit.row_spec(rows)) is not None:
        local = functools.partial(_along_axis, op, axis=-1, implementation=implementation)
        return jnp.moveaxis(_explicit.on_rows(op, local, spec, (rows,)), -1, axis)
    _KERNELS[op].choose(implementation, rows, kind=op)
    function = _softmax if op == "softmax" else _sparsemax
    return jnp.moveaxis(function(rows) if rows.size else rows, -1, axis)


def _is_axis(axis: Any) -> bool:
    """Whether it is an int of Python or NumPy."""
    return isinstance(axis, (int, np.integer)) and not isinstance(axis, bool)


def _check_axis(op: str, x: jax.Array, axis: int) -> None:
    if not -x.ndim <= axis < x.ndim:
        cure = "reshape x to (1,)" if x.ndim == 0 else f"pass one in [{-x.ndim}, {x.ndim})"
        raise ValueError(f"{op}: axis={axis} is not an axis of x, which has shape {x.shape}; {cure}.")
