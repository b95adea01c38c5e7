"""RMSNorm (Zhang and Sennrich, 2019): y = x / sqrt(mean(x²) + eps) · (offset + scale).

Rounding is the same on every backend. "llama" rounds the normalised row to the output's dtype before the scale,
"gemma" rounds once at the end, "none" keeps only the mean square in float32. Sums are float32 in every mode. Gradients
are float32 too, and are those of the function without roundings.

Memory passes: a kernel's forward is one read and one write, which XLA needs two passes for. A kernel's backward reads x
and dy once, writes dx, and sums dscale on the way; XLA reads x and dy again for dscale.

Speed on an H200, in per cent of a copy's (benchmarks/results/row_tiles.md):
- Triton: forward 93 to 96, backward 86 to 90, and 80 at 896 columns. At 18,432 columns 85 and 61.
- Mosaic GPU: forward 93 at 18,432 columns; Triton is faster on narrower rows. Backward 90 to 98 from 2,560 columns on,
  and as fast as Triton below.
- TPU: not measured, so no speed is claimed.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels.norms.row_pass import Arrays, RowPass, Run, Stage
from liger_jax.pallas_kernels.tiles import in_float32, promoted

_LEAST_EPS = 2.0**-100  # beside it, squares that vanish in float32, below 2⁻¹²⁶, cannot be seen


def with_mean_square(row: Callable[..., jax.Array], eps: float, before: tuple[Stage, ...] = ()) -> dict[str, Any]:
    """The statistics of a pass: those `before`, and the mean square of `row`, which is given their sums.

    A row whose squares overflow is scaled down first. A row whose squares vanish is scaled up first, but only where eps
    is so small that this could be seen.
    """

    def squares_of(scale_of):
        def stage(*arguments):
            x = row(*arguments)
            return (jnp.square(x if scale_of is None else x * scale_of(x.dtype)),)

        return stage

    rescues_small_rows = eps < _LEAST_EPS

    def needs_rescue(square_sum):
        overflows = square_sum == jnp.inf
        return overflows | (square_sum < _shrink_factor(square_sum.dtype)) if rescues_small_rows else overflows

    scales = (_shrink_factor, _growth_factor) if rescues_small_rows else (_shrink_factor,)
    statistics = (*before, squares_of(None))
    return {"statistics": statistics, "rescues": tuple(map(squares_of, scales)), "needs_rescue": needs_rescue}


def _shrink_factor(dtype: jax.typing.DTypeLike) -> float:
    """2⁻⁸⁰ in float32.

    Then the largest sum of 2¹⁷ squares is 2¹¹³, which is finite, and a sum that was 2¹²⁸ or more is 2⁻³² or more.
    A sum of 2⁻⁸⁰ or more is exact, whatever vanishes: 2¹⁷ squares below 2⁻¹²⁶ add up to less than 2⁻¹⁰⁹.
    """
    return 2.0 ** -(jnp.finfo(dtype).maxexp * 5 // 8)


def _growth_factor(dtype: jax.typing.DTypeLike) -> float:
    """2⁸⁰ in float32. A sum that was less than 2⁻⁸⁰ is then less than 2⁸⁰, and the least square is 2⁻⁹²."""
    return 1.0 / _shrink_factor(dtype)


def reciprocal_root(
    square_sum: jax.Array,
    shrunk_square_sum: jax.Array,
    grown_square_sum: jax.Array | None = None,
    *,
    width: int,
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    """A factor f and rstd, such that x / sqrt(mean(x²) + eps) = (x·f)·rstd. f is 1 unless squares overflow."""
    overflows, shrink = square_sum == jnp.inf, _shrink_factor(square_sum.dtype)
    mean_square = jnp.where(overflows, shrunk_square_sum, square_sum) / width
    rstd = jax.lax.rsqrt(mean_square + jnp.where(overflows, 0.0, eps))
    if grown_square_sum is not None:
        growth = _growth_factor(square_sum.dtype)
        grown_rstd = jax.lax.rsqrt(grown_square_sum / width + eps * growth * growth) * growth
        rstd = jnp.where(square_sum < shrink, grown_rstd, rstd)
    return jnp.where(overflows, shrink, 1.0), rstd


def rounded_xhat(
    x: jax.Array, square_sums: Arrays, *, width: int, eps: float, casting_mode: str, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """x̂ = x / sqrt(mean(x²) + eps), rounded to `dtype` as `casting_mode` asks for."""
    factor, rstd = reciprocal_root(*square_sums, width=width, eps=eps)
    small = in_float32(x) * factor
    if casting_mode == "none":
        return small.astype(dtype) * rstd.astype(dtype)
    xhat = small * rstd
    return xhat if casting_mode == "gemma" else xhat.astype(dtype)


def scaled(xhat: jax.Array, scale: jax.Array | None, *, offset: float) -> jax.Array:
    """x̂ · (offset + scale), multiplied in the wider of the two dtypes."""
    if scale is None:
        return xhat
    dtype = promoted(xhat.dtype, scale.dtype)
    scale = scale.astype(dtype)
    return xhat.astype(dtype) * (offset + scale if offset else scale)


def forward(
    x: jax.Array, scale: jax.Array | None, *, eps: float, offset: float, casting_mode: str, run: Run, **launch: bool
) -> tuple[jax.Array, Arrays]:
    """x (N, D), scale (D,) or None → y (N, D) in x.dtype, and the rows' sums for the backward."""
    width = x.shape[-1]

    def outputs(square_sums, x, scale):
        xhat = rounded_xhat(x, square_sums, width=width, eps=eps, casting_mode=casting_mode, dtype=x.dtype)
        return (scaled(xhat, scale, offset=offset),), ()

    row_pass = RowPass(
        "rms_norm_forward", outputs, (x.dtype,), **with_mean_square(lambda _, x, scale: in_float32(x), eps)
    )
    (y,), _, sums = run(row_pass, (x,), (scale,), **launch)
    return y, sums


def gradient_pass(
    name: str,
    output_dtypes: tuple[jax.typing.DTypeLike, ...],
    *,
    has_scale: bool,
    width: int,
    eps: float,
    offset: float,
) -> RowPass:
    """The pass over (dy, x, *others) and (scale,) that makes dx + others, and dscale if there is a scale.

    The same gradient is written once for each of `output_dtypes`.
    """

    def normalised(dy, x, scale, square_sums):
        """dx̂, x̂ and dx̂'s factor in dx, all float32."""
        factor, rstd = reciprocal_root(*square_sums, width=width, eps=eps)
        dxhat = scaled(in_float32(dy), scale if scale is None else in_float32(scale), offset=offset)
        return dxhat, in_float32(x) * factor * rstd, rstd * factor

    def products(square_sums, dy, x, *others_and_scale):
        dxhat, xhat, _ = normalised(dy, x, others_and_scale[-1], square_sums)
        return (dxhat * xhat,)

    def outputs(sums, dy, x, *others_and_scale):
        *others, scale = others_and_scale
        *square_sums, product_sum = sums
        dxhat, xhat, rstd = normalised(dy, x, scale, square_sums)
        # dx = rstd · (dx̂ − x̂ · mean(dx̂ · x̂))
        dx = sum((in_float32(other) for other in others), start=rstd * (dxhat - xhat * (product_sum / width)))
        dscale_terms = (in_float32(dy) * xhat,) if has_scale else ()
        return (dx,) * len(output_dtypes), dscale_terms

    return RowPass(
        name,
        outputs,
        output_dtypes,
        **with_mean_square(lambda _, dy, x, *others: in_float32(x), eps),
        stages=(products,),
        num_totals=1 if has_scale else 0,
    )


def backward(
    dy: jax.Array,
    x: jax.Array,
    scale: jax.Array | None,
    sums: Arrays,
    *,
    eps: float,
    offset: float,
    run: Run,
    **launch: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """dy, x (N, D), scale (D,) or None, the forward's sums → dx (N, D) and dscale (D,), in their primals' dtypes."""
    options = {"has_scale": scale is not None, "width": x.shape[-1], "eps": eps, "offset": offset}
    row_pass = gradient_pass("rms_norm_backward", (x.dtype,), **options)
    (dx,), totals, _ = run(row_pass, (dy, x), (scale,), sums, **launch)
    return dx, None if scale is None else totals[0].astype(scale.dtype)
