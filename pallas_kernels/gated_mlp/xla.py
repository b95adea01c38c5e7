"""The gated feed-forward in plain XLA: products, and one pass over memory around each as XLA fuses it.

What lies between the products is glu/xla.py's, rounding included. XLA merges no two users of a product that is a Triton
fusion: dgate, dup and the gated product may take three passes, of 7 reads and 3 writes.
"""

from typing import Any

import jax

from liger_jax.pallas_kernels.glu import formulas as glu

unsupported = glu.unsupported


def up_product(x: jax.Array, up_kernel: jax.Array, precision: Any) -> jax.Array:
    """x (..., D), up_kernel (D, F) → up (..., F)."""
    return jax.lax.dot_general(x, up_kernel, (((x.ndim - 1,), (0,)), ((), ())), precision=precision)


def up_and_product(
    x: jax.Array, up_kernel: jax.Array, gate: jax.Array, *, activation: str, precision: Any
) -> tuple[jax.Array, jax.Array]:
    """x (..., D), up_kernel (D, F), gate (..., F) → up and act(gate) · up (..., F)."""
    up = up_product(x, up_kernel, precision)
    return up, glu.product(gate, up, activation=activation)


def down_gradient(dy: jax.Array, down_kernel: jax.Array, precision: Any) -> jax.Array:
    """dy (..., D), down_kernel (F, D) → the gated product's gradient (..., F)."""
    return jax.lax.dot_general(dy, down_kernel, (((dy.ndim - 1,), (1,)), ((), ())), precision=precision)


def gradients_and_product(
    dy: jax.Array,
    down_kernel: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    *,
    activation: str,
    precision: Any,
    in_place: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dy (..., D), down_kernel (F, D), gate, up (..., F) → dgate, dup, act(gate) · up (..., F)."""
    del in_place  # the compiler's choice
    return glu.gradients_and_product(down_gradient(dy, down_kernel, precision), gate, up, activation=activation)
