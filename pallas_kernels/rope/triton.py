"""Rotary embedding in Pallas-Triton (NVIDIA, Ampere and newer).

Memory passes: one launch reads and writes q and k once, in each direction; a position's cos and sin are read once
for all heads. Where only part of the width is rotated, the rest is XLA's copy. Rounding: float32, rounded once.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from liger_jax.pallas_kernels._tiles import in_bounds, next_power_of_2, out_like
from liger_jax.pallas_kernels.rope import config
from liger_jax.pallas_kernels.rope.config import TritonConfig


def unsupported(q: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array) -> str | None:
    """The whole width rotated, float32 and narrower."""
    if cos.shape[-1] != q.shape[-1]:
        return f"it rotates the whole width {q.shape[-1]}, and cos has {cos.shape[-1]}; use 'xla' for a partial rotation."
    if jnp.float64 in (q.dtype, k.dtype):
        return "the kernel computes in float32; use 'xla' for float64."
    return None


def _kernel(q_ref, k_ref, cos_ref, sin_ref, q_out_ref, k_out_ref, *, q_heads, k_heads, half, inverse, tiles):
    columns = in_bounds(0, tiles.half_block_size, half, axis=1)
    halves = (pl.ds(0, tiles.half_block_size), pl.ds(half, tiles.half_block_size))
    load_row = lambda ref, part: pltriton.load(ref.at[0, :, part], mask=columns, other=0.0).astype(jnp.float32)
    (c1, c2), (s1, s2) = ([load_row(ref, part) for part in halves] for ref in (cos_ref, sin_ref))
    if inverse:  # the transpose: a' = c1·a + s2·b, b' = c2·b − s1·a
        s1, s2 = -s2, -s1
    for ref, out_ref, heads, block in (
        (q_ref, q_out_ref, q_heads, tiles.q_block_size),
        (k_ref, k_out_ref, k_heads, tiles.k_block_size),
    ):
        mask = in_bounds(0, block, heads, axis=0) & columns
        a, b = (pltriton.load(ref.at[0, :, part], mask=mask, other=0.0).astype(jnp.float32) for part in halves)
        for part, rotated in zip(halves, (a * c1 - b * s1, b * c2 + a * s2), strict=True):
            pltriton.store(out_ref.at[0, :, part], rotated.astype(out_ref.dtype), mask=mask)


def rotate(
    q: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array, *, inverse: bool, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """q (B, T, Q, H), k (B, T, K, H), cos and sin (B or 1, T, H) → rotated q and k; inverse for the gradient."""
    batch, length, q_heads, width = q.shape
    k_heads, half = k.shape[2], width // 2
    tiles: TritonConfig = config.triton_config(q_heads, k_heads, half)
    # Wide enough for a padded second half; what lies beyond the width is masked.
    padded = next_power_of_2(half + tiles.half_block_size)
    table_batch = cos.shape[0]

    def table_index_map(position):
        return (position if table_batch > 1 else position % length, 0, 0)

    q_spec = pl.BlockSpec((1, tiles.q_block_size, padded), lambda position: (position, 0, 0))
    k_spec = pl.BlockSpec((1, tiles.k_block_size, padded), lambda position: (position, 0, 0))
    table_spec = pl.BlockSpec((1, 1, padded), table_index_map)
    q_rows, k_rows = q.reshape(-1, q_heads, width), k.reshape(-1, k_heads, width)
    tables = (table.reshape(-1, 1, width) for table in (cos, sin))
    q_out, k_out = pl.pallas_call(
        functools.partial(_kernel, q_heads=q_heads, k_heads=k_heads, half=half, inverse=inverse, tiles=tiles),
        grid=(batch * length,),
        in_specs=[q_spec, k_spec, table_spec, table_spec],
        out_specs=[q_spec, k_spec],
        out_shape=[out_like(q, q_rows.shape, q.dtype), out_like(k, k_rows.shape, k.dtype)],
        compiler_params=pltriton.CompilerParams(num_warps=tiles.num_warps, num_stages=1),
        interpret=interpret,
        name="rope_rotate",
    )(q_rows, k_rows, *tables)
    return q_out.reshape(q.shape), k_out.reshape(k.shape)
