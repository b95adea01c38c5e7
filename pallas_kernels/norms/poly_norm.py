"""PolyNorm in plain XLA: a pass for each row's largest value, one for its mean powers, one for the output.

Everything is float32 and rounded once, at the end. A row with values above 8 is brought down to 8 first: x⁶ overflows
float32 from 2.6 million on. (Not to 1: the reciprocal of the largest float32 is no normal number.)
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels.norms import run_xla as xla
from liger_jax.pallas_kernels.norms.run_xla import wide

unsupported = xla.unsupported
_POWERS = (3, 2, 1)


class _Rows(NamedTuple):
    """c·x, c, and 1 / sqrt(mean((c·x)^2p) + eps·c^2p) for each power p, which times (c·x)^p is the normalised x^p."""

    small: jax.Array
    factor: jax.Array
    roots: tuple[jax.Array, ...]

    def normalized(self) -> list[jax.Array]:
        return [self.small**p * root for p, root in zip(_POWERS, self.roots, strict=True)]


def _rows(x: jax.Array, eps: float) -> _Rows:
    x32 = wide(x)
    factor = 1.0 / jnp.maximum(1.0, jnp.max(jnp.abs(x32), axis=-1, keepdims=True) / 8)
    small = x32 * factor
    mean = lambda p: jnp.mean(small ** (2 * p), axis=-1, keepdims=True)
    return _Rows(small, factor, tuple(jax.lax.rsqrt(mean(p) + eps * factor ** (2 * p)) for p in _POWERS))


def forward(x: jax.Array, weight: jax.Array, bias: jax.Array | None, *, eps: float) -> jax.Array:
    """x (..., D), weight (3,), bias () or None → y in x.dtype."""
    rows = _rows(x, eps)
    w, (cube, square, itself) = weight.astype(rows.small.dtype), rows.normalized()
    y = w[0] * cube + w[1] * square + w[2] * itself
    return (y if bias is None else y + bias.astype(y.dtype)).astype(x.dtype)


def backward(
    dy: jax.Array, x: jax.Array, weight: jax.Array, bias: jax.Array | None, *, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """dy, x (..., D), weight (3,), bias () or None → dx, dweight, dbias, in their primals' dtypes."""
    rows = _rows(x, eps)
    dy, w = wide(dy), weight.astype(rows.small.dtype)
    dx, dweight = jnp.zeros_like(dy), []
    for i, (p, root, u) in enumerate(zip(_POWERS, rows.roots, rows.normalized(), strict=True)):
        # du_p/dx = p · x^(p−1) / sqrt(mean(x^2p) + eps), and through the mean −u_p · mean(dy · u_p)
        slope = w[i] * p * rows.small ** (p - 1) * root * rows.factor
        dx += slope * (dy - u * jnp.mean(dy * u, axis=-1, keepdims=True))
        dweight.append(jnp.sum(dy * u))
    dbias = None if bias is None else jnp.sum(dy).astype(bias.dtype)
    return dx.astype(x.dtype), jnp.stack(dweight).astype(weight.dtype), dbias
