"""Group normalisation in plain XLA: layer_norm's formulas, where a row is a group of one example's channels.

x is (B, ..., G, K, ...): G groups of K channels, G on `axis`. Nothing is transposed.
"""

import functools
import math
from collections.abc import Callable

import jax

from liger_jax.pallas_kernels.norms import run_xla as xla
from liger_jax.pallas_kernels.norms.layer_norm import forward_pass, gradient_pass

unsupported = xla.unsupported


def _over_groups(ndim: int, axis: int) -> Callable:
    """A pass whose rows lie along all axes but B and G, and whose columns are K of each G."""
    others = tuple(i for i in range(1, ndim) if i != axis)
    return functools.partial(xla.run_over, others, tuple(i for i in range(ndim) if i not in (axis, axis + 1)))


def _column(x: jax.Array | None, ndim: int, axis: int) -> jax.Array | None:
    return None if x is None else x.reshape((1,) * axis + x.shape + (1,) * (ndim - axis - 2))


def _width(x: jax.Array, axis: int) -> int:
    return math.prod(x.shape[1:]) // x.shape[axis]


def forward(x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, *, axis: int, eps: float) -> jax.Array:
    """x (B, ..., G, K, ...), scale and bias (G, K) or None → y in x.dtype."""
    row_pass = forward_pass("group_norm_forward", x.dtype, width=_width(x, axis), eps=eps)
    columns = (_column(scale, x.ndim, axis), _column(bias, x.ndim, axis))
    return _over_groups(x.ndim, axis)(row_pass, (x,), columns)[0][0]


def backward(
    dy: jax.Array, x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, *, axis: int, eps: float
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """dy, x (B, ..., G, K, ...), scale and bias (G, K) or None → dx, dscale, dbias, in their primals' dtypes."""
    present = {"has_scale": scale is not None, "has_bias": bias is not None}
    row_pass = gradient_pass("group_norm_backward", x.dtype, width=_width(x, axis), eps=eps, **present)
    (dx,), sums = _over_groups(x.ndim, axis)(row_pass, (dy, x), (_column(scale, x.ndim, axis),))
    dscale = None if scale is None else sums[0].astype(scale.dtype)
    return dx, dscale, None if bias is None else sums[-1].astype(bias.dtype)
