"""PolyNorm."""

import functools

import jax
from jaxtyping import Array, Float

from liger_jax.ops import _explicit, checks
from liger_jax.ops._powers import normalised_powers
from liger_jax.ops.checks import ArrayLike
from liger_jax.ops.kernels import Implementation, only_xla
from liger_jax.pallas_kernels.tiles import in_float32

_OP = "poly_norm"
_KERNELS = only_xla(_OP)


@functools.partial(jax.checkpoint, static_argnums=(3,))
def _poly_norm(x, weight, bias, eps):
    x32 = in_float32(x)
    w = weight.astype(x32.dtype)
    # x⁶ alone would overflow float32 from 2.6 million on, and vanish below 10⁻⁷.
    cube, square, linear = normalised_powers(x32, eps, (3, 2, 1))
    y = w[0] * cube + w[1] * square + w[2] * linear
    return (y if bias is None else y + bias.astype(y.dtype)).astype(x.dtype)


def poly_norm(
    x: Float[ArrayLike, "*batch D"],
    weight: Float[ArrayLike, "3"],
    bias: Float[ArrayLike, ""] | None = None,
    *,
    eps: float = 1e-6,
    implementation: Implementation = None,
) -> Float[Array, "*batch D"]:
    """A polynomial activation of normalised powers: y = w₀·norm(x³) + w₁·norm(x²) + w₂·norm(x) + bias.

    norm(u) = u / sqrt(mean(u²) + eps) over the last axis. Computed in float32 and rounded once. Only the inputs are
    kept for the backward pass. XLA is the only implementation.

    Args:
        x: (..., D), any float dtype.
        weight: (3,), any float dtype: the coefficients of x³, x² and x; usually initialised with a third each.
        bias: (), any float dtype, or None for no bias.
        eps: added to each mean square, a finite Python number ≥ 0.
        implementation: None or "xla".

    Returns:
        (..., D) in x.dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> poly_norm(jnp.array([[1.0, -1.0]]), jnp.array([1.0, 2.0, 4.0]), jnp.array(0.5), eps=0.0).tolist()
        [[7.5, -2.5]]

    References:
        Zhuo et al., "Polynomial Composition Activations", 2024 (arXiv:2411.03884).
    """
    x, weight, bias = checks.floating(_OP, "bias", x=x, weight=weight, bias=bias)
    checks.check_eps(_OP, eps)
    checks.check_rows(_OP, x)
    checks.check_shape(_OP, "weight", weight, (3,), "one coefficient for each of x³, x² and x")
    checks.check_shape(_OP, "bias", bias, (), "one number is added to all elements")
    _KERNELS.choose(implementation, x, weight, bias)
    if (spec := _explicit.norm_spec(_OP, x)) is not None:
        return _explicit.on_rows(_OP, functools.partial(poly_norm, eps=eps), spec, (x,), (weight, bias))
    return _poly_norm(x, weight, bias, float(eps))
