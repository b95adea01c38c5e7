"""A row pass in Pallas-Triton (NVIDIA, Ampere and newer).

Memory passes: each row is read once and stays in registers through all stages. It comes in pieces of equal width. The
width is a power of two, as all of Triton's arrays, so pieces leave fewer lanes idle than one array would at widths like
2,304, 5,120 or 18,432. A program walks over rows and, where registers allow, loads the next ones while it computes.
Totals are float32 in registers too; each program writes its own, (programs, D), and XLA adds these up.
The rows' sums are saved by a forward pass: with them a backward pass has one stage left, and enough registers for it.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _triton as pltriton
from liger_jax.pallas_kernels._contraction import contracted
from liger_jax.pallas_kernels.norms import tiles_triton
from liger_jax.pallas_kernels.norms.row_pass import Arrays, RowPass, Signature, statistic_sums
from liger_jax.pallas_kernels.norms.tiles_triton import TritonTiles
from liger_jax.pallas_kernels.tiles import in_bounds, out_like, round_up, with_absent


def unsupported(x: jax.Array, *arrays: jax.Array | None, **case: Any) -> str | None:
    """A row must fit the registers of one program."""
    most = tiles_triton.MAX_WIDTH
    if x.shape[-1] > most:
        return f"a row of {x.shape[-1]} elements exceeds {most}, what one program holds; use 'xla'."
    if any(array is not None and array.dtype == jnp.float64 for array in (x, *arrays)):
        return "the kernel computes in float32; use 'xla' for float64."
    return None


def _kernel(*refs, row_pass: RowPass, signature: Signature, n: int, d: int, tiles: TritonTiles, interpret: bool):
    refs = signature.refs(refs)
    vector_refs = with_absent(refs.vectors, signature.has_vector)
    program = pl.program_id(0)
    eviction_policy = "evict_first" if tiles.evicts_outputs_first else None
    pieces = tuple(
        (pl.ds(start, tiles.d_block_size), in_bounds(start, tiles.d_block_size, d, axis=1) if end > d else None)
        for start, end in itertools.pairwise(range(0, tiles.width + 1, tiles.d_block_size))
    )

    def with_multiply_adds(formula):
        return formula if interpret else contracted(formula)

    def load_vectors(at, mask):
        return [None if ref is None else _load(ref.at[:, at], mask) for ref in vector_refs]

    def rows_of(step):
        start = (program + step * tiles.num_programs) * tiles.n_block_size
        return pl.ds(start, tiles.n_block_size), in_bounds(start, tiles.n_block_size, n, axis=0)

    def load(step):
        """A step's rows by pieces, and the sums of them that are known."""
        rows, in_array = rows_of(step)
        values = [[_load(ref.at[rows, at], _both(in_array, mask)) for ref in refs.matrices] for at, mask in pieces]
        # A row past the end is zeros. Its sums are ones, so that nothing is divided by zero and it adds nothing.
        return values, [_load(ref.at[rows, :], in_array, other=1.0) for ref in refs.known_sums]

    def vectors_of_piece(i):
        return kept_vectors[i] if kept_vectors else load_vectors(*pieces[i])

    def all_sums(step, row_pieces, known_sums):
        """The sums along a step's rows. Writes those that are saved."""

        def sum_along_row(stage, sums, number=None):
            del number  # the sums are in registers, and have no places
            totals: Any = None
            for i, (row_piece, (_, mask)) in enumerate(zip(row_pieces, pieces, strict=True)):
                add = with_multiply_adds(functools.partial(_with_terms, stage, mask))
                totals = add(totals, sums, *row_piece, *vectors_of_piece(i))
            return tuple(jnp.sum(total, axis=1, keepdims=True) for total in totals)

        sums: Arrays = tuple(known_sums) or statistic_sums(row_pass, sum_along_row, _is_any)
        if not known_sums:
            at, in_array = rows_of(step)
            for ref, x in zip(refs.saved_sums, sums, strict=True):
                pltriton.store(ref.at[at, :], x, mask=in_array)
        for stage in row_pass.stages:
            sums += sum_along_row(stage, sums)
        return sums

    def write(step, row_pieces, sums, totals):
        """Writes a step's outputs; returns the totals so far."""
        at_rows, in_array = rows_of(step)
        new_totals = []
        for i, ((at, mask), row_piece, total) in enumerate(zip(pieces, row_pieces, totals, strict=True)):
            add = with_multiply_adds(functools.partial(_with_outputs, row_pass))
            outputs, total = add(total, sums, *row_piece, *vectors_of_piece(i))
            for ref, y in zip(refs.outputs, outputs, strict=True):
                pltriton.store(ref.at[at_rows, at], y, mask=_both(in_array, mask), eviction_policy=eviction_policy)
            new_totals.append(total)
        return new_totals

    def compute(step, row_pieces, known_sums, totals):
        return write(step, row_pieces, all_sums(step, row_pieces, known_sums), totals)

    def step_with_next_loaded(i, carry):
        following, ((row_pieces, known_sums), totals) = load(i + 1), carry
        return following, compute(i, row_pieces, known_sums, totals)

    kept_vectors = [load_vectors(*piece) for piece in pieces] if tiles.keeps_vectors else []
    totals = [[jnp.zeros((1, tiles.d_block_size), jnp.float32) for _ in refs.totals] for _ in pieces]
    if tiles.num_steps == 1:
        totals = compute(0, *load(0), totals)
    elif tiles.loads_ahead:
        _, totals = jax.lax.fori_loop(0, tiles.num_steps, step_with_next_loaded, (load(0), totals))
    else:
        totals = jax.lax.fori_loop(0, tiles.num_steps, lambda i, totals: compute(i, *load(i), totals), totals)
    for (at, mask), total in zip(pieces, totals, strict=True):
        for ref, x in zip(refs.totals, total, strict=True):
            pltriton.store(ref.at[:, at], x, mask=mask)


def _with_terms(stage, mask, totals, sums, *arrays):
    """A piece's terms, without those past the last column, added to the terms of the pieces before."""
    terms = [x if mask is None else jnp.where(mask, x, 0.0) for x in stage(sums, *arrays)]
    return terms if totals is None else [x + y for x, y in zip(totals, terms, strict=True)]


def _with_outputs(row_pass, totals, sums, *arrays):
    """A piece's outputs, rounded, and its terms added to the totals."""
    outputs, terms = row_pass.outputs(sums, *arrays)
    terms = [x if len(x) == 1 else jnp.sum(x, axis=0, keepdims=True) for x in terms]
    outputs = [y.astype(dtype) for y, dtype in zip(outputs, row_pass.output_dtypes, strict=True)]
    return outputs, [x + y for x, y in zip(totals, terms, strict=True)]


def _is_any(needed: jax.Array) -> jax.Array:
    """Whether any entry is true. Triton reduces no booleans."""
    return jnp.max(needed.astype(jnp.int32)) > 0


def _load(ref, mask, other=0.0):
    return pltriton.load(ref, mask=mask, other=None if mask is None else other)


def _both(row_mask, column_mask):
    return row_mask if column_mask is None else row_mask & column_mask


def run(
    row_pass: RowPass,
    matrices: Sequence[jax.Array],
    vectors: Sequence[jax.Array | None],
    known_sums: Arrays = (),
    *,
    interpret: bool,
) -> tuple[Arrays, Arrays, Arrays]:
    """matrices (N, D), vectors (D,) or None → outputs (N, D), totals (D,) float32, and sums to save (N, 1).

    The sums are the statistics' and the rescues'. Where they are known, because an earlier pass saved them,
    they are read and none are saved. A pass that has both statistics and totals must be given them.
    """
    n, d = matrices[0].shape
    signature = Signature.of(row_pass, matrices, vectors, known_sums, saves_sums=True)
    num_stages = len(row_pass.stages) + (0 if known_sums else len(row_pass.statistics))
    itemsize = max(x.dtype.itemsize for x in matrices)
    tiles = tiles_triton.triton_tiles(n, d, itemsize, len(matrices), num_stages, row_pass.num_totals)
    n_padded = round_up(n, tiles.num_steps * tiles.num_programs * tiles.n_block_size)
    matrix_spec = pl.BlockSpec((n_padded, tiles.width), lambda _: (0, 0))
    sums_spec = pl.BlockSpec((n_padded, 1), lambda _: (0, 0))
    vector_spec = pl.BlockSpec((1, tiles.width), lambda _: (0, 0))
    totals_spec = pl.BlockSpec((1, tiles.width), lambda program: (program, 0))
    present = [x[None, :] for x in vectors if x is not None]

    def kernel(*refs):
        _kernel(*refs, row_pass=row_pass, signature=signature, n=n, d=d, tiles=tiles, interpret=interpret)

    def float32_type(*shape):
        return out_like(matrices[0], shape, jnp.float32)

    results = pl.pallas_call(
        kernel,
        grid=(tiles.num_programs,),
        in_specs=[matrix_spec] * len(matrices) + [sums_spec] * len(known_sums) + [vector_spec] * len(present),
        out_specs=[matrix_spec] * signature.num_outputs
        + [sums_spec] * signature.num_saved_sums
        + [totals_spec] * signature.num_totals,
        out_shape=[out_like(matrices[0], (n, d), dtype) for dtype in row_pass.output_dtypes]
        + [float32_type(n, 1)] * signature.num_saved_sums
        + [float32_type(tiles.num_programs, d)] * signature.num_totals,
        compiler_params=pltriton.CompilerParams(num_warps=tiles.num_warps, num_stages=1),
        interpret=interpret,
        name=row_pass.name,
    )(*matrices, *known_sums, *present)
    outputs, saved_sums, partial_totals = signature.results(results)
    return tuple(outputs), tuple(jnp.sum(x, axis=0) for x in partial_totals), tuple(saved_sums)
