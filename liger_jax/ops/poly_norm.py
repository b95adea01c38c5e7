"""PolyNorm."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from liger_jax.ops import _checks, _explicit
from liger_jax.ops._checks import ArrayLike
from liger_jax.ops._kernels import Implementation, only_xla
from liger_jax.ops._powers import shrinking_factor
from liger_jax.pallas_kernels._tiles import in_float32

_OP = "poly_norm"
_KERNELS = only_xla(_OP)


@functools.partial(jax.checkpoint, static_argnums=(3,))
def _poly_norm(x, weight, bias, eps):
    x32 = in_float32(x)
    w = weight.astype(x32.dtype)
    # x⁶ overflows float32 from 2.6 million on, and vanishes below 10⁻⁷.
    factor = shrinking_factor(jnp.max(jnp.abs(x32), axis=-1, keepdims=True), eps)
    small = x32 * factor

    def normalised(power):
        # The cube of a factor may be infinite: then the power vanishes beside eps.
        least = jnp.square(eps**0.5 * factor**power) if eps else 0.0
        mean_square = jnp.mean(small ** (2 * power), axis=-1, keepdims=True)
        return small**power * jax.lax.rsqrt(mean_square + least)

    y = w[0] * normalised(3) + w[1] * normalised(2) + w[2] * normalised(1)
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
        weight: (3,), any float dtype: the coefficients of x³, x² and x; a third each is the usual start.
        bias: (), any float dtype, or None for no bias.
        eps: added to each mean square, a finite Python number ≥ 0.
        implementation: None or "xla".

    Returns:
        (..., D) in x.dtype.

    Raises:
        TypeError: an array is not floating point, or `eps` is no Python number.
        ValueError: a shape does not fit, or `implementation` is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> poly_norm(jnp.array([[1.0, -1.0]]), jnp.array([1.0, 2.0, 4.0]), jnp.array(0.5), eps=0.0).tolist()
        [[7.5, -2.5]]

    References:
        Zhuo et al., "Polynomial Composition Activations", 2024 (arXiv:2411.03884).
    """
    x, weight, bias = _checks.floating(_OP, x=x, weight=weight, bias=bias)
    _checks.check_eps(_OP, eps)
    _checks.check_rows(_OP, x)
    _checks.check_shape(_OP, "weight", weight, (3,), "one coefficient for each of x³, x² and x")
    _checks.check_shape(_OP, "bias", bias, (), "one number is added to all elements")
    _KERNELS.choose(implementation, x, weight, bias)
    if (spec := _explicit.norm_spec(_OP, x)) is not None:
        return _explicit.on_rows(_OP, functools.partial(poly_norm, eps=eps), spec, (x,), (weight, bias))
    return _poly_norm(x, weight, bias, float(eps))
