"""The addition of a residual and the RMSNorm of the sum in plain XLA, as it fuses them.

The formulas here run in the Pallas kernels too. The sum is rounded to the residual's dtype and normalised as rounded,
so the norm is that of the value which goes on; from there on as rms_norm/xla.py. Backward, the cotangents of both
outputs meet in float32 before they are rounded. Without a residual, forward is rms_norm's.
"""

from collections.abc import Callable

import jax

from liger_jax.pallas_kernels.norms import run_xla as xla
from liger_jax.pallas_kernels.norms.rms_norm import forward as normalized
from liger_jax.pallas_kernels.norms.rms_norm import gradient_pass, rounded, scaled, shrunk_squares, squares
from liger_jax.pallas_kernels.norms.run_xla import RowPass, Terms, wide

unsupported = xla.unsupported


def forward(
    x: jax.Array,
    residual: jax.Array | None,
    scale: jax.Array | None,
    *,
    eps: float,
    offset: float,
    casting_mode: str,
    run: Callable = xla.run,
    **launch: bool,
) -> tuple[jax.Array, jax.Array, Terms]:
    """x, residual (N, D), scale (D,) or None → y (N, D) in x.dtype, x + residual in residual.dtype, and its sums.

    Without a residual, the sum is x.
    """
    if residual is None:
        options = {"eps": eps, "offset": offset, "casting_mode": casting_mode}
        y, sums = normalized(x, scale, **options, run=run, **launch)
        return y, x, sums

    def added(x, residual):
        return (wide(x) + wide(residual)).astype(residual.dtype)

    def outputs(sums, x, residual, scale):
        new_residual = added(x, residual)
        xhat = rounded(new_residual, sums, width=width, eps=eps, casting_mode=casting_mode, dtype=x.dtype)
        return (scaled(xhat, scale, offset=offset), new_residual), ()

    width = x.shape[-1]
    row_pass = RowPass(
        "fused_add_rms_norm_forward",
        outputs,
        (x.dtype, residual.dtype),
        statistics=(lambda _, x, residual, scale: squares(wide(added(x, residual))),),
        rescue=lambda _, x, residual, scale: shrunk_squares(wide(added(x, residual))),
    )
    (y, new_residual), _, sums = run(row_pass, (x, residual), (scale,), **launch)
    return y, new_residual, sums


def backward(
    dy: jax.Array,
    dnew_residual: jax.Array,
    new_residual: jax.Array,
    scale: jax.Array | None,
    sums: Terms,
    *,
    eps: float,
    offset: float,
    run: Callable = xla.run,
    **launch: bool,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """dy, dnew_residual, new_residual (N, D), scale (D,) or None, its sums → dx (dy's dtype), dresidual, dscale."""
    # Of one dtype, both gradients are one array.
    dtypes = tuple(dict.fromkeys((dy.dtype, new_residual.dtype)))
    options = {"has_scale": scale is not None, "width": dy.shape[-1], "eps": eps, "offset": offset}
    row_pass = gradient_pass("fused_add_rms_norm_backward", dtypes, **options)
    gradients, dscale, _ = run(row_pass, (dy, new_residual, dnew_residual), (scale,), sums, **launch)
    return gradients[0], gradients[-1], None if scale is None else dscale[0].astype(scale.dtype)
