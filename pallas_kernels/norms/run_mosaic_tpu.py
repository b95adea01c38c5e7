"""A pass over rows in Pallas for TPU.

Memory passes: each row is read from HBM once; sums over rows stay in VMEM over the whole grid. Inside a step, up to 64
rows at a time go through the stages in chunks of 512 columns: what lies between two loads from VMEM fits registers, and
the compiler has enough independent work. Not measured on a TPU: no speed is claimed.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels._tiles import cdiv, in_bounds, out_like, split, tpu_interpreter, tpu_params, with_absent
from liger_jax.pallas_kernels.norms import tiles_triton as config
from liger_jax.pallas_kernels.norms.run_xla import RowPass, Terms


def unsupported(x: jax.Array, *arrays: jax.Array | None, **case: Any) -> str | None:
    """Sixteen rows must fit VMEM; Mosaic has no float16 and no float64."""
    for array in (x, *arrays):
        if array is not None and array.dtype not in (jnp.float32, jnp.bfloat16):
            what = "x" if array is x else "an array"
            return f"the TPU kernel takes float32 and bfloat16, and {what} is {array.dtype}; use 'xla'."
    if config.tpu_n_block_size(*x.shape, 4 * x.dtype.itemsize, num_column_outputs=2) == 0:
        return f"16 rows of {x.shape[-1]} elements exceed VMEM; use 'xla'."
    return None


def _kernel(*refs, row_pass: RowPass, n: int, num_rows: int, has_column: tuple[bool, ...]):
    counts = num_rows, sum(has_column), len(row_pass.dtypes)
    row_refs, column_refs, out_refs, sum_refs = split(refs, counts)
    column_refs = with_absent(column_refs, has_column)
    n_block_size, d = row_refs[0].shape
    first_row = pl.program_id(0) * n_block_size
    group_size = config.tpu_group_size(n_block_size, d)
    chunks = [slice(start, min(start + config.TPU_CHUNK, d)) for start in range(0, d, config.TPU_CHUNK)]
    if sum_refs:

        @pl.when(pl.program_id(0) == 0)
        def _():
            for ref in sum_refs:
                ref[...] = jnp.zeros_like(ref)

    def group(i, _):
        start = pl.multiple_of(i * group_size, group_size)
        rows = pl.ds(start, group_size)
        load = lambda chunk: (
            *(ref[rows, chunk] for ref in row_refs),
            *(None if ref is None else ref[:, chunk] for ref in column_refs),
        )
        sums: Terms = ()
        for stage in row_pass.all_stages:
            terms = [stage(sums, *load(chunk)) for chunk in chunks]
            sums += tuple(_row_sum(term) for term in zip(*terms, strict=True))
        for chunk in chunks:
            outputs, terms = row_pass.outputs(sums, *load(chunk))
            for ref, y in zip(out_refs, outputs, strict=True):
                ref[rows, chunk] = y.astype(ref.dtype)
            for ref, term in zip(sum_refs, terms, strict=True):
                if n % n_block_size:  # the last tile reads past the end: those rows are garbage
                    term = jnp.where(in_bounds(first_row + start, group_size, n, axis=0), term, 0.0)
                # Whole registers are added; their 8 sublanes, outside.
                ref[:, chunk] += sum((term[i : i + 8] for i in range(8, group_size, 8)), start=term[:8])

    jax.lax.fori_loop(0, n_block_size // group_size, group, None)


def _row_sum(terms: Sequence[jax.Array]) -> jax.Array:
    """The sum along rows of chunks: element by element as far as they are of one width, across lanes only then."""
    whole = [term for term in terms if term.shape == terms[0].shape]
    total = jnp.sum(sum(whole[1:], start=whole[0]), axis=1, keepdims=True)
    return total if len(whole) == len(terms) else total + jnp.sum(terms[-1], axis=1, keepdims=True)


def run(
    row_pass: RowPass,
    rows: Sequence[jax.Array],
    columns: Sequence[jax.Array | None],
    known: Terms = (),
    *,
    interpret: bool,
) -> tuple[Terms, Terms, Terms]:
    """rows (N, D), columns (D,) or None → row outputs (N, D), column outputs (D,) float32, and no sums to save.

    One number a row would take 128 times its bytes in a TPU's memory: a backward pass makes them again.
    """
    del known
    n, d = rows[0].shape
    itemsizes = sum(jnp.dtype(x).itemsize for x in (*(x.dtype for x in rows), *row_pass.dtypes))
    n_block_size = config.tpu_n_block_size(n, d, itemsizes, row_pass.num_column_outputs)
    rows_spec = pl.BlockSpec((n_block_size, d), lambda row_tile: (row_tile, 0))
    column_spec = pl.BlockSpec((1, d), lambda _: (0, 0))
    sum_spec = pl.BlockSpec((8, d), lambda _: (0, 0))
    present = [x[None, :] for x in columns if x is not None]

    def kernel(*refs):
        _kernel(*refs, row_pass=row_pass, n=n, num_rows=len(rows), has_column=tuple(x is not None for x in columns))

    results = pl.pallas_call(
        kernel,
        grid=(cdiv(n, n_block_size),),
        in_specs=[rows_spec] * len(rows) + [column_spec] * len(present),
        out_specs=[rows_spec] * len(row_pass.dtypes) + [sum_spec] * row_pass.num_column_outputs,
        out_shape=[out_like(rows[0], (n, d), dtype) for dtype in row_pass.dtypes]
        + [out_like(rows[0], (8, d), jnp.float32)] * row_pass.num_column_outputs,
        compiler_params=tpu_params(interpret, "arbitrary" if row_pass.num_column_outputs else "parallel"),
        interpret=tpu_interpreter(interpret),
        name=row_pass.name,
    )(*rows, *present)
    outputs, partials = split(results, (len(row_pass.dtypes),))
    return tuple(outputs), tuple(jnp.sum(x, axis=0) for x in partials), ()
