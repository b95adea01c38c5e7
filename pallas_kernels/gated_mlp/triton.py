"""The gated feed-forward with XLA's products, and one pass in Pallas-Triton around each (NVIDIA, Ampere and newer).

Memory passes: the forward's are XLA's. The backward reads dh, gate and up once, and writes the gated product, dgate
and dup over them.
"""

from typing import Any

import jax

from liger_jax.pallas_kernels.gated_mlp import formulas
from liger_jax.pallas_kernels.gated_mlp.formulas import down_gradient, up_product
from liger_jax.pallas_kernels.glu import triton as glu

unsupported = glu.unsupported


def up_and_product(
    x: jax.Array, up_kernel: jax.Array, gate: jax.Array, *, activation: str, precision: Any, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """x (..., D), up_kernel (D, F), gate (..., F) → up and act(gate) · up (..., F)."""
    up = up_product(x, up_kernel, precision)
    return up, glu.forward(gate, up, activation=activation, interpret=interpret)


def gradients_and_product(
    dy: jax.Array,
    down_kernel: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    *,
    activation: str,
    precision: Any,
    in_place: bool,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """dy (..., D), down_kernel (F, D), gate, up (..., F) → dgate, dup, act(gate) · up (..., F)."""
    del in_place  # this kernel always writes in place
    dh = down_gradient(dy, down_kernel, precision)
    return glu.gradients_and_product(dh, gate, up, activation=activation, interpret=interpret)


def input_gradient(
    dgate: jax.Array, dup: jax.Array, gate_kernel: jax.Array, up_kernel: jax.Array, *, precision: Any, interpret: bool
) -> jax.Array:
    """dgate, dup (..., F), gate_kernel, up_kernel (D, F) → x's gradient (..., D)."""
    del interpret  # XLA's products
    return formulas.input_gradient(dgate, dup, gate_kernel, up_kernel, precision=precision)
