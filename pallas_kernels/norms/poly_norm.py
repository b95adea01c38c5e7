"""PolyNorm (Zhuo et al., 2024), in XLA only: y = w₀·norm(x³) + w₁·norm(x²) + w₂·norm(x) + bias.

It is no row pass: all three norms share one power of each value. XLA makes a pass for each row's largest value, one
for its mean powers, and one for the output.

Everything is float32 and rounded once, at the end. A row with values above 8 is brought down to 8 first, because x⁶
overflows float32 from 2.6 million on. (It is not brought down to 1: the reciprocal of the largest float32 is no normal
number.)
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels.norms import run_xla
from liger_jax.pallas_kernels.norms.row_pass import in_float32

unsupported = run_xla.unsupported
_POWERS = (3, 2, 1)
_LEAST_EPS = 1e-30  # from here on, no x⁶ that vanishes in float32 can be seen beside it
_LARGEST_FACTOR = 2.0**120


class _ReducedRows(NamedTuple):
    """Rows that are made small, and what normalises their powers.

    For each power p, roots has 1 / sqrt(mean((c·x)^2p) + eps·c^2p), where c is the row's factor. Its product with
    (c·x)^p is the normalised x^p.
    """

    small: jax.Array  # c·x
    factor: jax.Array  # c
    roots: tuple[jax.Array, ...]

    def normalised(self) -> list[jax.Array]:
        """norm(x³), norm(x²) and norm(x)."""
        return [self.small**p * root for p, root in zip(_POWERS, self.roots, strict=True)]


def _reduced_rows(x: jax.Array, eps: float) -> _ReducedRows:
    x32 = in_float32(x)
    largest = jnp.max(jnp.abs(x32), axis=-1, keepdims=True)
    factor = 1.0 / jnp.maximum(1.0, largest / 8)
    if eps < _LEAST_EPS:  # then x⁶ must not vanish, either: every row that has no zeros alone is brought to 8
        factor = jnp.where(largest > 0, jnp.minimum(8 / largest, _LARGEST_FACTOR), 1.0)
    small = x32 * factor

    def root(p):
        # A factor's cube may be infinite. Then the power vanishes beside eps, but no eps at all stays none. An eps of
        # 10⁻³⁸ is no normal number in float32, and its root is one.
        mean_square = jnp.mean(small ** (2 * p), axis=-1, keepdims=True)
        return jax.lax.rsqrt(mean_square + (jnp.square(eps**0.5 * factor**p) if eps else 0.0))

    return _ReducedRows(small, factor, tuple(root(p) for p in _POWERS))


def forward(x: jax.Array, weight: jax.Array, bias: jax.Array | None, *, eps: float) -> jax.Array:
    """x (..., D), weight (3,), bias () or None → y in x.dtype."""
    rows = _reduced_rows(x, eps)
    w, (cube, square, itself) = weight.astype(rows.small.dtype), rows.normalised()
    y = w[0] * cube + w[1] * square + w[2] * itself
    return (y if bias is None else y + bias.astype(y.dtype)).astype(x.dtype)


def backward(
    dy: jax.Array, x: jax.Array, weight: jax.Array, bias: jax.Array | None, *, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """dy, x (..., D), weight (3,), bias () or None → dx, dweight, dbias, in their primals' dtypes."""
    rows = _reduced_rows(x, eps)
    dy, w = in_float32(dy), weight.astype(rows.small.dtype)
    dx, dweight = jnp.zeros_like(dy), []
    for i, (p, root, u) in enumerate(zip(_POWERS, rows.roots, rows.normalised(), strict=True)):
        # u = norm(x^p). du/dx is p · x^(p−1) / sqrt(mean(x^2p) + eps), and through the mean −u · mean(dy · u).
        slope = w[i] * p * rows.small ** (p - 1) * root * rows.factor
        dx += slope * (dy - u * jnp.mean(dy * u, axis=-1, keepdims=True))
        dweight.append(jnp.sum(dy * u))
    dbias = None if bias is None else jnp.sum(dy).astype(bias.dtype)
    return dx.astype(x.dtype), jnp.stack(dweight).astype(weight.dtype), dbias
