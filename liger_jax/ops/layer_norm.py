"""Layer normalisation."""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float

from liger_jax.ops import _explicit, _rows, checks, meshes
from liger_jax.ops.checks import ArrayLike
from liger_jax.ops.kernels import Implementation, Kernels
from liger_jax.pallas_kernels.norms import layer_norm as formulas
from liger_jax.pallas_kernels.norms.backends import backends

_OP = "layer_norm"
_KERNELS = Kernels(_OP, backends(formulas, "xla", "triton", "mosaic_gpu", "mosaic_tpu"), defaults={"gpu": ("triton",)})
# Forward and backward; measured, benchmarks/results/row_tiles.md. At 8,192 columns with float32 scales Triton's forward
# is faster.
_HOPPER_WIDTHS, _HOPPER_WIDTHS_WITH_FLOAT32_SCALE = (8192, 2304), (9216, 2304)


def layer_norm(
    x: Float[ArrayLike, "*batch D"],
    scale: Float[ArrayLike, " D"] | None = None,
    bias: Float[ArrayLike, " D"] | None = None,
    *,
    eps: float = 1e-6,
    implementation: Implementation = None,
) -> Float[Array, "*batch D"]:
    """Normalises the last axis by its mean and variance: y = (x − mean(x)) / sqrt(var(x) + eps) · scale + bias.

    Computed in float32 and rounded once. The inputs, and on NVIDIA GPUs three numbers a row, are kept for the backward
    pass. On TPUs the default is XLA, because the kernel is not measured there.

    Args:
        x: (..., D), any float dtype.
        scale: (D,), any float dtype, or None for no scale.
        bias: (D,), any float dtype, or None for no bias.
        eps: added to the variance, a finite Python number ≥ 0.
        implementation: None to choose, or "xla", "triton", "mosaic_gpu" (Hopper) or "mosaic_tpu"; see `liger_jax.ops`.

    Returns:
        (..., D) in x.dtype.

    Example:
        >>> layer_norm(jnp.array([[3.0, 5.0]]), jnp.array([1.0, 2.0]), eps=0.0).tolist()
        [[-1.0, 2.0]]

    References:
        Ba, Kiros and Hinton, "Layer Normalization", 2016 (arXiv:1607.06450).
    """
    x, scale, bias = checks.floating(_OP, "scale", "bias", x=x, scale=scale, bias=bias)
    checks.check_eps(_OP, eps)
    checks.check_rows(_OP, x, scale=scale, bias=bias)
    if (spec := _explicit.norm_spec("layer_norm", x)) is not None:
        op = functools.partial(layer_norm, eps=eps, implementation=implementation)
        return _explicit.on_rows(_OP, op, spec, (x,), (scale, bias))
    rows = x.reshape(-1, x.shape[-1])
    is_float32 = scale is not None and scale.dtype.itemsize >= 4
    widths = _HOPPER_WIDTHS_WITH_FLOAT32_SCALE if is_float32 else _HOPPER_WIDTHS
    forward, backward = _rows.choose(_KERNELS, implementation, rows, scale, bias, hopper_widths=widths)
    kernels = forward.kernel("forward", eps=float(eps)), backward.kernel("backward", eps=float(eps))
    return jnp.reshape(_rows.normalised(meshes.align_varying(rows, scale, bias), *kernels), x.shape)
