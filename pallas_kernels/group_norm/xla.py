"""Group normalisation in plain XLA: layer_norm's formulas, where a row is a group of one example's channels.

x is (B, P, G, K, Q): G groups of K channels, P positions before the channels' axis and Q behind it. Nothing is
transposed.
"""

import functools

import jax

from liger_jax.pallas_kernels._rows import xla
from liger_jax.pallas_kernels.layer_norm.xla import forward_pass, gradient_pass

unsupported = xla.unsupported
_run = functools.partial(xla.run_over, (1, 3, 4), (0, 1, 4))


def _column(x: jax.Array | None) -> jax.Array | None:
    return None if x is None else x[None, None, :, :, None]


def _width(x: jax.Array) -> int:
    return x.shape[1] * x.shape[3] * x.shape[4]


def forward(x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, *, eps: float) -> jax.Array:
    """x (B, P, G, K, Q), scale and bias (G, K) or None → y in x.dtype."""
    row_pass = forward_pass("group_norm_forward", x.dtype, width=_width(x), eps=eps)
    return _run(row_pass, (x,), (_column(scale), _column(bias)))[0][0]


def backward(
    dy: jax.Array, x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, *, eps: float
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """dy, x (B, P, G, K, Q), scale and bias (G, K) or None → dx, dscale, dbias, in their primals' dtypes."""
    present = {"has_scale": scale is not None, "has_bias": bias is not None}
    row_pass = gradient_pass("group_norm_backward", x.dtype, width=_width(x), eps=eps, **present)
    (dx,), sums = _run(row_pass, (dy, x), (_column(scale),))
    dscale = None if scale is None else sums[0].astype(scale.dtype)
    return dx, dscale, None if bias is None else sums[-1].astype(bias.dtype)
