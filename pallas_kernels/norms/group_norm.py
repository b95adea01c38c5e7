"""Group normalisation (Wu and He, 2018), in XLA only: LayerNorm of each group of an example's channels.

x is (B, ..., G, K, ...): G groups of K channels, with G on axis `axis`. A row of the pass is one group of one example,
and lies along all axes but B and G. Nothing is transposed.
"""

import math
from collections.abc import Sequence

import jax

from liger_jax.pallas_kernels.norms import run_xla
from liger_jax.pallas_kernels.norms.layer_norm import forward_pass, gradient_pass
from liger_jax.pallas_kernels.norms.row_pass import Arrays, RowPass

unsupported = run_xla.unsupported


def _run(
    row_pass: RowPass, matrices: Sequence[jax.Array], vectors: Sequence[jax.Array | None], axis: int
) -> tuple[Arrays, Arrays]:
    """A row pass over groups; vectors and totals are (G, K)."""
    ndim = matrices[0].ndim
    row_axes = tuple(i for i in range(1, ndim) if i != axis)
    total_axes = tuple(i for i in range(ndim) if i not in (axis, axis + 1))
    beside_x = [None if x is None else x.reshape((1,) * axis + x.shape + (1,) * (ndim - axis - 2)) for x in vectors]
    return run_xla.run_along(row_axes, total_axes, row_pass, matrices, beside_x)


def _width(x: jax.Array, axis: int) -> int:
    """How many elements a group of one example has."""
    return math.prod(x.shape[1:]) // x.shape[axis]


def forward(x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, *, axis: int, eps: float) -> jax.Array:
    """x (B, ..., G, K, ...), scale and bias (G, K) or None → y in x.dtype."""
    row_pass = forward_pass("group_norm_forward", x.dtype, width=_width(x, axis), eps=eps)
    return _run(row_pass, (x,), (scale, bias), axis)[0][0]


def backward(
    dy: jax.Array, x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, *, axis: int, eps: float
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """dy, x (B, ..., G, K, ...), scale and bias (G, K) or None → dx, dscale, dbias, in their primals' dtypes."""
    present = {"has_scale": scale is not None, "has_bias": bias is not None}
    row_pass = gradient_pass("group_norm_backward", x.dtype, width=_width(x, axis), eps=eps, **present)
    (dx,), totals = _run(row_pass, (dy, x), (scale,), axis)
    dscale = None if scale is None else totals[0].astype(scale.dtype)
    return dx, dscale, None if bias is None else totals[-1].astype(bias.dtype)
