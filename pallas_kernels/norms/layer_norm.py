"""LayerNorm in plain XLA: as many passes over memory as it needs for the mean, the variance and the sums over rows.

The formulas here run in the Pallas kernels too. Everything is float32 and rounded once, at the end. The variance is the
mean square of the centred row, never a difference of two large numbers.
"""

from collections.abc import Callable

import jax

from liger_jax.pallas_kernels.norms import run_xla as xla
from liger_jax.pallas_kernels.norms.rms_norm import reciprocal_root, scaled, shrunk_squares, squares
from liger_jax.pallas_kernels.norms.run_xla import RowPass, Terms, wide

unsupported = xla.unsupported


def _mean_terms(x: jax.Array, width: int) -> Terms:
    """Divided before they are summed, which cannot overflow."""
    return (wide(x) * (1 / width),)


def _centred(x: jax.Array, mean: jax.Array, factor: jax.Array | float = 0.5) -> jax.Array:
    """(x − mean)·factor, of products that cannot overflow where the factor is at most a half."""
    return wide(x) * factor - mean * factor


def forward_pass(name: str, dtype: jax.typing.DTypeLike, *, width: int, eps: float) -> RowPass:
    """Of (x, scale, bias): y in `dtype`."""

    def outputs(sums, x, scale, bias):
        mean, *square_sums = sums
        factor, rstd = reciprocal_root(*square_sums, width=width, eps=eps / 4)  # of half the row
        xhat = _centred(x, mean) * factor * rstd  # its half is at hand
        y = scaled(xhat, scale, offset=0.0)
        return (y if bias is None else y + bias.astype(y.dtype),), ()

    return RowPass(
        name,
        outputs,
        (dtype,),
        statistics=(
            lambda _, x, *columns: _mean_terms(x, width),
            lambda sums, x, *columns: squares(_centred(x, *sums)),
        ),
        rescue=lambda sums, x, *columns: shrunk_squares(_centred(x, sums[0])),
    )


def gradient_pass(
    name: str, dtype: jax.typing.DTypeLike, *, width: int, eps: float, has_scale: bool, has_bias: bool
) -> RowPass:
    """Of (dy, x, scale): dx in `dtype`; dscale and dbias, if it has them."""

    def normalized(x, mean, *square_sums):
        factor, rstd = reciprocal_root(*square_sums, width=width, eps=eps / 4)
        return _centred(x, mean, factor * 0.5) * rstd, rstd * factor * 0.5

    def products(sums, dy, x, scale):
        dxhat, (xhat, _) = scaled(wide(dy), scale, offset=0.0), normalized(x, *sums)
        return dxhat, dxhat * xhat

    def outputs(sums, dy, x, scale):
        *statistics, dxhat_sum, product_sum = sums
        dy = wide(dy)
        dxhat, (xhat, rstd) = scaled(dy, scale, offset=0.0), normalized(x, *statistics)
        # dx = rstd · (dx̂ − mean(dx̂) − x̂ · mean(dx̂ · x̂))
        dx = rstd * (dxhat - dxhat_sum / width - xhat * (product_sum / width))
        return (dx,), (dy * xhat,) * has_scale + (dy,) * has_bias

    return RowPass(
        name,
        outputs,
        (dtype,),
        statistics=(
            lambda _, dy, x, scale: _mean_terms(x, width),
            lambda sums, dy, x, scale: squares(_centred(x, *sums)),
        ),
        rescue=lambda sums, dy, x, scale: shrunk_squares(_centred(x, sums[0])),
        stages=(products,),
        num_column_outputs=has_scale + has_bias,
    )


def forward(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    eps: float,
    run: Callable = xla.run,
    **launch: bool,
) -> tuple[jax.Array, Terms]:
    """x (N, D), scale and bias (D,) or None → y (N, D) in x.dtype, and sums over its rows for the backward."""
    row_pass = forward_pass("layer_norm_forward", x.dtype, width=x.shape[-1], eps=eps)
    (y,), _, sums = run(row_pass, (x,), (scale, bias), **launch)
    return y, sums


def backward(
    dy: jax.Array,
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    sums: Terms,
    *,
    eps: float,
    run: Callable = xla.run,
    **launch: bool,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """dy, x (N, D), scale and bias (D,) or None, forward's sums → dx, dscale, dbias, in their primals' dtypes."""
    present = {"has_scale": scale is not None, "has_bias": bias is not None}
    row_pass = gradient_pass("layer_norm_backward", x.dtype, width=x.shape[-1], eps=eps, **present)
    (dx,), totals, _ = run(row_pass, (dy, x), (scale,), sums, **launch)
    dscale = None if scale is None else totals[0].astype(scale.dtype)
    return dx, dscale, None if bias is None else totals[-1].astype(bias.dtype)
