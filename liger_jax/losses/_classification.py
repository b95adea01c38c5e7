"""Classification losses with optax's signatures."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Integer

from liger_jax.ops import checks, loss_terms
from liger_jax.ops.checks import ArrayLike
from liger_jax.ops.cross_entropy import reduced_cross_entropy

_OP = "softmax_cross_entropy_with_integer_labels"
_OPTIONS = loss_terms.LossOptions(_OP, None, 0.0, 0.0, 1.0, None, "none")


def softmax_cross_entropy_with_integer_labels(
    logits: Float[ArrayLike, "..."],
    labels: Integer[ArrayLike, "..."],
    axis: int | tuple[int, ...] = -1,
    where: Bool[ArrayLike, "..."] | None = None,
) -> Float[Array, "..."]:
    """Drop-in for `optax.softmax_cross_entropy_with_integer_labels`: lse − z_y for each example.

    The logits are read once in the forward and once in the backward, and no other array of their size is kept. The
    arithmetic is float32 for any input dtype. It differs from optax in one point: a label outside [0, classes) gives
    NaN, where optax silently scores −1 as the last class.

    Args:
        logits: (..., classes, ...), any float dtype.
        labels: integers in [0, classes), the shape of `logits` without `axis`.
        axis: the axis of the classes; or several axes, and labels are then flat indices into these axes in this order.
        where: bool, broadcast to the shape of `labels` or `logits`, whichever has as many axes. With the axes of
            `labels`, it says which examples count; the others have loss 0. With the axes of `logits`, it says which
            classes count; the others are left out of lse.

    Returns:
        The loss of each example: the shape of `labels`, logits.dtype.

    Example:
        >>> logits = jnp.array([[1.0, 3.0], [2.0, 2.0]])
        >>> softmax_cross_entropy_with_integer_labels(logits, jnp.array([0, 1])).tolist()
        [2.1269, 0.6931]
    """
    (logits,) = checks.floating(_OP, logits=logits)
    labels, where = loss_terms.as_arrays(_OP, labels, where=where)
    class_axes = _class_axes(axis, logits.ndim)
    batch_axes = tuple(a for a in range(logits.ndim) if a not in class_axes)
    batch_shape = tuple(logits.shape[a] for a in batch_axes)
    num_classes = math.prod(logits.shape[a] for a in class_axes)
    classes_last = lambda x: x.transpose(batch_axes + class_axes).reshape(*batch_shape, num_classes)
    z = classes_last(logits)
    loss_terms.check_tokens(_OP, labels, None, None, None, batch_shape, num_classes)
    if where is not None:
        whole = logits.shape if where.ndim == logits.ndim else batch_shape
        fits = where.ndim == len(whole) and all(n in (1, size) for n, size in zip(where.shape, whole, strict=True))
        where = jnp.broadcast_to(where, whole) if fits else where
    if where is not None and where.shape == logits.shape and logits.shape != batch_shape:
        return _over_some_classes(z, labels, classes_last(where)).astype(logits.dtype)
    loss_terms.check_tokens(_OP, labels, where, None, None, batch_shape, num_classes)
    return reduced_cross_entropy(z, labels, where, None, None, _OPTIONS).astype(logits.dtype)


def _class_axes(axis: int | tuple[int, ...], ndim: int) -> tuple[int, ...]:
    axes = (axis,) if isinstance(axis, int) else axis
    if not isinstance(axes, tuple) or not all(isinstance(a, int) for a in axes):
        raise TypeError(f"{_OP}: axis={axis!r} must be an int or a tuple of ints.")
    if not all(-ndim <= a < ndim for a in axes) or len({a % ndim for a in axes}) != len(axes):
        raise ValueError(f"{_OP}: axis={axis!r} must name different axes of the logits, which have {ndim}.")
    return tuple(a % ndim for a in axes)


def _over_some_classes(z: jax.Array, labels: jax.Array, where: jax.Array) -> jax.Array:
    """The loss with lse over some classes, in plain XLA. As in optax, a label may be one of the other classes."""
    checks.check_bool(_OP, "where", where)
    z = z.astype(jnp.float32)
    in_range = (labels >= 0) & (labels < z.shape[-1])
    target = jnp.take_along_axis(z, jnp.where(in_range, labels, 0)[..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(z, axis=-1, where=where) - jnp.where(in_range, target, jnp.nan)
    return jnp.where(jnp.any(where, axis=-1), losses, 0.0)
