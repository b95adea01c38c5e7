"""RMSNorm in Pallas for TPU.

Memory passes: forward one read and one write, as XLA. Backward one read of x and dy and one write of dx; dscale
stays in VMEM over the whole grid, where XLA may read x and dy a second time for it. Rounding: see xla.py, whose
row formulas run here. Not measured on a TPU: no speed is claimed.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels._tiles import cdiv, in_bounds, out_like, tpu_interpreter, tpu_params
from liger_jax.pallas_kernels.rms_norm import config, xla


def unsupported(x: jax.Array, scale: jax.Array | None) -> str | None:
    """Sixteen rows must fit VMEM; Mosaic has no float16 and no float64."""
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        return f"the TPU kernel takes float32 and bfloat16, and x is {x.dtype}; use 'xla'."
    if config.tpu_n_block_size(*x.shape, x.dtype.itemsize) == 0:
        return f"16 rows of {x.shape[-1]} elements exceed VMEM; use 'xla'."
    return None


def _forward_kernel(x_ref, *refs, eps, offset, casting_mode):
    scale_ref, y_ref = refs if len(refs) == 2 else (None, *refs)
    scale = None if scale_ref is None else scale_ref[...]
    _, rounded, _ = xla.normalized_rows(x_ref[...], width=x_ref.shape[1], eps=eps, casting_mode=casting_mode)
    y_ref[...] = xla.scaled_rows(rounded, scale, offset=offset, dtype=y_ref.dtype)


def forward(
    x: jax.Array, scale: jax.Array | None, *, eps: float, offset: float, casting_mode: str, interpret: bool
) -> jax.Array:
    """x (N, D), scale (D,) or None → y (N, D) in x.dtype."""
    n, d = x.shape
    n_block_size = config.tpu_n_block_size(n, d, x.dtype.itemsize)
    rows_spec = pl.BlockSpec((n_block_size, d), lambda row_tile: (row_tile, 0))
    scale_spec = pl.BlockSpec((1, d), lambda _: (0, 0))
    scales = () if scale is None else (scale[None, :],)
    return pl.pallas_call(
        functools.partial(_forward_kernel, eps=eps, offset=offset, casting_mode=casting_mode),
        grid=(cdiv(n, n_block_size),),
        in_specs=[rows_spec, *[scale_spec] * len(scales)],
        out_specs=rows_spec,
        out_shape=out_like(x, x.shape, x.dtype),
        compiler_params=tpu_params(interpret, "parallel"),
        interpret=tpu_interpreter(interpret),
        name="rms_norm_forward",
    )(x, *scales)


def _backward_kernel(dy_ref, x_ref, *refs, n, eps, offset):
    scale_ref, dx_ref, dscale_ref = refs if len(refs) == 3 else (None, *refs)
    n_block_size, d = x_ref.shape

    @pl.when(pl.program_id(0) == 0)
    def _():
        dscale_ref[...] = jnp.zeros_like(dscale_ref)

    dx, dscale_rows = xla.row_gradients(
        dy_ref[...],
        x_ref[...],
        None if scale_ref is None else scale_ref[...],
        width=d,
        eps=eps,
        offset=offset,
    )
    dx_ref[...] = dx.astype(dx_ref.dtype)
    # The last tile reads past the end: those rows are garbage.
    rows = in_bounds(pl.program_id(0) * n_block_size, n_block_size, n, axis=0)
    dscale_ref[...] += jnp.sum(jnp.where(rows, dscale_rows, 0.0), axis=0, keepdims=True)


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
    n_block_size = config.tpu_n_block_size(n, d, x.dtype.itemsize)
    rows_spec = pl.BlockSpec((n_block_size, d), lambda row_tile: (row_tile, 0))
    scale_spec = pl.BlockSpec((1, d), lambda _: (0, 0))
    scales = () if scale is None else (scale[None, :],)
    dx, dscale = pl.pallas_call(
        functools.partial(_backward_kernel, n=n, eps=eps, offset=offset),
        grid=(cdiv(n, n_block_size),),
        in_specs=[rows_spec, rows_spec, *[scale_spec] * len(scales)],
        out_specs=[rows_spec, scale_spec],
        out_shape=[out_like(x, x.shape, x.dtype), out_like(x, (1, d), jnp.float32)],
        compiler_params=tpu_params(interpret, "arbitrary"),
        interpret=tpu_interpreter(interpret),
        name="rms_norm_backward",
    )(dy, x, *scales)
    return dx, None if scale is None else dscale[0].astype(scale.dtype)
