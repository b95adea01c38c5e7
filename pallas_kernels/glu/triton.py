"""Gated linear units in Pallas-Triton (NVIDIA, Ampere and newer).

Memory passes, as XLA's: forward one read of gate and up and one write; backward one read of both and of dy and one
write of both gradients. The kernel writes both gradients in one launch; XLA needs one or two launches.
Gate and up side by side in one array (N, 2F) are read and written where they are, as (N, 2, F). Rounding is that of
formulas.py. On an H200 the kernels are faster than a copy of as many bytes, because half of a copy's bytes are written
(benchmarks/results/glu.md).
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _triton as pltriton
from liger_jax.pallas_kernels.glu import config, formulas
from liger_jax.pallas_kernels.tiles import cdiv, mask_of_tile, out_like

_WIDTH = 1024  # columns of the rows that gate and up are cut into


def unsupported(gate: jax.Array, up: jax.Array | None, *, activation: str) -> str | None:
    """The kernel computes in float32, and has no error function."""
    if jnp.float64 in (x.dtype for x in (gate, up) if x is not None):
        return "the kernel computes in float32; use 'xla' for float64."
    if activation == "gelu":
        return "Pallas-Triton has no error function, which the exact GELU needs; use 'xla', or approximate=True."
    return None


def _tiles_of(refs):
    """References to one tile each; a ref (N, 2, F) holds two."""

    def tiles_in(ref):
        return [ref] if ref.ndim == 2 else [ref.at[:, pl.ds(i, 1)] for i in range(ref.shape[1])]

    return [tile for ref in refs for tile in tiles_in(ref)]


def _kernel(*refs, shape, index_map, formula, num_inputs):
    sizes = refs[0].shape
    starts = [tile * size for tile, size in zip(index_map(pl.program_id(0)), sizes, strict=True)]
    mask = mask_of_tile(starts, sizes, shape)
    outputs = formula(*(pltriton.load(tile, mask=mask) for tile in _tiles_of(refs[:num_inputs])))
    for tile, value in zip(_tiles_of(refs[num_inputs:]), jax.tree.leaves(outputs), strict=True):
        pltriton.store(tile, value, mask=mask)


def _elementwise(name, formula, inputs, out_types, interpret, written_over=()):
    """Runs an elementwise formula of arrays (N, F), or of arrays (N, 1, F). An array (N, 2, F) counts as two of these.
    Output i is written over input number `written_over[i]`.
    """
    n, *_, f = shape = inputs[0].shape
    tiles = config.triton_config(n, f)
    n_tiles, f_tiles = cdiv(n, tiles.n_block_size), cdiv(f, tiles.f_block_size)

    def index_map(program):  # Programs go along the rows: neighbours touch neighbouring memory.
        between = [0] * (len(shape) - 2)
        return jax.lax.div(program, f_tiles), *between, jax.lax.rem(program, f_tiles)

    def spec_of(x):
        return pl.BlockSpec((tiles.n_block_size, *x.shape[1:-1], tiles.f_block_size), index_map)

    return pl.pallas_call(
        functools.partial(_kernel, shape=shape, index_map=index_map, formula=formula, num_inputs=len(inputs)),
        grid=(n_tiles * f_tiles,),
        in_specs=[spec_of(x) for x in inputs],
        out_specs=[spec_of(y) for y in out_types],
        out_shape=out_types,
        input_output_aliases={place: i for i, place in enumerate(written_over)},
        compiler_params=pltriton.CompilerParams(num_warps=tiles.num_warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(*inputs)


def _as_rows(gate, up):
    """Two arrays (N, F), or one (N, 2, F); and the shape of their product.

    Elements do not depend on each other, so two arrays are cut into rows of 1,024 columns if that leaves no rest.
    They are never one long row, because offsets in an axis are 32-bit.
    """
    if up is None:
        rows = [gate.reshape(-1, 2, gate.shape[-1] // 2)]
        return rows, (rows[0].shape[0], 1, rows[0].shape[2])
    width = _WIDTH if gate.size % _WIDTH == 0 else max(gate.shape[-1:], default=1)
    rows = [x.reshape(-1, width) for x in (gate, up)]
    return rows, rows[0].shape


def forward(gate: jax.Array, up: jax.Array | None, *, activation: str, interpret: bool) -> jax.Array:
    """gate, up (..., F), or both side by side in gate (..., 2F) → act(gate) · up in up's dtype."""
    formula = functools.partial(formulas.product, activation=activation)
    rows, shape = _as_rows(gate, up)
    (y,) = _elementwise("glu_forward", formula, rows, [out_like(rows[0], shape, rows[-1].dtype)], interpret)
    return y.reshape((*gate.shape[:-1], shape[-1]) if up is None else gate.shape)


def backward(
    dy: jax.Array, gate: jax.Array, up: jax.Array | None, *, activation: str, interpret: bool
) -> tuple[jax.Array, jax.Array | None]:
    """dy, gate, up (..., F) → dgate, dup in their primals' dtypes; where up is None, both side by side, and None."""
    formula = functools.partial(formulas.gradients, activation=activation)
    rows, shape = _as_rows(gate, up)
    out_types = [out_like(x, x.shape, x.dtype) for x in rows]
    dgate, *dup = _elementwise("glu_backward", formula, [dy.reshape(shape), *rows], out_types, interpret)
    return dgate.reshape(gate.shape), dup[0].reshape(gate.shape) if dup else None


def gradients_and_product(
    dy: jax.Array, gate: jax.Array, up: jax.Array, *, activation: str, interpret: bool
) -> tuple[jax.Array, ...]:
    """dy, gate, up (..., F) in one dtype → dgate, dup, act(gate) · up, over the arrays of gate, up and dy."""
    formula = functools.partial(formulas.gradients_and_product, activation=activation)
    rows, shape = _as_rows(gate, up)
    out_types = [out_like(gate, shape, gate.dtype)] * 3
    name, inputs = "glu_gradients_and_product", [dy.reshape(shape), *rows]
    outputs = _elementwise(name, formula, inputs, out_types, interpret, written_over=(1, 2, 0))
    return tuple(y.reshape(gate.shape) for y in outputs)
