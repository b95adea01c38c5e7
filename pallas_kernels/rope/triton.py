"""Rotary position embedding in Pallas-Triton (NVIDIA, Ampere and newer).

Memory passes, as XLA's: one read and one write of q and k, both in one launch, each row of cos and sin read once for
all heads. The backward is the same pass with the transposed rotation. Rounding: see xla.py, whose formula runs here.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from liger_jax.pallas_kernels._tiles import cdiv, in_bounds, next_power_of_2, out_like
from liger_jax.pallas_kernels.rope import config, xla


def unsupported(q: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array, *, layout: str) -> str | None:
    """Halves, and all heads of one token in the registers of one program."""
    if layout != "half":
        return f"the kernel reads a head by halves, and layout={layout!r} has neighbours for pairs; use 'xla'."
    token_size = next_power_of_2(max(q.shape[2], k.shape[2])) * next_power_of_2(q.shape[3])
    if token_size > config.TRITON_MAX_TOKEN_SIZE:
        return (
            f"the heads of one token, padded to {token_size} elements, exceed {config.TRITON_MAX_TOKEN_SIZE}, what "
            "one program holds; use 'xla'."
        )
    if jnp.float64 in (q.dtype, k.dtype):
        return "the kernel computes in float32; use 'xla' for float64."
    return None


def _kernel(q_ref, k_ref, cos_ref, sin_ref, q_out_ref, k_out_ref, *, t, num_heads, widths, inverse, tiles):
    head_width, rotary_width = widths
    half = rotary_width // 2
    tokens = in_bounds(pl.program_id(0) * tiles.t_block_size, tiles.t_block_size, t, axis=0, rank=3)
    columns = in_bounds(0, tiles.half_block_size, half, axis=2, rank=3)
    halves = pl.ds(0, tiles.half_block_size), pl.ds(half, tiles.half_block_size)

    def load(ref, mask):
        return tuple(pltriton.load(ref.at[:, :, part], mask=mask & columns, other=0.0) for part in halves)

    cos, sin = (tuple(x.astype(jnp.float32) for x in load(ref, tokens)) for ref in (cos_ref, sin_ref))
    for x_ref, y_ref, heads in zip((q_ref, k_ref), (q_out_ref, k_out_ref), num_heads, strict=True):
        mask = tokens & in_bounds(0, x_ref.shape[1], heads, axis=1, rank=3)
        rotated = xla.rotated_halves(load(x_ref, mask), cos, sin, inverse=inverse)
        for part, y in zip(halves, rotated, strict=True):
            pltriton.store(y_ref.at[:, :, part], y, mask=mask & columns)
        if tiles.rest_block_size:
            rest = (slice(None), slice(None), pl.ds(rotary_width, tiles.rest_block_size))
            mask &= in_bounds(rotary_width, tiles.rest_block_size, head_width, axis=2, rank=3)
            pltriton.store(y_ref.at[rest], pltriton.load(x_ref.at[rest], mask=mask, other=0.0), mask=mask)


def rotate(
    q: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array, *, inverse: bool, layout: str, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """q (B, T, Q, H), k (B, T, K, H), cos and sin (1|B, T, R) → q and k, rotated; inverse for the gradient."""
    del layout  # "half", as `unsupported` says
    batch, t, _, head_width = q.shape
    num_heads, rotary_width, table_batch = (q.shape[2], k.shape[2]), cos.shape[2], cos.shape[0]
    tiles = config.triton_config(t, max(num_heads), head_width, rotary_width)
    # Wide enough for the padded loads, which start at half of the rotary columns and behind them.
    padded_width = max(rotary_width // 2 + tiles.half_block_size, rotary_width + tiles.rest_block_size)

    def index_map(token_tile, b):
        return b, token_tile, 0, 0

    def table_index_map(token_tile, b):
        return b if table_batch > 1 else 0, token_tile, 0, 0

    q_spec, k_spec = (
        pl.BlockSpec((None, tiles.t_block_size, next_power_of_2(heads), padded_width), index_map) for heads in num_heads
    )
    table_spec = pl.BlockSpec((None, tiles.t_block_size, 1, padded_width), table_index_map)
    kernel = functools.partial(
        _kernel, t=t, num_heads=num_heads, widths=(head_width, rotary_width), inverse=inverse, tiles=tiles
    )
    q_out, k_out = pl.pallas_call(
        kernel,
        grid=(cdiv(t, tiles.t_block_size), batch),
        in_specs=[q_spec, k_spec, table_spec, table_spec],
        out_specs=[q_spec, k_spec],
        out_shape=[out_like(q, q.shape, q.dtype), out_like(k, k.shape, k.dtype)],
        compiler_params=pltriton.CompilerParams(num_warps=tiles.num_warps, num_stages=1),
        interpret=interpret,
        name="rope_backward" if inverse else "rope_forward",
    )(q, k, cos[:, :, None, :], sin[:, :, None, :])
    return q_out, k_out
