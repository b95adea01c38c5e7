"""A projection and its adapter as one product in Pallas Mosaic GPU (Hopper).

x·W + t·B is one accumulation over D + R: the sum takes no pass over memory, and is rounded once.
"""

import math

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels._hopper_product import Factors, product
from liger_jax.pallas_kernels._hopper_tiles import Epilogue, Tile, staging, store_tile
from liger_jax.pallas_kernels.adapted_linear.config import TILES
from liger_jax.pallas_kernels.tiles import out_like

Typed = jax.Array | jax.ShapeDtypeStruct  # an array, or its shape and dtype


def unsupported(x: Typed, kernel: Typed) -> str | None:
    """Takes 16-bit operands in sizes that the copy engine moves in tiles."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"Hopper's matrix units support bfloat16 and float16, and x is {x.dtype}; use 'xla'."
    if any(size % 64 for size in kernel.shape):
        return f"the copy engine moves rows of 64, and the kernel is {kernel.shape}; use 'xla'."
    num_rows = math.prod(x.shape[:-1])
    if num_rows % 8:
        return f"the copy engine moves 8 rows at a time, and x has {num_rows}; pad it, or use 'xla'."
    return None


def sum_of_products(x: jax.Array, kernel: jax.Array, t: jax.Array, b: jax.Array, *, transposed: bool) -> jax.Array:
    """x (..., D), kernel (D, F), t (..., R), b (R, F) → x·kernel + t·b (..., F), in x.dtype.

    `transposed`: the matrices are (F, D) and (F, R). R is a multiple of 64.
    """
    axis = 1 if transposed else 0
    rows, added = x.reshape(-1, x.shape[-1]), t.reshape(-1, t.shape[-1])
    shape = rows.shape[0], kernel.shape[1 - axis]

    def store(tile: Tile, refs, scratch):
        store_tile(tile, tile.values, scratch[0], refs[0], tile.row, tile.column)

    (y,) = product(
        Factors(rows, kernel, (1, axis), added=(added, b)),
        TILES,
        Epilogue(store, out_types=[out_like(x, shape, x.dtype)], scratch=[staging(x.dtype)]),
        name="adapted_linear",
    )
    return y.reshape(*x.shape[:-1], shape[1])
