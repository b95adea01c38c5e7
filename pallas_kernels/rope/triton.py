"""Rotary position embedding in Pallas-Triton (NVIDIA, Ampere and newer).

Memory passes: one read and one write of q and k, both in one launch. A tile is one half of one head at several
tokens, and a tile of a table has the same shape. So a thread holds the same columns of all of them, threads exchange
no values, and a table's row is read once for several heads. If there are three tables (`sections`), each column is
read from its own table; XLA merges the tables in an earlier pass. The backward is the same pass with the transposed
rotation.
formulas.py says what is rounded. On an H200 it runs at 90 to 93 % of the speed of a copy (benchmarks/results/rope.md).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _triton as pltriton
from liger_jax.pallas_kernels._tiles import cdiv, mask_of_tile, out_like
from liger_jax.pallas_kernels.rope import config, formulas

_MOST_ROWS = 65535  # along the second axis of CUDA's grids


def unsupported(q: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array, *, layout: str) -> str | None:
    """Takes layout "half" only, and computes in float32."""
    if layout != "half":
        return f"the kernel reads a head by halves, and layout={layout!r} has neighbours for pairs; use 'xla'."
    if jnp.float64 in (q.dtype, k.dtype):
        return "the kernel computes in float32; use 'xla' for float64."
    if q.shape[0] > _MOST_ROWS:
        return f"a launch has at most {_MOST_ROWS} rows of a batch, and q has {q.shape[0]}; use 'xla'."
    return None


def _load_table(ref, part, mask, sections):
    """Columns `part` of the table, in float32. If there are three tables, each section's columns come from its own."""
    load = functools.partial(pltriton.load, mask=mask)
    if sections is None:
        return load(ref.at[:, part]).astype(jnp.float32)
    column = jax.lax.broadcasted_iota(jnp.int32, (1, part.size), 1)
    total, end = 0.0, 0
    for i, size in zip(map(np.int32, range(3)), sections, strict=True):
        start, end = end, end + size
        of_section = (start <= column) & (column < end)
        mask_i = of_section if mask is None else of_section & mask
        total += pltriton.load(ref.at[i, :, part], mask=mask_i, other=0.0).astype(jnp.float32)
    return total


def _kernel(q_ref, k_ref, cos_ref, sin_ref, q_out_ref, k_out_ref, *, shape, rotary_width, sections, inverse, tiles):
    t, head_width = shape
    half, rest_width = rotary_width // 2, head_width - rotary_width
    first_token = jax.lax.div(pl.program_id(0), tiles.head_chunks) * tiles.t_block_size
    mask = mask_of_tile((first_token, 0), (tiles.t_block_size, tiles.half_block_size), (t, half))
    halves = pl.ds(0, tiles.half_block_size), pl.ds(half, tiles.half_block_size)
    cos, sin = (tuple(_load_table(ref, part, mask, sections) for part in halves) for ref in (cos_ref, sin_ref))

    # The interpreter takes NumPy's integers for an index, and not Python's.
    heads = [(x, y, i) for x, y in ((q_ref, q_out_ref), (k_ref, k_out_ref)) for i in map(np.int32, range(x.shape[1]))]
    for start in range(0, len(heads), tiles.heads_at_once):
        chunk = heads[start : start + tiles.heads_at_once]
        loaded = [tuple(pltriton.load(x.at[:, i, part], mask=mask) for part in halves) for x, _, i in chunk]
        for (_, y, i), pair in zip(chunk, loaded, strict=True):
            for part, rotated in zip(halves, formulas.rotated_halves(pair, cos, sin, inverse=inverse), strict=True):
                pltriton.store(y.at[:, i, part], rotated, mask=mask)
    if rest_width:
        rest = pl.ds(rotary_width, tiles.rest_block_size)
        mask = mask_of_tile((first_token, 0), (tiles.t_block_size, tiles.rest_block_size), (t, rest_width))
        for x, y, i in heads:
            pltriton.store(y.at[:, i, rest], pltriton.load(x.at[:, i, rest], mask=mask), mask=mask)


def rotate(
    q: jax.Array,
    k: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    sections: tuple[int, ...] | None,
    inverse: bool,
    layout: str,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """q (B, T, Q, H), k (B, T, K, H), cos and sin ([3,] 1|B, T, R) → q and k, rotated; inverse for the gradient."""
    del layout  # "half", as `unsupported` says
    batch, t, _, head_width = q.shape
    num_heads, rotary_width, table_batch = (q.shape[2], k.shape[2]), cos.shape[-1], cos.shape[-3]
    tiles = config.triton_config(t, *num_heads, head_width, rotary_width)
    # Wide enough for the padded loads, which start at half of the rotary columns and behind them.
    padded_width = max(rotary_width // 2 + tiles.half_block_size, rotary_width + tiles.rest_block_size)

    def index_map(program, b):  # along a token's heads: neighbouring programs touch neighbouring memory
        return b, jax.lax.div(program, tiles.head_chunks), jax.lax.rem(program, tiles.head_chunks), 0

    def table_index_map(program, b):
        of_three = () if sections is None else (0,)
        return *of_three, b if table_batch > 1 else 0, jax.lax.div(program, tiles.head_chunks), 0

    q_spec, k_spec = (
        pl.BlockSpec((None, tiles.t_block_size, heads // tiles.head_chunks, padded_width), index_map)
        for heads in num_heads
    )
    table_spec = pl.BlockSpec((*cos.shape[:-3], None, tiles.t_block_size, padded_width), table_index_map)
    kernel = functools.partial(
        _kernel,
        shape=(t, head_width),
        rotary_width=rotary_width,
        sections=sections,
        inverse=inverse,
        tiles=tiles,
    )
    q_out, k_out = pl.pallas_call(
        kernel,
        grid=(cdiv(t, tiles.t_block_size) * tiles.head_chunks, batch),
        in_specs=[q_spec, k_spec, table_spec, table_spec],
        out_specs=[q_spec, k_spec],
        out_shape=[out_like(q, q.shape, q.dtype), out_like(k, k.shape, k.dtype)],
        compiler_params=pltriton.CompilerParams(num_warps=tiles.num_warps, num_stages=1),
        interpret=interpret,
        name="rope_backward" if inverse else "rope_forward",
    )(q, k, cos, sin)
    return q_out, k_out
