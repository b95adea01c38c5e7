"""LayerNorm (Ba, Kiros and Hinton, 2016): y = (x − mean(x)) / sqrt(var(x) + eps) · scale + bias.

Rounding: everything is float32 and rounded once, at the end. The variance is the mean square of the centred row, never
a difference of two large numbers. Rows are halved before they are centred, so that the difference of the largest
numbers is finite; eps / 4 goes with the half's mean square.

Memory passes: a kernel's forward is one read and one write. Its backward reads x and dy once, writes dx, and sums
dscale and dbias on the way. XLA takes as many passes as it needs for the mean, the variance and the sums over rows.

Speed on an H200, in per cent of a copy's (benchmarks/results/row_tiles.md):
- Triton: forward 86 to 94, backward 72 to 86. At 18,432 columns 77 and 46.
- Mosaic GPU: forward 88 at 8,192 columns and 91 at 18,432; Triton is faster on narrower rows. Backward 80 to 92 from
  2,304 columns on.
- TPU: not measured, so no speed is claimed.
"""

import jax

from liger_jax.pallas_kernels.norms.rms_norm import reciprocal_root, scaled, with_mean_square
from liger_jax.pallas_kernels.norms.row_pass import Arrays, RowPass, Run
from liger_jax.pallas_kernels.tiles import in_float32


def _mean_terms(x: jax.Array, width: int) -> Arrays:
    """The terms of the mean. Each is divided before they are summed, so that the sum cannot overflow."""
    return (in_float32(x) * (1 / width),)


def _centred(x: jax.Array, mean: jax.Array, factor: jax.Array | float = 0.5) -> jax.Array:
    """(x − mean)·factor. Neither product overflows, and nor does the difference with a factor of a half or less."""
    return in_float32(x) * factor - mean * factor


def forward(
    x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, *, eps: float, run: Run, **launch: bool
) -> tuple[jax.Array, Arrays]:
    """x (N, D), scale and bias (D,) or None → y (N, D) in x.dtype, and the rows' sums for the backward."""
    width = x.shape[-1]

    def outputs(sums, x, scale, bias):
        mean, *square_sums = sums
        factor, rstd = reciprocal_root(*square_sums, width=width, eps=eps / 4)  # of the halved row
        xhat = _centred(x, mean) * factor * rstd
        y = scaled(xhat, scale, offset=0.0)
        return (y if bias is None else y + bias.astype(y.dtype),), ()

    row_pass = RowPass(
        "layer_norm_forward",
        outputs,
        (x.dtype,),
        **with_mean_square(
            lambda sums, x, *vectors: _centred(x, *sums),
            eps / 4,
            before=(lambda _, x, *vectors: _mean_terms(x, width),),
        ),
    )
    (y,), _, sums = run(row_pass, (x,), (scale, bias), **launch)
    return y, sums


def backward(
    dy: jax.Array,
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    sums: Arrays,
    *,
    eps: float,
    run: Run,
    **launch: bool,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """dy, x (N, D), scale and bias (D,) or None, the forward's sums → dx, dscale, dbias, in their primals' dtypes."""
    width = x.shape[-1]

    def normalised(x, mean, *square_sums):
        """x̂, and dx̂'s factor in dx."""
        factor, rstd = reciprocal_root(*square_sums, width=width, eps=eps / 4)  # of the halved row
        return _centred(x, mean, factor * 0.5) * rstd, rstd * factor * 0.5

    def products(statistics, dy, x, scale):
        dxhat, (xhat, _) = scaled(in_float32(dy), scale, offset=0.0), normalised(x, *statistics)
        return dxhat, dxhat * xhat

    def outputs(sums, dy, x, scale):
        *statistics, dxhat_sum, product_sum = sums
        dy = in_float32(dy)
        dxhat, (xhat, rstd) = scaled(dy, scale, offset=0.0), normalised(x, *statistics)
        # dx = rstd · (dx̂ − mean(dx̂) − x̂ · mean(dx̂ · x̂))
        dx = rstd * (dxhat - dxhat_sum / width - xhat * (product_sum / width))
        dscale_terms = () if scale is None else (dy * xhat,)
        return (dx,), dscale_terms + (() if bias is None else (dy,))

    row_pass = RowPass(
        "layer_norm_backward",
        outputs,
        (x.dtype,),
        **with_mean_square(
            lambda sums, dy, x, scale: _centred(x, *sums),
            eps / 4,
            before=(lambda _, dy, x, scale: _mean_terms(x, width),),
        ),
        stages=(products,),
        num_totals=[scale is None, bias is None].count(False),
    )
    (dx,), totals, _ = run(row_pass, (dy, x), (scale,), sums, **launch)
    dscale = None if scale is None else totals[0].astype(scale.dtype)
    return dx, dscale, None if bias is None else totals[-1].astype(bias.dtype)
