"""Dynamic tanh in plain XLA: one elementwise pass forward; backward, on GPUs, XLA stores tanh in float32 between two.

The formulas here run in the Pallas kernels too. Everything is float32 and rounded once, at the end.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels.norms import run_xla as xla
from liger_jax.pallas_kernels.norms.rms_norm import scaled
from liger_jax.pallas_kernels.norms.run_xla import RowPass, wide

unsupported = xla.unsupported


def _tanh(x: jax.Array, alpha: jax.Array) -> jax.Array:
    return jnp.tanh(wide(alpha).astype(wide(x).dtype) * wide(x))


def forward(
    x: jax.Array,
    alpha: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    run: Callable = xla.run,
    **launch: bool,
) -> jax.Array:
    """x (N, D), alpha (), scale and bias (D,) or None → y in x.dtype."""

    def outputs(_, x, alpha, scale, bias):
        y = scaled(_tanh(x, alpha), scale, offset=0.0)
        return (y if bias is None else y + bias.astype(y.dtype),), ()

    columns = (jnp.broadcast_to(alpha, x.shape[-1:]), scale, bias)
    return run(RowPass("dyt_forward", outputs, (x.dtype,)), (x,), columns, **launch)[0][0]


def backward(
    dy: jax.Array,
    x: jax.Array,
    alpha: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    run: Callable = xla.run,
    **launch: bool,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """dy, x (N, D), alpha (), scale and bias (D,) or None → dx, dalpha, dscale, dbias, in their primals' dtypes."""
    has_scale, has_bias = scale is not None, bias is not None

    def outputs(_, dy, x, alpha, scale):
        dy, tanh = wide(dy), _tanh(x, alpha)
        # dz = dy · scale · (1 − tanh²), of z = alpha · x
        dz = scaled(dy, scale, offset=0.0) * (1.0 - jnp.square(tanh))
        return (wide(alpha).astype(dz.dtype) * dz,), (dz * wide(x), *(dy * tanh,) * has_scale, *(dy,) * has_bias)

    row_pass = RowPass("dyt_backward", outputs, (x.dtype,), num_column_outputs=1 + has_scale + has_bias)
    (dx,), (dalpha, *sums), _ = run(row_pass, (dy, x), (jnp.broadcast_to(alpha, x.shape[-1:]), scale), **launch)
    dscale = sums[0].astype(scale.dtype) if has_scale else None
    return dx, jnp.sum(dalpha).astype(alpha.dtype), dscale, sums[-1].astype(bias.dtype) if has_bias else None
