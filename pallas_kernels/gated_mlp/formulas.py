"""The products of the gated feed-forward in XLA, for every backend that has no product kernels."""

from typing import Any

import jax


def up_product(x: jax.Array, up_kernel: jax.Array, precision: Any) -> jax.Array:
    """x (..., D), up_kernel (D, F) → up (..., F)."""
    return jax.lax.dot_general(x, up_kernel, (((x.ndim - 1,), (0,)), ((), ())), precision=precision)


def down_gradient(dy: jax.Array, down_kernel: jax.Array, precision: Any) -> jax.Array:
    """dy (..., D), down_kernel (F, D) → the gated product's gradient dy · down_kernelᵀ (..., F)."""
    return jax.lax.dot_general(dy, down_kernel, (((dy.ndim - 1,), (1,)), ((), ())), precision=precision)


def input_gradient(
    dgate: jax.Array, dup: jax.Array, gate_kernel: jax.Array, up_kernel: jax.Array, *, precision: Any
) -> jax.Array:
    """dgate, dup (..., F), gate_kernel, up_kernel (D, F) → dgate · gate_kernelᵀ + dup · up_kernelᵀ (..., D)."""
    return down_gradient(dgate, gate_kernel, precision) + down_gradient(dup, up_kernel, precision)
