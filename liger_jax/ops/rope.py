"""Rotary position embedding."""

import dataclasses
import functools

import jax
from jaxtyping import Array, Float

from liger_jax.ops import _checks, _dispatch, _mesh
from liger_jax.pallas_kernels.rope import triton, xla

_OP = "apply_rope"
# No TPU kernel: XLA fuses this elementwise pass into its neighbours, where a kernel would be a wall.
_KERNELS = {"xla": xla, "triton": triton}
_DEFAULTS = {"gpu": ("triton",)}


@dataclasses.dataclass(frozen=True)
class _Options:
    """What the kernel is compiled for."""

    choice: str

    def run(self, *arrays: jax.Array, inverse: bool):
        return _dispatch.bind(_OP, _KERNELS, self.choice, "rotate")(*arrays, inverse=inverse)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _rotate(q, k, cos, sin, options):
    return options.run(q, k, cos, sin, inverse=False)


def _forward_rule(q, k, cos, sin, options):
    if cos.perturbed or sin.perturbed:
        raise TypeError(
            f"{_OP}: cos and sin are constants and have no gradient; pass jax.lax.stop_gradient of them, "
            "or differentiate by other arguments."
        )
    q, k, cos, sin = q.value, k.value, cos.value, sin.value
    return options.run(q, k, cos, sin, inverse=False), (cos, sin)


def _backward_rule(options, residuals, cotangents):
    dq, dk = (_dispatch.instantiated(x) for x in cotangents)
    return *options.run(dq, dk, *residuals, inverse=True), None, None


_rotate.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)
# Outside of jit, shard_map runs no custom_vjp with symbolic zeros, but it runs a jitted one.
_rotate = jax.jit(_rotate, static_argnums=4, inline=True)


def apply_rope(
    q: Float[Array, "B T Q H"],
    k: Float[Array, "B T K H"],
    cos: Float[Array, "_ T R"],
    sin: Float[Array, "_ T R"],
    *,
    implementation: _dispatch.Implementation = None,
) -> tuple[Float[Array, "B T Q H"], Float[Array, "B T K H"]]:
    """Rotates queries and keys by their positions' angles: x·cos + rotate_half(x)·sin.

    Half-rotation layout, as Hugging Face has it: elements i and i + R/2 make a pair. The gradient is the inverse
    rotation, so only the tables are kept for the backward pass. Computed in float32, rounded once.

    Args:
        q: (B, T, Q, H), any float dtype.
        k: (B, T, K, H), any float dtype.
        cos: (B, T, R) or (1, T, R), R ≤ H even; elements past R are left as they are. Constants.
        sin: the shape of `cos`. Constants.
        implementation: None for the platform's default, or "xla", "triton", "triton:interpret", or a tuple of these
            to try in order. On a TPU it is XLA, which fuses the rotation into its neighbours.

    Returns:
        (q, k), rotated, in their shapes and dtypes.

    Raises:
        TypeError: an array is not floating point, or `cos` or `sin` is differentiated.
        ValueError: a shape does not fit, or the named implementation is unknown or cannot run here.

    Example:
        >>> import jax.numpy as jnp
        >>> q = k = jnp.array([1.0, 0.0]).reshape(1, 1, 1, 2)
        >>> quarter_turn = (jnp.zeros((1, 1, 2)), jnp.ones((1, 1, 2)))
        >>> print(apply_rope(q, k, *quarter_turn)[0].reshape(-1))
        [0. 1.]

    References:
        Su et al., "RoFormer", 2021 (arXiv:2104.09864).
    """
    _checks.check_floating(_OP, q=q, k=k, cos=cos, sin=sin)
    _check_shapes(q, k, cos, sin)
    choice = _dispatch.choose(_OP, _KERNELS, _DEFAULTS, implementation, q, k, cos, sin)
    q, k, cos, sin = _mesh.align_varying(q, k, cos, sin)
    return _rotate(q, k, cos, sin, _Options(choice))


def _check_shapes(q, k, cos, sin):
    if q.ndim != 4 or k.ndim != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"{_OP}: q has shape {q.shape} and k {k.shape}, but they must be (B, T, Q, H) and (B, T, K, H) with "
            "the same B, T and H; transpose heads and positions if they come as (B, Q, T, H)."
        )
    batch, length, _, width = q.shape
    if cos.ndim != 3 or cos.shape[0] not in (1, batch) or cos.shape[1] != length:
        raise ValueError(
            f"{_OP}: cos has shape {cos.shape}, but must be (1, {length}, R) or ({batch}, {length}, R); "
            "index the tables by position first."
        )
    if cos.shape[2] > width or cos.shape[2] % 2:
        raise ValueError(f"{_OP}: cos has width R={cos.shape[2]}, but R must be even and at most H={width}.")
    _checks.check_shape(_OP, "sin", sin, cos.shape, "cos's")
