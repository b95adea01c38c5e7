"""The addition of a residual, and the RMSNorm of the sum, in one pass.

Rounding: the sum is rounded to the residual's dtype, and the rounded sum is normalised, because it is the value that
later layers see. From there on rounding is `rms_norm`'s. In the backward, the gradients by both outputs are added in
float32 and rounded once.

Memory passes: the forward is two reads and two writes, because the sum is normalised before it leaves the core.
The backward reads the sum and both cotangents once, writes their common gradient, and sums dscale on the way. XLA fuses
the addition into the passes of its norm.

Speed on an H200, in per cent of a copy's (benchmarks/results/row_tiles.md):
- Triton: forward 92 to 98, backward 81 to 86. At 18,432 columns 84 and 70.
- Mosaic GPU: forward 93 at 18,432 columns; Triton is faster on narrower rows. Backward 90 to 100 from 2,048 columns on.
- TPU: not measured, so no speed is claimed.
"""

import jax

from liger_jax.pallas_kernels.norms import rms_norm
from liger_jax.pallas_kernels.norms.rms_norm import gradient_pass, rounded_xhat, scaled
from liger_jax.pallas_kernels.norms.row_pass import Arrays, RowPass, Run
from liger_jax.pallas_kernels.tiles import in_float32


def _sum(x: jax.Array, residual: jax.Array) -> jax.Array:
    """x + residual, rounded to the residual's dtype."""
    return (in_float32(x) + in_float32(residual)).astype(residual.dtype)


def forward(
    x: jax.Array,
    residual: jax.Array | None,
    scale: jax.Array | None,
    *,
    eps: float,
    offset: float,
    casting_mode: str,
    run: Run,
    **launch: bool,
) -> tuple[jax.Array, jax.Array, Arrays]:
    """x, residual (N, D), scale (D,) or None → y (N, D) in x.dtype, x + residual in residual.dtype, the rows' sums.

    Without a residual, the sum is x, and the pass is `rms_norm`'s.
    """
    if residual is None:
        options = {"eps": eps, "offset": offset, "casting_mode": casting_mode}
        y, sums = rms_norm.forward(x, scale, **options, run=run, **launch)
        return y, x, sums
    width = x.shape[-1]

    def outputs(square_sums, x, residual, scale):
        new_residual = _sum(x, residual)
        xhat = rounded_xhat(new_residual, square_sums, width=width, eps=eps, casting_mode=casting_mode, dtype=x.dtype)
        return (scaled(xhat, scale, offset=offset), new_residual), ()

    row_pass = RowPass(
        "fused_add_rms_norm_forward",
        outputs,
        (x.dtype, residual.dtype),
        **rms_norm.with_mean_square(lambda _, x, residual, scale: in_float32(_sum(x, residual)), eps),
    )
    (y, new_residual), _, sums = run(row_pass, (x, residual), (scale,), **launch)
    return y, new_residual, sums


def backward(
    dy: jax.Array,
    dnew_residual: jax.Array,
    new_residual: jax.Array,
    scale: jax.Array | None,
    sums: Arrays,
    *,
    eps: float,
    offset: float,
    run: Run,
    **launch: bool,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """dy, dnew_residual, new_residual (N, D), scale (D,) or None, the forward's sums → dx, dresidual, dscale.

    dx has dy's dtype, the others have their primals'.
    """
    # x and the residual have the same gradient. It is written once if their dtypes are equal.
    dtypes = tuple(dict.fromkeys((dy.dtype, new_residual.dtype)))
    options = {"has_scale": scale is not None, "width": dy.shape[-1], "eps": eps, "offset": offset}
    row_pass = gradient_pass("fused_add_rms_norm_backward", dtypes, **options)
    gradients, totals, _ = run(row_pass, (dy, new_residual, dnew_residual), (scale,), sums, **launch)
    return gradients[0], gradients[-1], None if scale is None else totals[0].astype(scale.dtype)
