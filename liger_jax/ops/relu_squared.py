"""Squared rectifier."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from liger_jax.ops import checks
from liger_jax.ops.checks import ArrayLike
from liger_jax.ops.kernels import Implementation, only_xla
from liger_jax.pallas_kernels.tiles import in_float32

_KERNELS = only_xla("relu_squared")


@jax.checkpoint
def _relu_squared(x):
    positive = jnp.maximum(in_float32(x), 0.0)
    return (positive * positive).astype(x.dtype)  # a product, whose gradient overflows later than that of a square


def relu_squared(x: Float[ArrayLike, "..."], *, implementation: Implementation = None) -> Float[Array, "..."]:
    """The squared rectifier of Primer's and Nemotron's feed-forward layers: y = max(x, 0)².

    Value and gradient are computed in float32 and rounded once. Only `x` is kept for the backward pass. XLA is the only
    implementation: it fuses the op with its neighbours.

    Args:
        x: any shape, any float dtype.
        implementation: None or "xla".

    Returns:
        An array like `x`.

    Example:
        >>> relu_squared(jnp.array([-1.0, 0.5, 3.0])).tolist()
        [0.0, 0.25, 9.0]

    References:
        So et al., "Primer: Searching for Efficient Transformers for Language Modeling", 2021 (arXiv:2109.08668).
    """
    (x,) = checks.floating("relu_squared", x=x)
    _KERNELS.choose(implementation, x)
    return _relu_squared(x)
