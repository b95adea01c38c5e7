"""Dynamic tanh in plain XLA: one elementwise pass forward; two backward, one of them for the sums over rows.

Everything is float32 and rounded once, at the end.
"""

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels._rows import xla
from liger_jax.pallas_kernels._rows.xla import wide
from liger_jax.pallas_kernels.rms_norm.xla import scaled

unsupported = xla.unsupported


def forward(x: jax.Array, alpha: jax.Array, scale: jax.Array | None, bias: jax.Array | None) -> jax.Array:
    """x (..., D), alpha (), scale and bias (D,) or None → y in x.dtype."""
    x32 = wide(x)
    y = scaled(jnp.tanh(alpha.astype(x32.dtype) * x32), _row(scale, x), offset=0.0)
    return (y if bias is None else y + _row(bias, x).astype(y.dtype)).astype(x.dtype)


def backward(
    dy: jax.Array, x: jax.Array, alpha: jax.Array, scale: jax.Array | None, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """dy, x (..., D), alpha (), scale and bias (D,) or None → dx, dalpha, dscale, dbias, in their primals' dtypes."""
    x32, dy = wide(x), wide(dy)
    alpha32 = alpha.astype(x32.dtype)
    tanh = jnp.tanh(alpha32 * x32)
    # dz = dy · scale · (1 − tanh²), of z = alpha · x
    dz = scaled(dy, _row(scale, x), offset=0.0) * (1.0 - jnp.square(tanh))
    rows = tuple(range(x.ndim - 1))
    dscale = None if scale is None else jnp.sum(dy * tanh, axis=rows).astype(scale.dtype)
    dbias = None if bias is None else jnp.sum(dy, axis=rows).astype(bias.dtype)
    return (alpha32 * dz).astype(x.dtype), jnp.sum(dz * x32).astype(alpha.dtype), dscale, dbias


def _row(column: jax.Array | None, x: jax.Array) -> jax.Array | None:
    return None if column is None else column.reshape((1,) * (x.ndim - 1) + (-1,))
