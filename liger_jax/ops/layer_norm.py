"""Layer normalisation."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from liger_jax.ops import _checks, _dispatch, _explicit, _mesh, _rows
from liger_jax.ops._checks import ArrayLike
from liger_jax.pallas_kernels.norms import layer_norm as formulas
from liger_jax.pallas_kernels.norms.backends import backends

_OP = "layer_norm"
_KERNELS = backends(formulas, "xla", "triton", "mosaic_gpu", "mosaic_tpu")
_DEFAULTS = {"gpu": ("triton",)}
# Forward, backward; measured, benchmarks/results/row_tiles.md. Triton is faster forward at 8,192 with float32 scales.
_WIDE, _WIDE_OF_FLOAT32 = (8192, 2304), (9216, 2304)


@dataclasses.dataclass(frozen=True)
class _Options:
    """What the kernels are compiled for, and which ones they are."""

    eps: float
    forward: str
    backward: str

    def run(self, function: str, *arrays: Any):
        return _dispatch.bind(_OP, _KERNELS, getattr(self, function), function)(*arrays, eps=self.eps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _layer_norm(x, scale, bias, options) -> Any:
    return _forward_rule(x, scale, bias, options)[0]


def _forward_rule(x, scale, bias, options):
    # x̂ is cheaper to make again than to read. Of the bias, only its dtype is needed.
    y, sums = options.run("forward", x, scale, bias)
    return y, (x, scale, bias, sums)


def _backward_rule(options, residuals, dy):
    return options.run("backward", dy, *residuals)


_layer_norm.defvjp(_forward_rule, _backward_rule)


def layer_norm(
    x: Float[ArrayLike, "*batch D"],
    scale: Float[ArrayLike, " D"] | None = None,
    bias: Float[ArrayLike, " D"] | None = None,
    *,
    eps: float = 1e-6,
    implementation: _dispatch.Implementation = None,
) -> Float[Array, "*batch D"]:
    """Normalises the last axis by its mean and variance: y = (x − mean(x)) / sqrt(var(x) + eps) · scale + bias.

    Computed in float32 and rounded once. The inputs, and on NVIDIA GPUs three numbers a row, are kept for the backward
    pass. On TPUs the default is XLA: the kernel is not measured there.

    Args:
        x: (..., D), any float dtype.
        scale: (D,), any float dtype, or None for no scale.
        bias: (D,), any float dtype, or None for no bias.
        eps: added to the variance, a Python number ≥ 0.
        implementation: None for the platform's default, or "xla", "triton", "mosaic_gpu" (Hopper), "mosaic_tpu", their
            ":interpret" forms, or a tuple of these to try in order.

    Returns:
        (..., D) in x.dtype.

    Raises:
        TypeError: an array is not floating point, or `eps` is no Python number.
        ValueError: a shape does not fit, `implementation` is unknown, or the named implementation cannot run here.

    Example:
        >>> import jax.numpy as jnp
        >>> layer_norm(jnp.array([[3.0, 5.0]]), jnp.array([1.0, 2.0]), eps=0.0).tolist()
        [[-1.0, 2.0]]

    References:
        Ba, Kiros and Hinton, "Layer Normalization", 2016 (arXiv:1607.06450).
    """
    x, scale, bias = _checks.floating(_OP, x=x, scale=scale, bias=bias)
    _checks.check_number(_OP, eps=eps)
    _checks.check_rows(_OP, x, scale=scale, bias=bias)
    if (spec := _explicit.row_spec(x)) is not None:
        op = functools.partial(layer_norm, eps=eps, implementation=implementation)
        return _explicit.on_rows(_OP, op, spec, (x,), (scale, bias))
    rows = x.reshape(-1, x.shape[-1])
    wide = _WIDE if scale is None or scale.dtype.itemsize < 4 else _WIDE_OF_FLOAT32
    kernels = _rows.choose(_OP, _KERNELS, _DEFAULTS, implementation, rows, scale, bias, wide=wide)
    y = _layer_norm(*_mesh.align_varying(rows, scale, bias), _Options(float(eps), *kernels))
    return jnp.reshape(y, x.shape)
