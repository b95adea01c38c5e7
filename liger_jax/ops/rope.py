"""Rotary position embedding."""

import dataclasses
import functools

import jax
from jaxtyping import Array, Float

from liger_jax.ops import _checks, _dispatch, _mesh
from liger_jax.pallas_kernels.rope import triton, xla

_OP = "apply_rope"
# No Mosaic TPU kernel: XLA fuses an elementwise op into its neighbours there, and a kernel's own pass over memory
# can only lose.
_KERNELS = {"xla": xla, "triton": triton}
# Forward and backward at 8 × 2048 × 32/8 × 64 in bf16 on an H200: 89 µs in XLA and 90 in Triton
# (benchmarks/results/implementations.md).
_DEFAULTS: dict[str, tuple[str, ...]] = {}


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
    return options.run(q, k, cos, sin, inverse=False), (cos, sin)


def _backward_rule(options, residuals, cotangents):
    return *options.run(*cotangents, *residuals, inverse=True), None, None


_rotate.defvjp(_forward_rule, _backward_rule)


def apply_rope(
    q: Float[Array, "B T Q H"],
    k: Float[Array, "B T K H"],
    cos: Float[Array, "_ T R"],
    sin: Float[Array, "_ T R"],
    *,
    implementation: _dispatch.Implementation = None,
) -> tuple[Float[Array, "B T Q H"], Float[Array, "B T K H"]]:
    """Rotates queries and keys by their positions: (x₁, x₂)·cos + (−x₂, x₁)·sin, in Hugging Face's half layout.

    x₁ and x₂ are the halves of the first R columns of each head; the columns from R on pass through. The rotation
    is computed in float32 and rounded once. Only `cos` and `sin` are kept for the backward pass, and they are
    constants. The default is XLA: it fuses into its neighbours on TPUs, and on an H200 the Triton kernel is no faster.

    Args:
        q: (B, T, Q, H), any float dtype.
        k: (B, T, K, H), any float dtype; K may differ from Q.
        cos: (B, T, R) or (1, T, R), any float dtype; R is even and at most H. In Hugging Face's tables the second
            half repeats the first.
        sin: as `cos`.
        implementation: None for the platform's default, or "xla", "triton", "triton:interpret", or a tuple of
            these to try in order.

    Returns:
        q and k, rotated, each in its own shape and dtype.

    Raises:
        TypeError: an argument is not floating point, or `cos` or `sin` is differentiated.
        ValueError: a shape does not fit, `implementation` is unknown, or the named one cannot run here.

    Example:
        >>> import jax.numpy as jnp
        >>> q = k = jnp.array([1.0, 2.0]).reshape(1, 1, 1, 2)
        >>> quarter_turn = jnp.zeros((1, 1, 2)), jnp.ones((1, 1, 2))
        >>> apply_rope(q, k, *quarter_turn)[0].squeeze().tolist()
        [-2.0, 1.0]

    References:
        Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021 (arXiv:2104.09864).
    """
    _checks.check_floating(_OP, q=q, k=k, cos=cos, sin=sin)
    _check_shapes(q, k, cos, sin)
    cos, sin = _checks.constant(cos, _OP, "cos"), _checks.constant(sin, _OP, "sin")
    choice = _dispatch.choose(_OP, _KERNELS, _DEFAULTS, implementation, q, k, cos, sin)
    return _rotate(*_mesh.align_varying(q, k, cos, sin), _Options(choice))


def _check_shapes(q: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array) -> None:
    if q.ndim != 4 or k.ndim != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"{_OP}: q has shape {q.shape} and k {k.shape}, but they must be (B, T, Q, H) and (B, T, K, H) with "
            "the same B, T and H; transpose heads and positions if they come as (B, Q, T, H)."
        )
    batch, length, _, width = q.shape
    if cos.ndim != 3 or cos.shape[0] not in (1, batch) or cos.shape[1] != length:
        raise ValueError(
            f"{_OP}: cos has shape {cos.shape}, but must be (1, {length}, R) or ({batch}, {length}, R): one row for "
            "each position; index the table by position first."
        )
    if cos.shape[2] % 2 or cos.shape[2] > width:
        raise ValueError(
            f"{_OP}: cos has width R={cos.shape[2]}, but R must be even and at most H={width}, the head's; a table "
            "of one half is to be concatenated with itself."
        )
    _checks.check_shape(_OP, "sin", sin, cos.shape, "that of cos")
