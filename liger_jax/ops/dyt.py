"""Dynamic tanh."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from liger_jax.ops import _explicit, checks
from liger_jax.ops.checks import ArrayLike
from liger_jax.ops.kernels import Implementation, only_xla
from liger_jax.pallas_kernels.tiles import in_float32, promoted

_OP = "dyt"
_KERNELS = only_xla(_OP)


@jax.checkpoint
def _dyt(x, alpha, scale, bias):
    x32 = in_float32(x)
    y = jnp.tanh(in_float32(alpha).astype(x32.dtype) * x32)
    if scale is not None:
        dtype = promoted(y.dtype, scale.dtype)
        y = y.astype(dtype) * _beside(scale, x).astype(dtype)
    return (y if bias is None else y + _beside(bias, x).astype(y.dtype)).astype(x.dtype)


def _beside(vector: jax.Array, x: jax.Array) -> jax.Array:
    """The vector with leading axes of size 1, up to x's rank."""
    return vector.reshape((1,) * (x.ndim - 1) + vector.shape)


def dyt(
    x: Float[ArrayLike, "*batch D"],
    alpha: Float[ArrayLike, ""],
    scale: Float[ArrayLike, " D"] | None = None,
    bias: Float[ArrayLike, " D"] | None = None,
    *,
    implementation: Implementation = None,
) -> Float[Array, "*batch D"]:
    """Dynamic tanh, which replaces a norm and needs no statistics of x: y = tanh(alpha · x) · scale + bias.

    Computed in float32 and rounded once. Only the inputs are kept for the backward pass. XLA is the only
    implementation: it fuses the op with its neighbours.

    Args:
        x: (..., D), any float dtype.
        alpha: (), any float dtype; usually initialised with 0.5.
        scale: (D,), any float dtype, or None for no scale.
        bias: (D,), any float dtype, or None for no bias.
        implementation: None or "xla".

    Returns:
        (..., D) in x.dtype.

    Example:
        >>> dyt(jnp.array([[0.0, 2.0]]), jnp.array(0.5), jnp.array([1.0, 2.0])).tolist()
        [[0.0, 1.5232]]

    References:
        Zhu et al., "Transformers without Normalization", 2025 (arXiv:2503.10622).
    """
    x, alpha, scale, bias = checks.floating(_OP, "scale", "bias", x=x, alpha=alpha, scale=scale, bias=bias)
    checks.check_rows(_OP, x, scale=scale, bias=bias)
    checks.check_shape(_OP, "alpha", alpha, (), "one number scales all of x")
    _KERNELS.choose(implementation, x, alpha, scale, bias)
    if (spec := _explicit.norm_spec(_OP, x)) is not None:
        return _explicit.on_rows(_OP, dyt, spec, (x,), (alpha, scale, bias))
    return _dyt(x, alpha, scale, bias)
