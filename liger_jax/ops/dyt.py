"""Dynamic tanh."""

from typing import Any

import jax
from jaxtyping import Array, Float

from liger_jax.ops import _checks, _dispatch, _mesh
from liger_jax.pallas_kernels.dyt import xla

_OP = "dyt"
# No kernel: it is elementwise, and XLA fuses it into its neighbours.
_KERNELS = {"xla": xla}


@jax.custom_vjp
def _dyt(x, alpha, scale, bias) -> Any:
    return xla.forward(x, alpha, scale, bias)


def _forward_rule(*inputs):
    # tanh is cheaper to make again than to read.
    return xla.forward(*inputs), inputs


def _backward_rule(residuals, dy):
    return xla.backward(dy, *residuals)


_dyt.defvjp(_forward_rule, _backward_rule)


def dyt(
    x: Float[Array, "*batch D"],
    alpha: Float[Array, ""],
    scale: Float[Array, " D"] | None = None,
    bias: Float[Array, " D"] | None = None,
    *,
    implementation: _dispatch.Implementation = None,
) -> Float[Array, "*batch D"]:
    """Dynamic tanh, which stands in a norm's place without its statistics: y = tanh(alpha · x) · scale + bias.

    Computed in float32 and rounded once. Only the inputs are kept for the backward pass. XLA is the only
    implementation: it fuses an elementwise op into its neighbours.

    Args:
        x: (..., D), any float dtype.
        alpha: (), any float dtype; 0.5 is the usual start.
        scale: (D,), any float dtype, or None for no scale.
        bias: (D,), any float dtype, or None for no bias.
        implementation: None or "xla".

    Returns:
        (..., D) in x.dtype.

    Raises:
        TypeError: an array is not floating point.
        ValueError: a shape does not fit, or `implementation` is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> dyt(jnp.array([[0.0, 2.0]]), jnp.array(0.5), jnp.array([1.0, 2.0])).tolist()
        [[0.0, 1.5232]]

    References:
        Zhu et al., "Transformers without Normalization", 2025 (arXiv:2503.10622).
    """
    _checks.check_floating(_OP, x=x, alpha=alpha, scale=scale, bias=bias)
    _checks.check_rows(_OP, x, scale=scale, bias=bias)
    _checks.check_shape(_OP, "alpha", alpha, (), "one number scales all of x")
    _dispatch.choose(_OP, _KERNELS, {}, implementation, x, alpha, scale, bias)
    return _dyt(*_mesh.align_varying(x, alpha, scale, bias))
