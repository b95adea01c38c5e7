"""A pass over rows in Pallas-Triton (NVIDIA, Ampere and newer).

Memory passes: each row is read once and stays in registers over all stages; a row too wide for that is read again by
each stage, from the cache. A row is cut into powers of two, Triton's only sizes, so that few lanes idle at widths like
2,304, 5,120 or 18,432. Without sums over rows, one tile a program. With them, each program walks over rows with float32
partial sums in registers, loads the next rows while it computes, and the (programs, D) partials are summed outside.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from liger_jax.pallas_kernels._rows import config
from liger_jax.pallas_kernels._rows.xla import RowPass, Terms
from liger_jax.pallas_kernels._tiles import in_bounds, out_like, round_up, with_absent

# What tells one reading of a row from another: equal loads would become one, whose values wait in registers.
_FIRST, _MIDDLE, _LAST = {"eviction_policy": "evict_last"}, {}, {"eviction_policy": "evict_first"}


def unsupported(x: jax.Array, *arrays: jax.Array | None, **case: Any) -> str | None:
    """A row must fit the registers of one program."""
    if x.shape[-1] > config.TRITON_MAX_WIDTH:
        return f"a row of {x.shape[-1]} elements exceeds {config.TRITON_MAX_WIDTH}, what one program holds; use 'xla'."
    if any(array is not None and array.dtype == jnp.float64 for array in (x, *arrays)):
        return "the kernel computes in float32; use 'xla' for float64."
    return None


def _kernel(*refs, row_pass: RowPass, n: int, d: int, num_rows: int, has_column: tuple[bool, ...], tiles):
    row_refs, refs = refs[:num_rows], refs[num_rows:]
    column_refs, refs = with_absent(refs, has_column), refs[sum(has_column) :]
    out_refs, sum_refs = refs[: len(row_pass.dtypes)], refs[len(row_pass.dtypes) :]
    program = pl.program_id(0)
    pieces = tuple(
        (pl.ds(start, size), in_bounds(start, size, d, axis=1) if start + size > d else None)
        for start, size in zip(tiles.d_starts, tiles.d_block_sizes, strict=True)
    )

    def load_columns(at, mask):
        return [None if ref is None else _load(ref.at[:, at], mask) for ref in column_refs]

    def place(step):
        start = (program + step * tiles.num_programs) * tiles.n_block_size
        return pl.ds(start, tiles.n_block_size), in_bounds(start, tiles.n_block_size, n, axis=0)

    def load(step, at, mask, **hints):
        rows, in_array = place(step)
        return [_load(ref.at[rows, at], _both(in_array, mask), **hints) for ref in row_refs]

    def compute(step, kept, totals):
        """Writes the row outputs and returns the sums over rows so far."""

        def read(hints):
            """Piece by piece: what is not kept waits for its turn."""
            for i, piece in enumerate(pieces):
                yield [*kept[i], *columns[i]] if kept else [*load(step, *piece, **hints), *load_columns(*piece)]

        sums: Terms = ()
        for stage in row_pass.stages:
            hints = _MIDDLE if stage is row_pass.stages[-1] else _FIRST
            terms = [stage(sums, *piece) for piece in read(hints)]
            sums += tuple(_row_sum(term, [mask for _, mask in pieces]) for term in zip(*terms, strict=True))
        rows, in_array = place(step)
        new_totals = []
        for piece, (at, mask), total in zip(read(_LAST), pieces, totals, strict=True):
            outputs, terms = row_pass.outputs(sums, *piece)
            for ref, y in zip(out_refs, outputs, strict=True):
                pltriton.store(ref.at[rows, at], y.astype(ref.dtype), mask=_both(in_array, mask))
            # A row past the end is zeros, and with eps = 0 its normalised self is NaN.
            terms = [jnp.sum(jnp.where(in_array, term, 0.0), axis=0, keepdims=True) for term in terms]
            new_totals.append([x + y for x, y in zip(total, terms, strict=True)])
        return new_totals

    def load_next(i):
        return [load(i, *piece) for piece in pieces] if tiles.keeps_rows else []

    def step(i, carry):
        rows, totals = carry
        following = load_next(i + 1)
        return following, compute(i, rows, totals)

    columns = [load_columns(*piece) for piece in pieces] if tiles.keeps_rows else []
    carry = load_next(0), [[jnp.zeros((1, size), jnp.float32) for _ in sum_refs] for size in tiles.d_block_sizes]
    if tiles.num_steps == 1:
        totals = compute(0, *carry)
    else:
        _, totals = jax.lax.fori_loop(0, tiles.num_steps, step, carry)
    for (at, mask), total in zip(pieces, totals, strict=True):
        for ref, x in zip(sum_refs, total, strict=True):
            pltriton.store(ref.at[:, at], x, mask=mask)


def _load(ref, mask, **hints):
    return pltriton.load(ref, mask=mask, other=None if mask is None else 0.0, **hints)


def _row_sum(terms, masks):
    """The sum along rows of pieces; columns behind the last are left out."""
    terms = [x if mask is None else jnp.where(mask, x, 0.0) for x, mask in zip(terms, masks, strict=True)]
    return functools.reduce(operator.add, (jnp.sum(x, axis=1, keepdims=True) for x in terms))


def _both(row_mask, column_mask):
    return row_mask if column_mask is None else row_mask & column_mask


def run(
    row_pass: RowPass, rows: Sequence[jax.Array], columns: Sequence[jax.Array | None], *, interpret: bool
) -> tuple[Terms, Terms]:
    """rows (N, D), columns (D,) or None → row outputs (N, D), column outputs (D,) float32."""
    n, d = rows[0].shape
    tiles = config.triton_config(n, d, len(rows), row_pass.num_column_outputs)
    width = sum(tiles.d_block_sizes)
    n_padded = round_up(n, tiles.num_steps * tiles.num_programs * tiles.n_block_size)
    rows_spec = pl.BlockSpec((n_padded, width), lambda _: (0, 0))
    column_spec = pl.BlockSpec((1, width), lambda _: (0, 0))
    partial_spec = pl.BlockSpec((1, width), lambda program: (program, 0))
    present = [x[None, :] for x in columns if x is not None]

    def kernel(*refs):
        _kernel(
            *refs,
            row_pass=row_pass,
            n=n,
            d=d,
            num_rows=len(rows),
            has_column=tuple(x is not None for x in columns),
            tiles=tiles,
        )

    partial = out_like(rows[0], (tiles.num_programs, d), jnp.float32)
    results = pl.pallas_call(
        kernel,
        grid=(tiles.num_programs,),
        in_specs=[rows_spec] * len(rows) + [column_spec] * len(present),
        out_specs=[rows_spec] * len(row_pass.dtypes) + [partial_spec] * row_pass.num_column_outputs,
        out_shape=[out_like(rows[0], (n, d), dtype) for dtype in row_pass.dtypes]
        + [partial] * row_pass.num_column_outputs,
        compiler_params=pltriton.CompilerParams(num_warps=tiles.num_warps, num_stages=1),
        interpret=interpret,
        name=row_pass.name,
    )(*rows, *present)
    outputs, partials = results[: len(row_pass.dtypes)], results[len(row_pass.dtypes) :]
    return tuple(outputs), tuple(jnp.sum(x, axis=0) for x in partials)
