"""RMSNorm in Pallas-Triton (NVIDIA, Ampere and newer).

Memory passes: forward one read and one write, as XLA. Backward one read of x and dy and one write of dx, where
XLA reads x and dy again for dscale: each program walks over its rows with a float32 partial of dscale in
registers, and the (programs, D) partials are summed outside. Rounding: see xla.py, whose row formulas run here.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from liger_jax.pallas_kernels._tiles import cdiv, in_bounds, out_like, round_up
from liger_jax.pallas_kernels.rms_norm import config, xla


def unsupported(x: jax.Array, scale: jax.Array | None) -> str | None:
    """A row must fit the registers of one program."""
    if x.shape[-1] > config.TRITON_MAX_WIDTH:
        return f"a row of {x.shape[-1]} elements exceeds {config.TRITON_MAX_WIDTH}, what one program holds; use 'xla'."
    if x.dtype == jnp.float64:
        return "the kernel computes in float32; use 'xla' for float64."
    return None


def _forward_kernel(x_ref, *refs, n, d, eps, offset, casting_mode):
    scale_ref, y_ref = refs if len(refs) == 2 else (None, *refs)
    n_block_size, d_block_size = x_ref.shape
    columns = in_bounds(0, d_block_size, d, axis=1)
    mask = in_bounds(pl.program_id(0) * n_block_size, n_block_size, n, axis=0) & columns
    x = pltriton.load(x_ref, mask=mask, other=0.0)
    scale = None if scale_ref is None else pltriton.load(scale_ref, mask=columns, other=0.0)
    _, rounded, _ = xla.normalized_rows(x, width=d, eps=eps, casting_mode=casting_mode)
    pltriton.store(y_ref, xla.scaled_rows(rounded, scale, offset=offset, dtype=y_ref.dtype), mask=mask)


def forward(
    x: jax.Array, scale: jax.Array | None, *, eps: float, offset: float, casting_mode: str, interpret: bool
) -> jax.Array:
    """x (N, D), scale (D,) or None → y (N, D) in x.dtype."""
    n, d = x.shape
    tiles = config.triton_config(n, d)
    rows_spec = pl.BlockSpec((tiles.n_block_size, tiles.d_block_size), lambda row_tile: (row_tile, 0))
    scale_spec = pl.BlockSpec((1, tiles.d_block_size), lambda _: (0, 0))
    kernel = functools.partial(_forward_kernel, n=n, d=d, eps=eps, offset=offset, casting_mode=casting_mode)
    scales = () if scale is None else (scale[None, :],)
    return pl.pallas_call(
        kernel,
        grid=(cdiv(n, tiles.n_block_size),),
        in_specs=[rows_spec, *[scale_spec] * len(scales)],
        out_specs=rows_spec,
        out_shape=out_like(x, x.shape, x.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=tiles.num_warps, num_stages=1),
        interpret=interpret,
        name="rms_norm_forward",
    )(x, *scales)


def _backward_kernel(dy_ref, x_ref, *refs, n, d, eps, offset, tiles):
    scale_ref, dx_ref, dscale_ref = refs if len(refs) == 3 else (None, *refs)
    program = pl.program_id(0)
    columns = in_bounds(0, tiles.d_block_size, d, axis=1)
    scale = None if scale_ref is None else pltriton.load(scale_ref, mask=columns, other=0.0)

    def step(i, dscale):
        start = (program + i * tiles.num_programs) * tiles.n_block_size
        rows = in_bounds(start, tiles.n_block_size, n, axis=0)
        tile = (pl.ds(start, tiles.n_block_size), slice(None))
        dy = pltriton.load(dy_ref.at[tile], mask=rows & columns, other=0.0)
        x = pltriton.load(x_ref.at[tile], mask=rows & columns, other=0.0)
        dx, dscale_rows = xla.row_gradients(dy, x, scale, width=d, eps=eps, offset=offset)
        pltriton.store(dx_ref.at[tile], dx.astype(dx_ref.dtype), mask=rows & columns)
        # A row past the end has x = 0, and with eps = 0 its x̂ is NaN.
        return dscale + jnp.sum(jnp.where(rows, dscale_rows, 0.0), axis=0, keepdims=True)

    steps = cdiv(cdiv(n, tiles.n_block_size), tiles.num_programs)
    dscale = jax.lax.fori_loop(0, steps, step, jnp.zeros((1, tiles.d_block_size), jnp.float32))
    pltriton.store(dscale_ref, dscale, mask=columns)


def backward(
    dy: jax.Array,
    x: jax.Array,
    scale: jax.Array | None,
    *,
    eps: float,
    offset: float,
    interpret: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """dy, x (N, D), scale (D,) or None → dx (N, D), dscale (D,) or None, in their primals' dtypes."""
    n, d = x.shape
    tiles = config.triton_config(n, d)
    steps = cdiv(cdiv(n, tiles.n_block_size), tiles.num_programs)
    rows_spec = pl.BlockSpec(
        (round_up(n, steps * tiles.num_programs * tiles.n_block_size), tiles.d_block_size), lambda _: (0, 0)
    )
    scale_spec = pl.BlockSpec((1, tiles.d_block_size), lambda _: (0, 0))
    partial_spec = pl.BlockSpec((1, tiles.d_block_size), lambda program: (program, 0))
    kernel = functools.partial(_backward_kernel, n=n, d=d, eps=eps, offset=offset, tiles=tiles)
    scales = () if scale is None else (scale[None, :],)
    dx, dscale = pl.pallas_call(
        kernel,
        grid=(tiles.num_programs,),
        in_specs=[rows_spec, rows_spec, *[scale_spec] * len(scales)],
        out_specs=[rows_spec, partial_spec],
        out_shape=[out_like(x, x.shape, x.dtype), out_like(x, (tiles.num_programs, d), jnp.float32)],
        compiler_params=pltriton.CompilerParams(num_warps=tiles.num_warps, num_stages=1),
        interpret=interpret,
        name="rms_norm_backward",
    )(dy, x, *scales)
    return dx, None if scale is None else jnp.sum(dscale, axis=0).astype(scale.dtype)
