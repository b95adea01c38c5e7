"""A residual's addition and root-mean-square layer normalisation in one pass."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from liger_jax.ops import _explicit, _rows, checks, meshes
from liger_jax.ops.checks import ArrayLike
from liger_jax.ops.kernels import Implementation, Kernels
from liger_jax.ops.rms_norm import CASTING_MODES
from liger_jax.pallas_kernels.norms import fused_add_rms_norm as formulas
from liger_jax.pallas_kernels.norms.backends import backends

_OP = "fused_add_rms_norm"
_KERNELS = Kernels(_OP, backends(formulas, "xla", "triton", "mosaic_gpu", "mosaic_tpu"), defaults={"gpu": ("triton",)})
_HOPPER_WIDTHS = (9216, 2048)  # forward and backward; measured, benchmarks/results/row_tiles.md


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _fused(x, residual, scale, forward, backward, adds) -> Any:
    y, new_residual, _ = forward.run(*forward.guarded(x, residual, scale))
    return y, new_residual


def _forward_rule(x, residual, scale, forward, backward, adds):
    y, new_residual, sums = forward.run(*forward.guarded(x, residual, scale))
    return (y, new_residual), (new_residual, scale, sums)


def _backward_rule(forward, backward, adds, residuals, cotangents):
    dx, dresidual, dscale = backward.run(*backward.guarded(*cotangents, *residuals))
    return dx, dresidual if adds else None, dscale


_fused.defvjp(_forward_rule, _backward_rule)


def fused_add_rms_norm(
    x: Float[ArrayLike, "*batch D"],
    residual: Float[ArrayLike, "*batch D"] | None,
    scale: Float[ArrayLike, " D"] | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    implementation: Implementation = None,
) -> tuple[Float[Array, "*batch D"], Float[Array, "*batch D"]]:
    """Adds to the residual stream and normalises it: s = x + residual, y = s / sqrt(mean(s²) + eps) · (offset + scale).

    `y, residual = fused_add_rms_norm(x, residual, scale)` is the step between two sublayers of a pre-norm model. s is
    rounded to residual.dtype before it is normalised. s, `scale` and on NVIDIA GPUs two numbers a row are kept for the
    backward pass. x and residual have the same gradient, the sum of the gradients through both outputs, which is
    computed in float32. For a model's first norm, which has nothing to add, pass `residual=None`: then s is x. On TPUs
    the default is XLA, because the kernel is not measured there. Other arguments are those of `rms_norm`.

    Args:
        x: (..., D), any float dtype: the output of the sublayer before.
        residual: (..., D), any float dtype: the residual stream, to which x is added; None if x is the stream itself.

    Returns:
        y, (..., D) in x.dtype, and s, the new residual stream, (..., D) in residual.dtype; without a residual, s is x.

    Example:
        >>> y, residual = fused_add_rms_norm(jnp.array([[1.0, 3.0]]), jnp.array([[2.0, 1.0]]), eps=0.0)
        >>> y.tolist(), residual.tolist()
        ([[0.849, 1.131]], [[3.0, 4.0]])

    References:
        Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019 (arXiv:1910.07467).
    """
    x, residual, scale = checks.floating(_OP, "residual", "scale", x=x, residual=residual, scale=scale)
    checks.check_eps(_OP, eps)
    checks.check_number(_OP, offset=offset)
    checks.check_choice(_OP, "casting_mode", casting_mode, CASTING_MODES)
    checks.check_rows(_OP, x, scale=scale)
    checks.check_shape(_OP, "residual", residual, x.shape, "it is added to x element by element")
    if (spec := _explicit.norm_spec("fused_add_rms_norm", x)) is not None:
        options = dict(eps=eps, offset=offset, casting_mode=casting_mode, implementation=implementation)
        op = functools.partial(fused_add_rms_norm, **options)
        return _explicit.on_rows(_OP, op, spec, (x, residual), (scale,), results=2)
    rows, added = (a if a is None else a.reshape(-1, x.shape[-1]) for a in (x, residual))
    # The backward reads the sum and both cotangents, with or without a residual, so its tiles hold three arrays.
    arrays = rows, rows if added is None else added, scale
    forward, backward = _rows.choose(_KERNELS, implementation, *arrays, hopper_widths=_HOPPER_WIDTHS)
    options = {"eps": float(eps), "offset": float(offset)}
    kernels = forward.kernel("forward", **options, casting_mode=casting_mode), backward.kernel("backward", **options)
    outputs: Any = _fused(*meshes.align_varying(rows, added, scale), *kernels, added is not None)
    y, new_residual = outputs
    return jnp.reshape(y, x.shape), jnp.reshape(new_residual, x.shape)
