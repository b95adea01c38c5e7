"""Softmax and sparsemax."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from liger_jax.ops import _checks, _explicit
from liger_jax.ops._checks import ArrayLike
from liger_jax.ops._kernels import Implementation, Kernels
from liger_jax.pallas_kernels.softmax import xla

_KERNELS = {op: Kernels(op, {"xla": xla}) for op in ("softmax", "sparsemax")}


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _probabilities(x, kind):
    return xla.forward(x, kind=kind)


def _forward_rule(x, kind):
    y = xla.forward(x, kind=kind)
    return y, y


def _backward_rule(kind, y, dy):
    return (xla.backward(dy, y, kind=kind),)


_probabilities.defvjp(_forward_rule, _backward_rule)


def softmax(
    x: Float[ArrayLike, "..."], *, axis: int = -1, implementation: Implementation = None
) -> Float[Array, "..."]:
    """Makes probabilities of scores: y_i = exp(x_i) / Σ_j exp(x_j) along an axis.

    The largest score is subtracted from all scores first. Value and gradient are computed in float32 and rounded once.
    Only the output is kept for the backward pass.

    Args:
        x: at least one axis, any float dtype. A score of −inf gets probability 0, unless all are −inf.
        axis: the axis of the sum, a Python int.
        implementation: None or "xla".

    Returns:
        An array like `x`.

    Raises:
        TypeError: `x` is not floating point.
        ValueError: `axis` is not among x's, or `implementation` is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> softmax(jnp.log(jnp.array([1.0, 3.0]))).tolist()
        [0.25, 0.75]

    References:
        Bridle, "Probabilistic Interpretation of Feedforward Classification Network Outputs", 1990.
    """
    return _along_axis("softmax", x, axis, implementation)


def sparsemax(
    x: Float[ArrayLike, "..."], *, axis: int = -1, implementation: Implementation = None
) -> Float[Array, "..."]:
    """Makes probabilities of scores, most of them 0: y_i = max(x_i − τ, 0), with τ such that Σ_j y_j = 1 along an axis.

    y is the distribution nearest to x. With S = {i: y_i > 0}, dx_i = dy_i − mean of dy over S for i in S, and 0
    elsewhere. τ is exact: it comes from a sort of the scores. Computed in float32 and rounded once. Only the output is
    kept for the backward pass.

    Args:
        x: at least one axis, any float dtype.
        axis: the axis of the sum, a Python int.
        implementation: None or "xla".

    Returns:
        An array like `x`.

    Raises:
        TypeError: `x` is not floating point.
        ValueError: `axis` is not among x's, or `implementation` is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> sparsemax(jnp.array([1.0, 0.5, -2.0])).tolist()
        [0.75, 0.25, 0.0]

    References:
        Martins and Astudillo, "From Softmax to Sparsemax: A Sparse Model of Attention and Multi-Label
        Classification", 2016 (arXiv:1602.02068).
    """
    return _along_axis("sparsemax", x, axis, implementation)


def _along_axis(op: str, x: ArrayLike, axis: int, implementation: Implementation) -> jax.Array:
    (x,) = _checks.floating(op, x=x)
    if not -x.ndim <= axis < x.ndim:
        cure = "reshape x to (1,)" if x.ndim == 0 else f"pass one in [{-x.ndim}, {x.ndim})"
        raise ValueError(f"{op}: axis={axis} is no axis of x, which has shape {x.shape}; {cure}.")
    rows = jnp.moveaxis(x, axis, -1)
    if (spec := _explicit.row_spec(rows)) is not None:
        local = functools.partial(_along_axis, op, axis=-1, implementation=implementation)
        return jnp.moveaxis(_explicit.on_rows(op, local, spec, (rows,)), -1, axis)
    _KERNELS[op].choose(implementation, rows, kind=op)
    return jnp.moveaxis(_probabilities(rows, op), -1, axis)
