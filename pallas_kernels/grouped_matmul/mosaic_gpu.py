"""The grouped product in Pallas Mosaic GPU (Hopper): persistent kernels whose tiles are assigned from the sizes.

XLA lists the tiles from the sizes, a few hundred numbers, and each block reads its own.
Memory passes: each operand's tiles are read once for each tile of the other, from L2 but for the first.
Rounding: sums are float32, and rounded once.
"""

from typing import Any

import jax.numpy as jnp

from liger_jax.pallas_kernels.grouped_matmul.mosaic_gpu_gradient import weight_gradient as weight_gradient
from liger_jax.pallas_kernels.grouped_matmul.mosaic_gpu_product import product as product
from liger_jax.pallas_kernels.grouped_matmul.mosaic_gpu_spread import spread as spread


def unsupported(x: Any, w: Any) -> str | None:
    """Takes 16-bit operands in sizes that the copy engine moves in tiles."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"Hopper's matrix units support bfloat16 and float16, and x is {x.dtype}; use 'xla'."
    if any(size % 64 for size in w.shape[1:]):
        return f"the copy engine moves rows of 64, and w is {w.shape}; use 'xla'."
    return None
