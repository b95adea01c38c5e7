"""Gated linear units in Pallas-Triton (NVIDIA, Ampere and newer).

Memory passes, as XLA's: forward one read of gate and up and one write; backward one read of both and of dy and one
write of both gradients. What the backward saves over XLA is that one launch writes both gradients wherever it
stands. Rounding: see xla.py, whose formulas run here.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from liger_jax.pallas_kernels._tiles import cdiv, in_bounds, out_like
from liger_jax.pallas_kernels.glu import config, xla


def unsupported(gate: jax.Array, up: jax.Array, *, activation: str) -> str | None:
    """Float32 arithmetic, and no error function."""
    if jnp.float64 in (gate.dtype, up.dtype):
        return "the kernel computes in float32; use 'xla' for float64."
    if activation == "gelu":
        return "Pallas-Triton has no error function, which the exact GELU needs; use 'xla', or approximate=True."
    return None


def _kernel(*refs, n, f, formula, num_inputs):
    n_block_size, f_block_size = refs[0].shape
    rows = in_bounds(pl.program_id(0) * n_block_size, n_block_size, n, axis=0)
    mask = rows & in_bounds(pl.program_id(1) * f_block_size, f_block_size, f, axis=1)
    outputs = formula(*(pltriton.load(ref, mask=mask, other=0.0) for ref in refs[:num_inputs]))
    for ref, value in zip(refs[num_inputs:], jax.tree.leaves(outputs), strict=True):
        pltriton.store(ref, value, mask=mask)


def _elementwise(name, formula, inputs, out_dtypes, interpret):
    """Runs an elementwise formula over arrays of one shape in tiles of (N, F)."""
    shape = inputs[0].shape
    f = shape[-1] if shape else 1
    rows = [x.reshape(-1, f) for x in inputs]  # not flat: offsets within an axis are 32-bit
    n = rows[0].shape[0]
    tiles = config.triton_config(n, f)
    spec = pl.BlockSpec((tiles.n_block_size, tiles.f_block_size), lambda row_tile, f_tile: (row_tile, f_tile))
    outputs = pl.pallas_call(
        functools.partial(_kernel, n=n, f=f, formula=formula, num_inputs=len(inputs)),
        grid=(cdiv(n, tiles.n_block_size), cdiv(f, tiles.f_block_size)),
        in_specs=[spec] * len(inputs),
        out_specs=[spec] * len(out_dtypes),
        out_shape=[out_like(rows[0], (n, f), dtype) for dtype in out_dtypes],
        compiler_params=pltriton.CompilerParams(num_warps=tiles.num_warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(*rows)
    return [y.reshape(shape) for y in outputs]


def forward(gate: jax.Array, up: jax.Array, *, activation: str, interpret: bool) -> jax.Array:
    """gate, up (..., F) → act(gate) · up in up's dtype."""
    formula = functools.partial(xla.forward, activation=activation)
    (y,) = _elementwise("glu_forward", formula, (gate, up), (up.dtype,), interpret)
    return y


def backward(
    dy: jax.Array, gate: jax.Array, up: jax.Array, *, activation: str, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """dy, gate, up (..., F) → dgate, dup in their primals' dtypes."""
    formula = functools.partial(xla.backward, activation=activation)
    dgate, dup = _elementwise("glu_backward", formula, (dy, gate, up), (gate.dtype, up.dtype), interpret)
    return dgate, dup
