"""A matrix product of operands that are rounded to FP8 numbers, and the same for both products of its gradients."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from liger_jax.ops import _checks, _mesh, layout
from liger_jax.ops._checks import ArrayLike
from liger_jax.ops._place import Place, place_of

_OP = "fp8_matmul"
FORWARD, GRADIENT = jnp.float8_e4m3fn, jnp.float8_e5m2  # of x and kernel, and of the gradient that comes in
LEAST_CAPABILITY = (8, 9)  # of a GPU with FP8 products: Ada's, Hopper's and newer ones
# `checkpoint_name` of the product in x.dtype. A policy that keeps products keeps this, and not the float32 sums of FP8
# numbers, which take twice the memory.
FP8_PRODUCT = "fp8_product"


class _Scaled(NamedTuple):
    """An array as FP8 numbers times a float32 scale."""

    numbers: jax.Array
    scale: jax.Array


def _scaled(x, dtype):
    """x, rounded; all NaN if x holds NaN or inf."""
    largest = float(jnp.finfo(dtype).max)
    maximum = jnp.max(jnp.abs(x), initial=0).astype(jnp.float32)
    scale = jnp.maximum(maximum / largest, jnp.finfo(jnp.float32).tiny)  # zeros stay zeros
    scale = jnp.where(jnp.isfinite(maximum), scale, jnp.nan)
    # Above its largest number a format has NaN or inf, and a quotient may be rounded up.
    return _Scaled(jnp.clip(x.astype(jnp.float32) / scale, -largest, largest).astype(dtype), scale)


def _product(a, b, contracting, dtype):
    """a·b, accumulated in float32. One scale after the other, so that their product does not underflow."""
    sums = jax.lax.dot_general(a.numbers, b.numbers, (contracting, ((), ())), preferred_element_type=jnp.float32)
    return (sums * a.scale * b.scale).astype(dtype)


@jax.custom_vjp
def _fp8_matmul_vjp(x, kernel):
    return _product(_scaled(x, FORWARD), _scaled(kernel, FORWARD), ((x.ndim - 1,), (0,)), x.dtype)


def _forward_rule(x, kernel):
    # A residual's shape tells which gradients are wanted, as in `gated_mlp`. The operands are rounded again in the
    # backward, from arrays that are there anyway.
    needs = [jnp.zeros(int(primal.perturbed), jnp.float32) for primal in (x, kernel)]
    x, kernel = x.value, kernel.value
    kept = x if needs[1].size else jnp.zeros((0,) * x.ndim, x.dtype)
    return _fp8_matmul_vjp(x, kernel), (needs, kept, kernel)


def _backward_rule(residuals, dy):
    needs, x, kernel = residuals
    dy, tokens = _scaled(dy, GRADIENT), tuple(range(x.ndim - 1))
    dx = dkernel = None
    if needs[0].size:
        dx = _product(dy, _scaled(kernel, FORWARD), ((x.ndim - 1,), (1,)), x.dtype)
    if needs[1].size:
        dkernel = _product(_scaled(x, FORWARD), dy, (tokens, tokens), kernel.dtype)
    return dx, dkernel


_fp8_matmul_vjp.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)
# Outside of jit, shard_map runs no custom_vjp with symbolic zeros, but it runs a jitted one.
_fp8_matmul = jax.jit(_fp8_matmul_vjp, inline=True)


def fp8_matmul(x: Float[ArrayLike, "*batch D"], kernel: Float[ArrayLike, "D F"]) -> Float[Array, "*batch F"]:
    """x · kernel with FP8 operands, in the forward and in both gradients.

    `x` and `kernel` are rounded to e4m3 (3 bits behind the point, at most 448), and the incoming gradient to e5m2 (2
    bits, at most 57344). Before that each array is divided by a scale, with which its largest number becomes the
    format's largest. Sums are float32, and are multiplied by both scales. So a row's result depends a little on the
    other rows, whose largest number may be its scale.

    An array's scale is that of all its numbers, over all devices of a mesh with Auto axes. In a `jax.shard_map` each
    device's part has a scale of its own, as it has a product of its own.

    Products are FP8 on NVIDIA GPUs of compute capability 8.9 and above. A CPU rounds in the same way and multiplies in
    float32, for tests.

    Args:
        x: (..., D), any float dtype.
        kernel: (D, F) in x.dtype.

    Returns:
        (..., F) in x.dtype; NaN everywhere if an operand holds NaN or inf, and so are the gradients.

    Raises:
        TypeError: an operand is not floating point.
        ValueError: shapes or dtypes do not fit; the device has no FP8 products, or is a TPU, on which none was
            measured; or an operand lies on a mesh with Explicit axes.

    Example:
        >>> fp8_matmul(jnp.array([[448.0, 17.0]]), jnp.array([[1.0], [1.0]])).tolist()  # e4m3 has 16 and 18
        [[464.0]]

    References:
        Micikevicius et al., "FP8 Formats for Deep Learning", 2022 (arXiv:2209.05433).
    """
    x, kernel = _checks.floating(_OP, x=x, kernel=kernel)
    if x.ndim == 0 or kernel.ndim != 2 or kernel.shape[0] != x.shape[-1]:
        raise ValueError(
            f"{_OP}: x has shape {x.shape} and kernel {kernel.shape}, but they must be (..., D) and (D, F); pass a "
            "kernel in Flax's layout; transpose it if it is (F, D)."
        )
    if kernel.dtype != x.dtype:
        raise ValueError(
            f"{_OP}: kernel has dtype {kernel.dtype} and x {x.dtype}, but both must have one, which is the result's; "
            "cast it, for example kernel.astype(x.dtype)."
        )
    if any(map(layout.is_explicit, (x, kernel))):
        raise ValueError(
            f"{_OP}: x or kernel lies on a mesh with Explicit axes, on which the gradients' sums over tokens have no "
            "sharding; call it inside jax.sharding.auto_axes or jax.shard_map."
        )
    if (reason := refusal(place_of(x, kernel))) is not None:
        raise ValueError(f"{_OP}: {reason} Use bfloat16 products there, without KernelOptions(products='fp8').")
    return checkpoint_name(_fp8_matmul(*_mesh.align_varying(x, kernel)), FP8_PRODUCT)


def refusal(place: Place) -> str | None:
    """Why FP8 products do not run in a place, as a sentence; None if they do.

    Args:
        place: the device.

    Returns:
        The sentence, or None.
    """
    if place.platform == "gpu" and place.capability < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        return (
            f"{place.device.device_kind} has no FP8 products, which take an NVIDIA GPU of compute capability {least}."
        )
    if place.platform == "tpu":
        return f"on {place.device.device_kind} FP8 products were never measured, and most TPUs have none."
    return None
