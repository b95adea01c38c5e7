"""RMSNorm in plain XLA: one fused pass forward, two backward (one of them for the scale's sum over rows).

The row formulas here are also the bodies of the Pallas kernels, so every backend rounds at the same places:
"llama" rounds the normalised row to x.dtype before the scale, "gemma" rounds once at the end, "none" keeps
only the mean square in float32. Sums are float32 in every mode, and so are both gradients, which are those of the
unrounded function.
"""

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels._tiles import promoted


def unsupported(x: jax.Array, scale: jax.Array | None) -> str | None:
    """XLA runs every case."""
    return None


def normalized_rows(x: jax.Array, *, width: int, eps: float, casting_mode: str) -> tuple[jax.Array, ...]:
    """x̂ = x·rstd in float32, x̂ as `casting_mode` rounds it, and rstd; columns past `width` must be zeros."""
    x32 = x.astype(promoted(x.dtype, jnp.float32))
    # rstd = 1 / sqrt(mean(x²) + eps)
    rstd = jax.lax.rsqrt(jnp.sum(x32 * x32, axis=-1, keepdims=True) / width + eps)
    exact = x32 * rstd
    if casting_mode == "gemma":
        return exact, exact, rstd
    if casting_mode == "none":
        return exact, x * rstd.astype(x.dtype), rstd
    return exact, exact.astype(x.dtype), rstd


def scaled_rows(
    rounded: jax.Array, scale: jax.Array | None, *, offset: float, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """y = x̂ · (offset + scale), multiplied in the wider of the two dtypes; scale is (1, D)."""
    if scale is None:
        return rounded.astype(dtype)
    product_dtype = promoted(rounded.dtype, scale.dtype)
    return (rounded.astype(product_dtype) * (offset + scale.astype(product_dtype))).astype(dtype)


def row_gradients(
    dy: jax.Array, x: jax.Array, scale: jax.Array | None, *, width: int, eps: float, offset: float
) -> tuple[jax.Array, jax.Array]:
    """dx and, row by row, the terms whose sum over rows is dscale; both float32, of the unrounded function."""
    exact, _, rstd = normalized_rows(x, width=width, eps=eps, casting_mode="gemma")
    dy = dy.astype(exact.dtype)
    dxhat = dy if scale is None else dy * (offset + scale.astype(exact.dtype))
    # dx = rstd · (dx̂ − x̂ · mean(dx̂ · x̂))
    dx = rstd * (dxhat - exact * (jnp.sum(dxhat * exact, axis=-1, keepdims=True) / width))
    return dx, dy * exact


def forward(x: jax.Array, scale: jax.Array | None, *, eps: float, offset: float, casting_mode: str) -> jax.Array:
    """x (N, D), scale (D,) or None → y (N, D) in x.dtype."""
    _, rounded, _ = normalized_rows(x, width=x.shape[-1], eps=eps, casting_mode=casting_mode)
    scale = None if scale is None else scale[None, :]
    return scaled_rows(rounded, scale, offset=offset, dtype=x.dtype)


def backward(
    dy: jax.Array, x: jax.Array, scale: jax.Array | None, *, eps: float, offset: float
) -> tuple[jax.Array, jax.Array | None]:
    """dy, x (N, D), scale (D,) or None → dx (N, D), dscale (D,) or None, in their primals' dtypes."""
    scale_row = None if scale is None else scale[None, :]
    dx, dscale_rows = row_gradients(dy, x, scale_row, width=x.shape[-1], eps=eps, offset=offset)
    dscale = None if scale is None else jnp.sum(dscale_rows, axis=0).astype(scale.dtype)
    return dx.astype(x.dtype), dscale
