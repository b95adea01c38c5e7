"""PolyNorm."""

import functools
from typing import Any

import jax
from jaxtyping import Array, Float

from liger_jax.ops import _checks, _explicit, _mesh
from liger_jax.ops._checks import ArrayLike
from liger_jax.ops._kernels import Implementation, Kernels
from liger_jax.pallas_kernels.norms import poly_norm as xla

_OP = "poly_norm"
# There is no kernel yet. The gain over autodiff is memory: nothing is kept but the inputs.
_KERNELS = Kernels(_OP, {"xla": xla})


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _poly_norm(x, weight, bias, eps) -> Any:
    return xla.forward(x, weight, bias, eps=eps)


def _forward_rule(x, weight, bias, eps):
    return xla.forward(x, weight, bias, eps=eps), (x, weight, bias)


def _backward_rule(eps, residuals, dy):
    return xla.backward(dy, *residuals, eps=eps)


_poly_norm.defvjp(_forward_rule, _backward_rule)


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
    if (spec := _explicit.norm_spec("poly_norm", x)) is not None:
        op = functools.partial(poly_norm, eps=eps, implementation=implementation)
        return _explicit.on_rows(_OP, op, spec, (x,), (weight, bias))
    _KERNELS.choose(implementation, x, weight, bias)
    return _poly_norm(*_mesh.align_varying(x, weight, bias), float(eps))
