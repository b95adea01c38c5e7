"""The RMSNorm of linear attention's result, times a gate."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from liger_jax.ops import _explicit, checks
from liger_jax.ops._powers import normalised_powers
from liger_jax.ops.checks import ArrayLike
from liger_jax.ops.kernels import Implementation, only_xla
from liger_jax.pallas_kernels.tiles import in_float32, promoted

_OP = "gated_rms_norm"
_KERNELS = only_xla(_OP)


@functools.partial(jax.checkpoint, static_argnums=(3,))
def _gated_rms_norm(x, gate, scale, eps):
    (y,) = normalised_powers(in_float32(x), eps, (1,))
    if scale is not None:
        y = y * jnp.expand_dims(scale.astype(promoted(scale.dtype, y.dtype)), tuple(range(x.ndim - 1)))
    return (y * jax.nn.silu(in_float32(gate))).astype(x.dtype)


def gated_rms_norm(
    x: Float[ArrayLike, "*batch D"],
    gate: Float[ArrayLike, "*batch D"],
    scale: Float[ArrayLike, " D"] | None = None,
    *,
    eps: float = 1e-6,
    implementation: Implementation = None,
) -> Float[Array, "*batch D"]:
    """Normalises the last axis and gates it: y = x / sqrt(mean(x²) + eps) · scale · gate · sigmoid(gate).

    It follows `gated_delta_rule` in Qwen3-Next, Qwen3.5 and OLMo Hybrid, where each head is normalised separately.
    Computed in float32 and rounded once. Only the inputs are kept for the backward pass. XLA is the only
    implementation.

    Args:
        x: (..., D), any float dtype.
        gate: (..., D), any float dtype.
        scale: (D,), any float dtype, or None for no scale.
        eps: added to the mean square, a finite Python number ≥ 0.
        implementation: None or "xla".

    Returns:
        (..., D) in x.dtype.

    Example:
        >>> x, gate = jnp.array([[3.0, 4.0]]), jnp.array([[1.0, -1.0]])
        >>> gated_rms_norm(x, gate, jnp.array([1.0, 2.0]), eps=0.0).tolist()
        [[0.62, -0.609]]

    References:
        Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024 (arXiv:2412.06464).
    """
    x, gate, scale = checks.floating(_OP, "scale", x=x, gate=gate, scale=scale)
    checks.check_eps(_OP, eps)
    checks.check_rows(_OP, x, scale=scale)
    checks.check_shape(_OP, "gate", gate, x.shape, "it multiplies the normalised x element by element")
    _KERNELS.choose(implementation, x, gate, scale)
    if (spec := _explicit.norm_spec(_OP, x)) is not None:
        return _explicit.on_rows(_OP, functools.partial(gated_rms_norm, eps=eps), spec, (x, gate), (scale,))
    return _gated_rms_norm(x, gate, scale, float(eps))
