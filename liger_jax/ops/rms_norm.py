"""Root-mean-square layer normalisation."""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float

from liger_jax.ops import _explicit, _rows, checks, meshes
from liger_jax.ops.checks import ArrayLike
from liger_jax.ops.kernels import Implementation, Kernels
from liger_jax.ops.place import place_of
from liger_jax.pallas_kernels.norms import rms_norm as formulas
from liger_jax.pallas_kernels.norms.backends import backends

_KERNELS = Kernels(
    "rms_norm",
    backends(formulas, "xla", "triton", "mosaic_gpu", "mosaic_tpu"),
    defaults={"gpu": ("triton",), "tpu": ("mosaic_tpu",)},
)
_HOPPER_WIDTHS, _H100_WIDTHS = (9216, 2560), (9216, 9216)  # forward and backward; benchmarks/results/row_tiles.md
CASTING_MODES = ("llama", "gemma", "none")


def rms_norm(
    x: Float[ArrayLike, "*batch D"],
    scale: Float[ArrayLike, " D"] | None = None,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    implementation: Implementation = None,
) -> Float[Array, "*batch D"]:
    """Normalises the last axis by its root mean square: y = x / sqrt(mean(x²) + eps) · (offset + scale).

    `x`, `scale` and on NVIDIA GPUs two numbers a row are kept for the backward pass. Sums and gradients are computed in
    float32.

    Args:
        x: (..., D), any float dtype.
        scale: (D,), any float dtype, or None for no scale.
        eps: added to the mean square, a finite Python number ≥ 0.
        offset: added to the scale, a Python number: 1.0 for Gemma, which stores its scale minus 1.
        casting_mode: where the result is rounded to x.dtype. "llama": before the scale; "gemma": once, at the end;
            "none": everything after the reciprocal root is computed in x.dtype.
        implementation: None to choose, or "xla", "triton", "mosaic_gpu" (Hopper) or "mosaic_tpu"; see `liger_jax.ops`.

    Returns:
        (..., D) in x.dtype.

    Example:
        >>> rms_norm(jnp.array([[3.0, 4.0]]), jnp.array([1.0, 2.0]), eps=0.0).tolist()
        [[0.849, 2.263]]

    References:
        Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019 (arXiv:1910.07467).
    """
    x, scale = checks.floating("rms_norm", "scale", x=x, scale=scale)
    checks.check_eps("rms_norm", eps)
    checks.check_number("rms_norm", offset=offset)
    checks.check_choice("rms_norm", "casting_mode", casting_mode, CASTING_MODES)
    checks.check_rows("rms_norm", x, scale=scale)
    if (spec := _explicit.norm_spec("rms_norm", x)) is not None:
        options = dict(eps=eps, offset=offset, casting_mode=casting_mode, implementation=implementation)
        op = functools.partial(rms_norm, **options)
        return _explicit.on_rows("rms_norm", op, spec, (x,), (scale,))
    rows = x.reshape(-1, x.shape[-1])
    place = place_of(rows, scale)
    widths = _H100_WIDTHS if place.is_h100 else _HOPPER_WIDTHS
    forward, backward = _rows.choose(_KERNELS, implementation, rows, scale, hopper_widths=widths, place=place)
    options = {"eps": float(eps), "offset": float(offset)}
    kernels = forward.kernel("forward", **options, casting_mode=casting_mode), backward.kernel("backward", **options)
    return jnp.reshape(_rows.normalised(meshes.align_varying(rows, scale), *kernels), x.shape)
