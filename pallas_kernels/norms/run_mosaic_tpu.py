"""A row pass in Pallas for TPU.

Memory passes: each row is read from HBM once, and totals stay in VMEM over the whole grid. Inside a step, up to 64 rows
at a time go through the stages in chunks of 512 columns: what is between two loads from VMEM fits registers, and the
compiler has enough independent work. Not measured on a TPU: no speed is claimed.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels.norms import tiles_mosaic_tpu
from liger_jax.pallas_kernels.norms.row_pass import Arrays, RowPass, Signature
from liger_jax.pallas_kernels.norms.tiles_mosaic_tpu import CHUNK_SIZE
from liger_jax.pallas_kernels.tiles import cdiv, in_bounds, out_like, tpu_interpreter, tpu_params, with_absent

_SUBLANES = 8  # of a register of float32


def unsupported(x: jax.Array, *arrays: jax.Array | None, **case: Any) -> str | None:
    """Sixteen rows must fit VMEM; Mosaic has no float16 and no float64."""
    for array in (x, *arrays):
        if array is not None and array.dtype not in (jnp.float32, jnp.bfloat16):
            what = "x" if array is x else "an array"
            return f"the TPU kernel supports float32 and bfloat16, and {what} is {array.dtype}; use 'xla'."
    present = [array for array in (x, *arrays) if array is not None]
    matrices = [array.dtype for array in present if array.ndim > 1]
    # The backward needs the most. It reads dy beside what was normalised, and a residual's gradient; it writes the
    # gradient once for each dtype, and a total for each vector. The forward reads and writes no more.
    moved = [*matrices, matrices[-1], *dict.fromkeys(matrices)]
    itemsizes, num_totals = sum(dtype.itemsize for dtype in moved), len(present) - len(matrices)
    if tiles_mosaic_tpu.n_block_size(*x.shape, itemsizes=itemsizes, num_totals=num_totals) == 0:
        return f"16 rows of {x.shape[-1]} elements exceed VMEM; use 'xla'."
    return None


def _kernel(*refs, row_pass: RowPass, signature: Signature, n: int):
    refs = signature.refs(refs)
    vector_refs = with_absent(refs.vectors, signature.has_vector)
    n_block_size, d = refs.matrices[0].shape
    first_row = pl.program_id(0) * n_block_size
    group_size = tiles_mosaic_tpu.group_size(n_block_size, d)
    chunks = [slice(start, min(start + CHUNK_SIZE, d)) for start in range(0, d, CHUNK_SIZE)]
    if refs.totals:

        @pl.when(pl.program_id(0) == 0)
        def _():
            for ref in refs.totals:
                ref[...] = jnp.zeros_like(ref)

    def compute_group(i, _):
        start = pl.multiple_of(i * group_size, group_size)
        rows = pl.ds(start, group_size)

        def load(chunk):
            matrices = (ref[rows, chunk] for ref in refs.matrices)
            return *matrices, *(None if ref is None else ref[:, chunk] for ref in vector_refs)

        sums: Arrays = ()
        for stage in row_pass.all_stages:
            terms = [stage(sums, *load(chunk)) for chunk in chunks]
            sums += tuple(_sum_along_row(term) for term in zip(*terms, strict=True))
        for chunk in chunks:
            outputs, terms = row_pass.outputs(sums, *load(chunk))
            for ref, y in zip(refs.outputs, outputs, strict=True):
                ref[rows, chunk] = y.astype(ref.dtype)
            for ref, term in zip(refs.totals, terms, strict=True):
                if n % n_block_size:  # the last tile reads past the end: those rows are garbage
                    term = jnp.where(in_bounds(first_row + start, group_size, n, axis=0), term, 0.0)
                # Here whole registers are added; XLA adds up their sublanes.
                registers = (term[i : i + _SUBLANES] for i in range(_SUBLANES, group_size, _SUBLANES))
                ref[:, chunk] += sum(registers, start=term[:_SUBLANES])

    jax.lax.fori_loop(0, n_block_size // group_size, compute_group, None)


def _sum_along_row(chunks: Sequence[jax.Array]) -> jax.Array:
    """The sum along rows that are in chunks: chunks of one width are added to each other, and then across lanes."""
    whole = [chunk for chunk in chunks if chunk.shape == chunks[0].shape]
    total = jnp.sum(sum(whole[1:], start=whole[0]), axis=1, keepdims=True)
    return total if len(whole) == len(chunks) else total + jnp.sum(chunks[-1], axis=1, keepdims=True)


def run(
    row_pass: RowPass,
    matrices: Sequence[jax.Array],
    vectors: Sequence[jax.Array | None],
    known_sums: Arrays = (),
    *,
    interpret: bool,
) -> tuple[Arrays, Arrays, Arrays]:
    """matrices (N, D), vectors (D,) or None → outputs (N, D), totals (D,) float32, and no sums to save.

    A saved sum, one number a row, would take 128 times its bytes in a TPU's memory: a backward pass makes it again.
    """
    del known_sums
    n, d = matrices[0].shape
    signature = Signature.of(row_pass, matrices, vectors, (), saves_sums=False)
    dtypes = (*(x.dtype for x in matrices), *row_pass.output_dtypes)
    itemsizes = sum(jnp.dtype(dtype).itemsize for dtype in dtypes)
    n_block_size = tiles_mosaic_tpu.n_block_size(n, d, itemsizes, row_pass.num_totals)
    matrix_spec = pl.BlockSpec((n_block_size, d), lambda row_tile: (row_tile, 0))
    vector_spec = pl.BlockSpec((1, d), lambda _: (0, 0))
    totals_spec = pl.BlockSpec((_SUBLANES, d), lambda _: (0, 0))
    present = [x[None, :] for x in vectors if x is not None]

    def kernel(*refs):
        _kernel(*refs, row_pass=row_pass, signature=signature, n=n)

    results = pl.pallas_call(
        kernel,
        grid=(cdiv(n, n_block_size),),
        in_specs=[matrix_spec] * len(matrices) + [vector_spec] * len(present),
        out_specs=[matrix_spec] * signature.num_outputs + [totals_spec] * signature.num_totals,
        out_shape=[out_like(matrices[0], (n, d), dtype) for dtype in row_pass.output_dtypes]
        + [out_like(matrices[0], (_SUBLANES, d), jnp.float32)] * signature.num_totals,
        compiler_params=tpu_params(interpret, "arbitrary" if row_pass.num_totals else "parallel"),
        interpret=tpu_interpreter(interpret),
        name=row_pass.name,
    )(*matrices, *present)
    outputs, _, partial_totals = signature.results(results)
    return tuple(outputs), tuple(jnp.sum(x, axis=0) for x in partial_totals), ()
