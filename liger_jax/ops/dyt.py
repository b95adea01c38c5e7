"""Dynamic tanh."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from liger_jax.ops import _checks, _explicit, _mesh
from liger_jax.ops._checks import ArrayLike
from liger_jax.ops._kernels import Implementation, Kernels
from liger_jax.pallas_kernels.norms import dyt as formulas
from liger_jax.pallas_kernels.norms.backends import backends

_OP = "dyt"
# No defaults: XLA runs it everywhere until something is measured.
_KERNELS = Kernels(_OP, backends(formulas, "xla", "triton", "mosaic_tpu"))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _dyt(x, alpha, scale, bias, forward, backward) -> Any:
    return forward.run(*forward.guarded(x, alpha, scale, bias))


def _forward_rule(x, alpha, scale, bias, forward, backward):
    # tanh is cheaper to make again than to read.
    return forward.run(*forward.guarded(x, alpha, scale, bias)), (x, alpha, scale, bias)


def _backward_rule(forward, backward, residuals, dy):
    return backward.run(*backward.guarded(dy, *residuals))


_dyt.defvjp(_forward_rule, _backward_rule)


def dyt(
    x: Float[ArrayLike, "*batch D"],
    alpha: Float[ArrayLike, ""],
    scale: Float[ArrayLike, " D"] | None = None,
    bias: Float[ArrayLike, " D"] | None = None,
    *,
    implementation: Implementation = None,
) -> Float[Array, "*batch D"]:
    """Dynamic tanh, which replaces a norm and needs no statistics of x: y = tanh(alpha · x) · scale + bias.

    Computed in float32 and rounded once. Only the inputs are kept for the backward pass. The default is XLA, because
    the kernels are not measured yet.

    Args:
        x: (..., D), any float dtype.
        alpha: (), any float dtype; 0.5 is the usual start.
        scale: (D,), any float dtype, or None for no scale.
        bias: (D,), any float dtype, or None for no bias.
        implementation: None for the platform's default, or "xla", "triton", "mosaic_tpu", their ":interpret"
            forms, or a tuple of these to try in order.

    Returns:
        (..., D) in x.dtype.

    Raises:
        TypeError: an array is not floating point.
        ValueError: a shape does not fit, `implementation` is unknown, or the named implementation cannot run here.

    Example:
        >>> import jax.numpy as jnp
        >>> dyt(jnp.array([[0.0, 2.0]]), jnp.array(0.5), jnp.array([1.0, 2.0])).tolist()
        [[0.0, 1.5232]]

    References:
        Zhu et al., "Transformers without Normalization", 2025 (arXiv:2503.10622).
    """
    x, alpha, scale, bias = _checks.floating(_OP, x=x, alpha=alpha, scale=scale, bias=bias)
    _checks.check_rows(_OP, x, scale=scale, bias=bias)
    _checks.check_shape(_OP, "alpha", alpha, (), "one number scales all of x")
    if (spec := _explicit.norm_spec("dyt", x)) is not None:
        op = functools.partial(dyt, implementation=implementation)
        return _explicit.on_rows(_OP, op, spec, (x,), (alpha, scale, bias))
    rows = x.reshape(-1, x.shape[-1])
    choice = _KERNELS.choose(implementation, rows, alpha, scale, bias)
    kernels = choice.kernel("forward"), choice.kernel("backward")
    return jnp.reshape(_dyt(*_mesh.align_varying(rows, alpha, scale, bias), *kernels), x.shape)
