"""Group normalisation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from liger_jax.ops import checks
from liger_jax.ops._powers import shrinking_factor
from liger_jax.ops.checks import ArrayLike
from liger_jax.ops.kernels import Implementation, only_xla
from liger_jax.pallas_kernels.tiles import in_float32, promoted

_OP = "group_norm"
_KERNELS = only_xla(_OP)
_LEAST_VARIANCE = 2.0**-84  # from here on, the derivative of 1 / sqrt is finite in float32


@functools.partial(jax.checkpoint, static_argnums=(3, 4))
def _group_norm(x, scale, bias, axis, eps):
    """x (B, ..., G, K, ...) with its G groups of K channels on `axis`; scale and bias (..., G, K, ...) or None."""
    x32 = in_float32(x)
    over = {"axis": tuple(i for i in range(1, x.ndim) if i != axis), "keepdims": True}
    factor = shrinking_factor(jnp.max(jnp.abs(x32), **over), eps)
    small = x32 * factor
    centred = small - jnp.mean(small, **over)
    # A group of equal large numbers has neither a variance nor an eps · factor² that float32 can hold.
    least = jnp.maximum(jnp.square(eps**0.5 * factor), _LEAST_VARIANCE) if eps else 0.0
    y = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), **over) + least)
    if scale is not None:
        dtype = promoted(y.dtype, scale.dtype)
        y = y.astype(dtype) * scale.astype(dtype)
    return (y if bias is None else y + bias.astype(y.dtype)).astype(x.dtype)


def group_norm(
    x: Float[ArrayLike, "B *axes"],
    scale: Float[ArrayLike, " C"] | None = None,
    bias: Float[ArrayLike, " C"] | None = None,
    *,
    num_groups: int,
    eps: float = 1e-6,
    channel_axis: int = 1,
    implementation: Implementation = None,
) -> Float[Array, "B *axes"]:
    """Normalises each example's channels in groups: y = (x − mean) / sqrt(var + eps) · scale + bias.

    Mean and variance are over a group's channels and all other axes but the first. Computed in float32 and rounded
    once. Only the inputs are kept for the backward pass. XLA is the only implementation.

    Args:
        x: (B, C, ...), any float dtype, or with its C channels on another axis.
        scale: (C,), any float dtype, or None for no scale.
        bias: (C,), any float dtype, or None for no bias.
        num_groups: into how many groups of successive channels C is split, a divisor of C; 1 normalises each example
            as a whole, C each channel of it.
        eps: added to the variance, a finite Python number ≥ 0.
        channel_axis: the axis of the channels: 1 as in PyTorch, -1 for Flax's layout; not 0.
        implementation: None or "xla".

    Returns:
        x's shape and dtype.

    Example:
        >>> group_norm(jnp.array([[3.0, 5.0, 1.0, 7.0]]), num_groups=2, eps=0.0).tolist()
        [[-1.0, 1.0, -1.0, 1.0]]

    References:
        Wu and He, "Group Normalization", 2018 (arXiv:1803.08494).
    """
    x, scale, bias = checks.floating(_OP, "scale", "bias", x=x, scale=scale, bias=bias)
    checks.check_eps(_OP, eps)
    if x.ndim < 2:
        raise ValueError(f"{_OP}: x has shape {x.shape}, but must be (B, C, …); add the missing axis.")
    checks.check_int(_OP, channel_axis=channel_axis)
    checks.check_choice(_OP, "channel_axis", channel_axis, (*range(1, x.ndim), *range(1 - x.ndim, 0)))
    channels = x.shape[channel_axis]
    for name, column in (("scale", scale), ("bias", bias)):
        checks.check_shape(_OP, name, column, (channels,), f"one entry for each channel, on x's axis {channel_axis}")
    if 0 in x.shape[1:]:
        raise ValueError(f"{_OP}: x has shape {x.shape}, whose groups must have elements to normalise; leave x out.")
    if isinstance(num_groups, bool) or not isinstance(num_groups, (int, np.integer)):
        raise TypeError(f"{_OP}: num_groups={num_groups!r} must be a Python int.")
    if num_groups < 1 or channels % num_groups:
        raise ValueError(
            f"{_OP}: num_groups={num_groups} does not divide the {channels} channels on x's axis {channel_axis}; "
            "pass a divisor, or another channel_axis."
        )
    _KERNELS.choose(implementation, x, scale, bias)
    axis = channel_axis % x.ndim
    groups = (num_groups, channels // num_groups)
    beside = (1,) * axis + groups + (1,) * (x.ndim - axis - 1)
    columns = (None if column is None else column.reshape(beside) for column in (scale, bias))
    grouped = x.reshape(*x.shape[:axis], *groups, *x.shape[axis + 1 :])
    return jnp.reshape(_group_norm(grouped, *columns, axis, float(eps)), x.shape)
