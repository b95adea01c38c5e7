"""The products of the gated feed-forward in XLA, for every backend that has no product kernels."""

from typing import Any

import jax


def up_product(x: jax.Array, up_kernel: jax.Array, precision: Any) -> jax.Array:
    """x (..., D), up_kernel (D, F) → up (..., F)."""
    return jax.lax.dot_general(x, up_kernel, (((x.ndim - 1,), (0,)), ((), ())), precision=precision)


def down_gradient(dy: jax.Array, down_kernel: jax.Array, precision: Any) -> jax.Array:
    """dy (..., D), down_kernel (F, D) → the gated product's gradient (..., F)."""
    return jax.lax.dot_general(dy, down_kernel, (((dy.ndim - 1,), (1,)), ((), ())), precision=precision)
