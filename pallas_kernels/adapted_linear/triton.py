"""Two gradients of an adapter in one read of the projection's gradient, in Pallas-Triton (NVIDIA, Ampere and newer).

A program reads a block of dy once. It keeps its part of dB in registers, and writes a part of dy·Bᵀ for each tile of
rows. XLA sums both over the blocks.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _triton as pltriton
from liger_jax.pallas_kernels.adapted_linear.config import PAIR_COLUMNS, PAIR_ROWS, PAIR_TILE_ROWS, PAIR_WARPS
from liger_jax.pallas_kernels.tiles import out_like

Typed = jax.Array | jax.ShapeDtypeStruct  # an array, or its shape and dtype


def unsupported(dy: Typed, t: Typed) -> str | None:
    """Takes whole blocks of 16-bit numbers, and ranks that are powers of two from 16 to 32."""
    rank, sizes = t.shape[-1], (math.prod(dy.shape[:-1]), dy.shape[-1])
    if dy.dtype not in (jnp.bfloat16, jnp.float16):
        return f"its blocks are sized for bfloat16 and float16, and dy is {dy.dtype}; use 'xla'."
    if rank not in (16, 32):
        return f"its ranks are 16 and 32, and t has {rank}; use 'xla'."
    if any(size % block for size, block in zip(sizes, (PAIR_ROWS, PAIR_COLUMNS), strict=True)):
        return f"its blocks have {PAIR_ROWS} rows and {PAIR_COLUMNS} columns, and dy is {sizes}; use 'xla'."
    return None


def _kernel(dy_ref, t_ref, b_ref, u_ref, db_ref):
    b = b_ref[...]

    def step(i, db):
        rows = pl.ds(i * PAIR_TILE_ROWS, PAIR_TILE_ROWS)
        dy, t = dy_ref[rows, :], t_ref[rows, :]
        u_ref[0, rows, :] = _dot(dy, b, (1, 1))
        return db + _dot(dy, t, (0, 0))

    steps = dy_ref.shape[0] // PAIR_TILE_ROWS
    db_ref[0] = jax.lax.fori_loop(0, steps, step, jnp.zeros(db_ref.shape[1:], jnp.float32))


def _dot(x, y, axes):
    contract = ((axes[0],), (axes[1],)), ((), ())
    return jax.lax.dot_general(x, y, contract, preferred_element_type=jnp.float32)


def input_and_b_gradients(dy: jax.Array, t: jax.Array, b: jax.Array, *, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """dy (..., F), t (..., R), b (R, F) → dy·bᵀ (..., R), and tᵀ·dy (R, F), float32."""
    rows, ts = dy.reshape(-1, dy.shape[-1]), t.reshape(-1, t.shape[-1])
    (n, f), rank = rows.shape, ts.shape[1]
    grid = n // PAIR_ROWS, f // PAIR_COLUMNS
    us, dbs = pl.pallas_call(
        functools.partial(_kernel),
        grid=grid,
        in_specs=[
            pl.BlockSpec((PAIR_ROWS, PAIR_COLUMNS), lambda i, j: (i, j)),
            pl.BlockSpec((PAIR_ROWS, rank), lambda i, j: (i, 0)),
            pl.BlockSpec((rank, PAIR_COLUMNS), lambda i, j: (0, j)),
        ],
        out_specs=[
            pl.BlockSpec((1, PAIR_ROWS, rank), lambda i, j: (j, i, 0)),
            pl.BlockSpec((1, PAIR_COLUMNS, rank), lambda i, j: (i, j, 0)),
        ],
        out_shape=[
            out_like(rows, (grid[1], n, rank), jnp.float32),
            out_like(rows, (grid[0], f, rank), jnp.float32),
        ],
        compiler_params=pltriton.CompilerParams(num_warps=PAIR_WARPS, num_stages=3),
        interpret=interpret,
        name="adapter_gradients",
    )(rows, ts, b)
    return us.sum(0).astype(dy.dtype).reshape(t.shape), dbs.sum(0).T
