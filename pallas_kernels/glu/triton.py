"""Gated units in Pallas-Triton (NVIDIA, Ampere and newer).

Memory passes: as many as XLA's fusions make, two reads and one write forward, three reads and two writes backward.
The rows do not matter here, so the arrays are walked as flat ones. Rounding: see xla.py, whose formulas run here.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from liger_jax.pallas_kernels._tiles import cdiv, in_bounds, out_like
from liger_jax.pallas_kernels.glu import config, xla


def unsupported(gate: jax.Array, up: jax.Array) -> str | None:
    """Every shape and float dtype but float64."""
    if jnp.float64 in (gate.dtype, up.dtype):
        return "the kernel computes in float32; use 'xla' for float64."
    return None


def _kernel(*refs, size, body):
    outs = len(refs) // 2  # one of three refs forward, two of five backward
    mask = in_bounds(pl.program_id(0) * config.BLOCK_SIZE, config.BLOCK_SIZE, size, axis=0, rank=1)
    values = body(*(pltriton.load(ref, mask=mask, other=0.0) for ref in refs[:-outs]))
    for ref, value in zip(refs[-outs:], jax.tree.leaves(values), strict=True):
        pltriton.store(ref, value, mask=mask)


def _call(body, arrays, out_dtypes, name, interpret):
    size, shape = arrays[0].size, arrays[0].shape
    spec = pl.BlockSpec((config.BLOCK_SIZE,), lambda tile: (tile,))
    outs = pl.pallas_call(
        functools.partial(_kernel, size=size, body=body),
        grid=(cdiv(size, config.BLOCK_SIZE),),
        in_specs=[spec] * len(arrays),
        out_specs=[spec] * len(out_dtypes),
        out_shape=[out_like(arrays[0], (size,), dtype) for dtype in out_dtypes],
        compiler_params=pltriton.CompilerParams(num_warps=config.NUM_WARPS, num_stages=1),
        interpret=interpret,
        name=name,
    )(*(x.reshape(-1) for x in arrays))
    return [out.reshape(shape) for out in outs]


def forward(gate: jax.Array, up: jax.Array, *, activation: str, interpret: bool) -> jax.Array:
    """gate, up (N, F) → act(gate) · up in up's dtype."""
    body = functools.partial(xla.forward, activation=activation)
    (y,) = _call(body, (gate, up), (up.dtype,), "glu_forward", interpret)
    return y


def backward(
    dy: jax.Array, gate: jax.Array, up: jax.Array, *, activation: str, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """dy, gate, up (N, F) → dgate, dup in their dtypes."""
    body = functools.partial(xla.backward, activation=activation)
    dgate, dup = _call(body, (dy, gate, up), (gate.dtype, up.dtype), "glu_backward", interpret)
    return dgate, dup
