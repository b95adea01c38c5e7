"""Dynamic tanh, a normalisation without statistics (Zhu et al., 2025): y = tanh(alpha · x) · scale + bias.

Rounding: everything is float32 and rounded once, at the end.

Memory passes: the forward is one read and one write, which XLA may fuse into its neighbours and a kernel cannot. A
kernel's backward reads x and dy once, writes dx, and makes all sums on the way; on GPUs XLA stores tanh in float32
between two passes. No kernel is measured, on GPUs or TPUs: no speed is claimed.
"""

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels.norms.rms_norm import scaled
from liger_jax.pallas_kernels.norms.row_pass import RowPass, Run, in_float32


def _tanh(x: jax.Array, alpha: jax.Array) -> jax.Array:
    """tanh(alpha · x) in float32."""
    return jnp.tanh(in_float32(alpha).astype(in_float32(x).dtype) * in_float32(x))


def forward(
    x: jax.Array,
    alpha: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    run: Run,
    **launch: bool,
) -> jax.Array:
    """x (N, D), alpha (), scale and bias (D,) or None → y in x.dtype."""

    def outputs(_, x, alpha, scale, bias):
        y = scaled(_tanh(x, alpha), scale, offset=0.0)
        return (y if bias is None else y + bias.astype(y.dtype),), ()

    vectors = (jnp.broadcast_to(alpha, x.shape[-1:]), scale, bias)
    return run(RowPass("dyt_forward", outputs, (x.dtype,)), (x,), vectors, **launch)[0][0]


def backward(
    dy: jax.Array,
    x: jax.Array,
    alpha: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    run: Run,
    **launch: bool,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """dy, x (N, D), alpha (), scale and bias (D,) or None → dx, dalpha, dscale, dbias, in their primals' dtypes."""

    def outputs(_, dy, x, alpha, scale):
        dy, tanh = in_float32(dy), _tanh(x, alpha)
        # With z = alpha · x: dz = dy · scale · (1 − tanh²(z))
        dz = scaled(dy, scale, offset=0.0) * (1.0 - jnp.square(tanh))
        dx = in_float32(alpha).astype(dz.dtype) * dz
        dalpha_terms = (dz * in_float32(x),)
        dscale_terms = () if scale is None else (dy * tanh,)
        dbias_terms = () if bias is None else (dy,)
        return (dx,), dalpha_terms + dscale_terms + dbias_terms

    num_totals = 1 + [scale is not None, bias is not None].count(True)
    row_pass = RowPass("dyt_backward", outputs, (x.dtype,), num_totals=num_totals)
    vectors = (jnp.broadcast_to(alpha, x.shape[-1:]), scale)
    (dx,), (dalpha, *totals), _ = run(row_pass, (dy, x), vectors, **launch)
    dscale = None if scale is None else totals[0].astype(scale.dtype)
    dalpha = jnp.sum(dalpha).astype(alpha.dtype)
    return dx, dalpha, dscale, None if bias is None else totals[-1].astype(bias.dtype)
