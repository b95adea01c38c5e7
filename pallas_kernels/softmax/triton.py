"""Softmax and sparsemax of the last axis in Pallas-Triton (NVIDIA, Ampere and newer).

Memory passes: forward one read and one write, backward one read of y and dy and one write; a row stays in registers.
XLA, compiled for an H200, reads y and dy twice, and x three times from some ten thousand columns on. For sparsemax the
kernel saves XLA's sort: Newton's steps, each a sum over the row, end at the exact threshold.
formulas.py says what is rounded.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _triton as pltriton
from liger_jax.pallas_kernels._tiles import cdiv, in_bounds, out_like
from liger_jax.pallas_kernels.softmax import config, formulas


def unsupported(x: jax.Array, *, kind: str) -> str | None:
    """A row must fit the registers of one program."""
    if x.shape[-1] > config.TRITON_MAX_WIDTH:
        return f"a row of {x.shape[-1]} elements exceeds {config.TRITON_MAX_WIDTH}, what one program holds; use 'xla'."
    if x.dtype == jnp.float64:
        return "the kernel computes in float32; use 'xla' for float64."
    return None


def _sparsemax_rows(x):
    """max(x − τ, 0), where τ solves Σ max(x_j − τ, 0) = 1. Newton's steps find it from below.

    The sum is convex and piecewise linear in τ, so a step never passes the root. When no x lies between τ and the next
    τ, the step was the last. The padding of a row is −∞ and becomes −1, which is where τ begins.
    """
    x = formulas.shifted_rows(x)

    def step(state):
        threshold, _ = state
        inside = x > threshold[:, None]
        total = jnp.sum(jnp.where(inside, x, 0.0), axis=1)
        following = jnp.maximum(threshold, (total - 1.0) / jnp.sum(inside.astype(jnp.float32), axis=1))
        return following, jnp.max((following > threshold).astype(jnp.int32), axis=0)

    start = jnp.full((x.shape[0],), -1.0, jnp.float32), jnp.int32(1)
    threshold, _ = jax.lax.while_loop(lambda state: state[1] > 0, step, start)
    return jnp.maximum(x - threshold[:, None], 0.0)


def _forward_kernel(x_ref, y_ref, *, mask_of, kind):
    mask = mask_of(x_ref)
    x = pltriton.load(x_ref, mask=mask, other=-jnp.inf).astype(jnp.float32)
    y = formulas.softmax_rows(x) if kind == "softmax" else _sparsemax_rows(x)
    pltriton.store(y_ref, y.astype(y_ref.dtype), mask=mask)


def _backward_kernel(dy_ref, y_ref, dx_ref, *, mask_of, kind):
    mask = mask_of(y_ref)
    dy, y = (pltriton.load(ref, mask=mask, other=0.0).astype(jnp.float32) for ref in (dy_ref, y_ref))
    pltriton.store(dx_ref, formulas.row_gradients(dy, y, kind=kind).astype(dx_ref.dtype), mask=mask)


def _mask(ref, *, n, f):
    n_block_size, f_block_size = ref.shape
    rows = in_bounds(pl.program_id(0) * n_block_size, n_block_size, n, axis=0)
    return rows & in_bounds(0, f_block_size, f, axis=1)


def _by_rows(name, kernel, arrays, kind, interpret):
    """Runs a kernel over tiles of whole rows of equal arrays (..., F)."""
    shape = arrays[0].shape
    rows = [x.reshape(-1, shape[-1]) for x in arrays]
    n, f = rows[0].shape
    tiles = config.triton_config(n, f)
    spec = pl.BlockSpec((tiles.n_block_size, tiles.f_block_size), lambda row_tile: (row_tile, 0))
    return pl.pallas_call(
        functools.partial(kernel, mask_of=functools.partial(_mask, n=n, f=f), kind=kind),
        grid=(cdiv(n, tiles.n_block_size),),
        in_specs=[spec] * len(rows),
        out_specs=spec,
        out_shape=out_like(rows[0], (n, f), rows[0].dtype),
        compiler_params=pltriton.CompilerParams(num_warps=tiles.num_warps, num_stages=1),
        interpret=interpret,
        name=f"{kind}_{name}",
    )(*rows).reshape(shape)


def forward(x: jax.Array, *, kind: str, interpret: bool) -> jax.Array:
    """x (..., F) → y (..., F) in x's dtype; kind is "softmax" or "sparsemax"."""
    return _by_rows("forward", _forward_kernel, [x], kind, interpret)


def backward(dy: jax.Array, y: jax.Array, *, kind: str, interpret: bool) -> jax.Array:
    """dy, y (..., F) → dx (..., F) in y's dtype."""
    return _by_rows("backward", _backward_kernel, [dy, y], kind, interpret)
