"""The gated feed-forward in plain XLA: products, and one pass over memory around each as XLA fuses it.

Between the products stand the formulas of glu/formulas.py, with their rounding. XLA does not merge the users of a
product that is a Triton fusion: dgate, dup and the gated product may take three passes, of 7 reads and 3 writes.
"""

from typing import Any

import jax

from liger_jax.pallas_kernels.gated_mlp.formulas import down_gradient, input_gradient, up_product
from liger_jax.pallas_kernels.glu import formulas as glu

__all__ = ["gradients_and_product", "input_gradient", "up_and_product"]


def up_and_product(
    x: jax.Array, up_kernel: jax.Array, gate: jax.Array, *, activation: str, precision: Any
) -> tuple[jax.Array, jax.Array]:
    """x (..., D), up_kernel (D, F), gate (..., F) → up and act(gate) · up (..., F)."""
    up = up_product(x, up_kernel, precision)
    return up, glu.product(gate, up, activation=activation)


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
    del in_place  # the compiler decides this
    return glu.gradients_and_product(down_gradient(dy, down_kernel, precision), gate, up, activation=activation)
