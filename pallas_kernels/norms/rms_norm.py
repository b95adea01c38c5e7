"""RMSNorm in plain XLA: two passes over memory forward, three backward (one of them for the scale's sum over rows).

The formulas here run in the Pallas kernels too, so every backend rounds at the same places: "llama" rounds the
normalised row to the output's dtype before the scale, "gemma" rounds once at the end, "none" keeps only the mean
square in float32. Sums are float32 in every mode, and so are both gradients, which are those of the unrounded function.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels._tiles import promoted
from liger_jax.pallas_kernels.norms import run_xla as xla
from liger_jax.pallas_kernels.norms.run_xla import RowPass, Terms, wide

unsupported = xla.unsupported


def squares(x: jax.Array) -> tuple[jax.Array]:
    """What is summed for the mean square."""
    return (jnp.square(x),)


def shrunk_squares(x: jax.Array) -> tuple[jax.Array]:
    """What is summed where squares overflow."""
    return (jnp.square(x * _shrink(x.dtype)),)


def _shrink(dtype: jax.typing.DTypeLike) -> float:
    """2⁻⁸⁰ in float32: sums of 2¹⁷ squares reach 2¹¹³, and a row that overflows without it keeps 2⁻⁴²."""
    return 2.0 ** -(jnp.finfo(dtype).maxexp * 5 // 8)


def reciprocal_root(
    square_sum: jax.Array, shrunk_square_sum: jax.Array, *, width: int, eps: float
) -> tuple[jax.Array, jax.Array]:
    """A factor f and rstd', with x / sqrt(mean(x²) + eps) = (x·f)·rstd'; f is 1 unless squares overflow."""
    overflows = square_sum == jnp.inf
    mean_square = jnp.where(overflows, shrunk_square_sum, square_sum) / width
    rstd = jax.lax.rsqrt(mean_square + jnp.where(overflows, 0.0, eps))
    return jnp.where(overflows, _shrink(square_sum.dtype), 1.0), rstd


def rounded(
    x: jax.Array, sums: tuple[jax.Array, ...], *, width: int, eps: float, casting_mode: str, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """x̂ as `casting_mode` rounds it to `dtype`."""
    factor, rstd = reciprocal_root(*sums, width=width, eps=eps)
    small = wide(x) * factor
    if casting_mode == "none":
        return small.astype(dtype) * rstd.astype(dtype)
    exact = small * rstd
    return exact if casting_mode == "gemma" else exact.astype(dtype)


def scaled(xhat: jax.Array, scale: jax.Array | None, *, offset: float) -> jax.Array:
    """x̂ · (offset + scale), multiplied in the wider of the two dtypes."""
    if scale is None:
        return xhat
    dtype = promoted(xhat.dtype, scale.dtype)
    scale = scale.astype(dtype)
    return xhat.astype(dtype) * (offset + scale if offset else scale)


def row_gradient(
    dy: jax.Array,
    x: jax.Array,
    scale: jax.Array | None,
    sums: tuple[jax.Array, ...],
    *,
    width: int,
    eps: float,
    offset: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dx̂, x̂ and rstd, as float32, of the unrounded function."""
    factor, rstd = reciprocal_root(*sums, width=width, eps=eps)
    dxhat = scaled(wide(dy), scale if scale is None else wide(scale), offset=offset)
    return dxhat, wide(x) * factor * rstd, rstd * factor


def forward(
    x: jax.Array,
    scale: jax.Array | None,
    *,
    eps: float,
    offset: float,
    casting_mode: str,
    run: Callable = xla.run,
    **launch: bool,
) -> tuple[jax.Array, Terms]:
    """x (N, D), scale (D,) or None → y (N, D) in x.dtype, and sums over its rows for the backward."""

    def outputs(sums, x, scale):
        xhat = rounded(x, sums, width=width, eps=eps, casting_mode=casting_mode, dtype=x.dtype)
        return (scaled(xhat, scale, offset=offset),), ()

    width = x.shape[-1]
    row_pass = RowPass(
        "rms_norm_forward",
        outputs,
        (x.dtype,),
        statistics=(lambda _, x, scale: squares(wide(x)),),
        rescue=lambda _, x, scale: shrunk_squares(wide(x)),
    )
    (y,), _, sums = run(row_pass, (x,), (scale,), **launch)
    return y, sums


def gradient_pass(
    name: str, dtypes: tuple[jax.typing.DTypeLike, ...], *, has_scale: bool, width: int, eps: float, offset: float
) -> RowPass:
    """Of (dy, x, *others, scale): dx, with the others added on top, in each of `dtypes`; and dscale if it has one."""
    options = {"width": width, "eps": eps, "offset": offset}

    def products(sums, dy, x, *others_and_scale):
        dxhat, xhat, _ = row_gradient(dy, x, others_and_scale[-1], sums, **options)
        return (dxhat * xhat,)

    def outputs(sums, dy, x, *others_and_scale):
        *others, scale = others_and_scale
        *square_sums, product_sum = sums
        dxhat, xhat, rstd = row_gradient(dy, x, scale, tuple(square_sums), **options)
        # dx = rstd · (dx̂ − x̂ · mean(dx̂ · x̂))
        dx = sum((wide(other) for other in others), start=rstd * (dxhat - xhat * (product_sum / width)))
        return (dx,) * len(dtypes), (wide(dy) * xhat,) * has_scale

    return RowPass(
        name,
        outputs,
        dtypes,
        statistics=(lambda _, dy, x, *others: squares(wide(x)),),
        rescue=lambda _, dy, x, *others: shrunk_squares(wide(x)),
        stages=(products,),
        num_column_outputs=int(has_scale),
    )


def backward(
    dy: jax.Array,
    x: jax.Array,
    scale: jax.Array | None,
    sums: Terms,
    *,
    eps: float,
    offset: float,
    run: Callable = xla.run,
    **launch: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """dy, x (N, D), scale (D,) or None, forward's sums → dx (N, D), dscale (D,) or None, in their primals' dtypes."""
    options = {"has_scale": scale is not None, "width": x.shape[-1], "eps": eps, "offset": offset}
    row_pass = gradient_pass("rms_norm_backward", (x.dtype,), **options)
    (dx,), dscale, _ = run(row_pass, (dy, x), (scale,), sums, **launch)
    return dx, None if scale is None else dscale[0].astype(scale.dtype)
