"""A pass over rows in Pallas-Triton (NVIDIA, Ampere and newer).

Memory passes: each row is read once and stays in registers over all stages. It comes in pieces of equal width, a power
of two as all of Triton's arrays, so that few lanes idle at widths like 2,304, 5,120 or 18,432. A program walks over
rows and, where registers allow, loads the next ones while it computes. Sums over rows are float32 in registers too, and
the (programs, D) partial sums are added up outside.
A forward pass saves its rows' sums: with them a backward has one stage left, and registers for it.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from liger_jax.pallas_kernels._contraction import contracted
from liger_jax.pallas_kernels._tiles import in_bounds, out_like, round_up, split, with_absent
from liger_jax.pallas_kernels.norms import tiles_triton as config
from liger_jax.pallas_kernels.norms.run_xla import RowPass, Terms


def unsupported(x: jax.Array, *arrays: jax.Array | None, **case: Any) -> str | None:
    """A row must fit the registers of one program."""
    if x.shape[-1] > config.TRITON_MAX_WIDTH:
        return f"a row of {x.shape[-1]} elements exceeds {config.TRITON_MAX_WIDTH}, what one program holds; use 'xla'."
    if any(array is not None and array.dtype == jnp.float64 for array in (x, *arrays)):
        return "the kernel computes in float32; use 'xla' for float64."
    return None


def _kernel(*refs, row_pass: RowPass, n: int, d: int, counts, has_column, tiles: config.TritonConfig, interpret: bool):
    row_refs, known_refs, column_refs, refs = split(refs, (*counts, sum(has_column)))
    column_refs = with_absent(column_refs, has_column)
    num_outputs, num_totals = len(row_pass.dtypes), row_pass.num_column_outputs
    out_refs, saved_refs, total_refs = split(refs, (num_outputs, len(refs) - num_outputs - num_totals))
    program = pl.program_id(0)
    fused = (lambda formula: formula) if interpret else contracted
    policy = "evict_first" if tiles.streams else None
    pieces = tuple(
        (pl.ds(start, tiles.d_block_size), in_bounds(start, tiles.d_block_size, d, axis=1) if end > d else None)
        for start, end in itertools.pairwise(range(0, tiles.width + 1, tiles.d_block_size))
    )

    def load_columns(at, mask):
        return [None if ref is None else _load(ref.at[:, at], mask) for ref in column_refs]

    def place(step):
        start = (program + step * tiles.num_programs) * tiles.n_block_size
        return pl.ds(start, tiles.n_block_size), in_bounds(start, tiles.n_block_size, n, axis=0)

    def load(step):
        """The rows of a step by pieces, and what is known of them."""
        rows, in_array = place(step)
        values = [[_load(ref.at[rows, at], _both(in_array, mask)) for ref in row_refs] for at, mask in pieces]
        # A row past the end is zeros, whose normalised self is zeros as well, as its sums are 1.
        return values, [_load(ref.at[rows, :], in_array, other=1.0) for ref in known_refs]

    def column_values(i):
        return columns[i] if columns else load_columns(*pieces[i])

    def all_sums(step, rows, known):
        """Along the rows of a step; writes those that are saved."""

        def along(stage, sums):
            totals: Any = None
            for i, (row, (_, mask)) in enumerate(zip(rows, pieces, strict=True)):
                add = fused(functools.partial(_with_terms, stage, mask))
                totals = add(totals, sums, *row, *column_values(i))
            return tuple(jnp.sum(total, axis=1, keepdims=True) for total in totals)

        sums: Terms = tuple(known) or _statistics(row_pass, along)
        if not known:
            at, in_array = place(step)
            for ref, x in zip(saved_refs, sums, strict=True):
                pltriton.store(ref.at[at, :], x, mask=in_array)
        for stage in row_pass.stages:
            sums += along(stage, sums)
        return sums

    def write(step, rows, sums, totals):
        """The row outputs of a step; returns the sums over rows so far."""
        at_rows, in_array = place(step)
        new_totals = []
        for i, ((at, mask), row, total) in enumerate(zip(pieces, rows, totals, strict=True)):
            outputs, total = fused(functools.partial(_with_outputs, row_pass))(total, sums, *row, *column_values(i))
            for ref, y in zip(out_refs, outputs, strict=True):
                pltriton.store(ref.at[at_rows, at], y, mask=_both(in_array, mask), eviction_policy=policy)
            new_totals.append(total)
        return new_totals

    def compute(step, rows, known, totals):
        return write(step, rows, all_sums(step, rows, known), totals)

    def step_ahead(i, carry):
        following = load(i + 1)
        return following, compute(i, *carry[0], carry[1])

    columns = [load_columns(*piece) for piece in pieces] if tiles.keeps_columns else []
    totals = [[jnp.zeros((1, tiles.d_block_size), jnp.float32) for _ in total_refs] for _ in pieces]
    if tiles.num_steps == 1:
        totals = compute(0, *load(0), totals)
    elif tiles.loads_ahead:
        _, totals = jax.lax.fori_loop(0, tiles.num_steps, step_ahead, (load(0), totals))
    else:
        totals = jax.lax.fori_loop(0, tiles.num_steps, lambda i, totals: compute(i, *load(i), totals), totals)
    for (at, mask), total in zip(pieces, totals, strict=True):
        for ref, x in zip(total_refs, total, strict=True):
            pltriton.store(ref.at[:, at], x, mask=mask)


def _with_terms(stage, mask, totals, sums, *arrays):
    """A piece's terms, columns behind the last left out, added to those of the pieces before."""
    terms = [x if mask is None else jnp.where(mask, x, 0.0) for x in stage(sums, *arrays)]
    return terms if totals is None else [x + y for x, y in zip(totals, terms, strict=True)]


def _with_outputs(row_pass, totals, sums, *arrays):
    """A piece's outputs, rounded, and its terms added to the sums over rows."""
    outputs, terms = row_pass.outputs(sums, *arrays)
    terms = [x if len(x) == 1 else jnp.sum(x, axis=0, keepdims=True) for x in terms]
    outputs = [y.astype(dtype) for y, dtype in zip(outputs, row_pass.dtypes, strict=True)]
    return outputs, [x + y for x, y in zip(totals, terms, strict=True)]


def _statistics(row_pass: RowPass, along: Callable[..., Terms]) -> Terms:
    """The sums that a forward pass saves; `along` makes a stage's."""
    if not row_pass.statistics:
        return ()
    before: Terms = ()
    for stage in row_pass.statistics[:-1]:
        before += along(stage, before)
    last = along(row_pass.statistics[-1], before)
    if row_pass.rescue is None:
        return before + last
    rescued = jax.lax.cond(
        jnp.max((last[0] == jnp.inf).astype(jnp.int32)) > 0,  # not the largest: that may be NaN
        lambda: along(row_pass.rescue, before),
        lambda: tuple(jnp.zeros_like(x) for x in last),
    )
    return before + last + rescued


def _load(ref, mask, other=0.0):
    return pltriton.load(ref, mask=mask, other=None if mask is None else other)


def _both(row_mask, column_mask):
    return row_mask if column_mask is None else row_mask & column_mask


def run(
    row_pass: RowPass,
    rows: Sequence[jax.Array],
    columns: Sequence[jax.Array | None],
    known: Terms = (),
    *,
    interpret: bool,
) -> tuple[Terms, Terms, Terms]:
    """rows (N, D), columns (D,) or None → row outputs (N, D), column outputs (D,) float32, and sums to save (N, 1).

    The sums are those of `statistics` and the rescue, unless these are `known`: what an earlier pass saved. A pass that
    has both these and column outputs needs them.
    """
    n, d = rows[0].shape
    num_stages = len(row_pass.stages) + (0 if known else len(row_pass.statistics))
    itemsize = max(x.dtype.itemsize for x in rows)
    tiles = config.triton_config(n, d, itemsize, len(rows), num_stages, row_pass.num_column_outputs)
    n_padded = round_up(n, tiles.num_steps * tiles.num_programs * tiles.n_block_size)
    rows_spec = pl.BlockSpec((n_padded, tiles.width), lambda _: (0, 0))
    sums_spec = pl.BlockSpec((n_padded, 1), lambda _: (0, 0))
    column_spec = pl.BlockSpec((1, tiles.width), lambda _: (0, 0))
    partial_spec = pl.BlockSpec((1, tiles.width), lambda program: (program, 0))
    present = [x[None, :] for x in columns if x is not None]
    num_saved = 0 if known else row_pass.num_statistics

    def kernel(*refs):
        _kernel(
            *refs,
            row_pass=row_pass,
            n=n,
            d=d,
            counts=(len(rows), len(known)),
            has_column=tuple(x is not None for x in columns),
            tiles=tiles,
            interpret=interpret,
        )

    float32 = lambda *shape: out_like(rows[0], shape, jnp.float32)
    results = pl.pallas_call(
        kernel,
        grid=(tiles.num_programs,),
        in_specs=[rows_spec] * len(rows) + [sums_spec] * len(known) + [column_spec] * len(present),
        out_specs=[rows_spec] * len(row_pass.dtypes)
        + [sums_spec] * num_saved
        + [partial_spec] * row_pass.num_column_outputs,
        out_shape=[out_like(rows[0], (n, d), dtype) for dtype in row_pass.dtypes]
        + [float32(n, 1)] * num_saved
        + [float32(tiles.num_programs, d)] * row_pass.num_column_outputs,
        compiler_params=pltriton.CompilerParams(num_warps=tiles.num_warps, num_stages=1),
        interpret=interpret,
        name=row_pass.name,
    )(*rows, *known, *present)
    outputs, saved, partials = split(results, (len(row_pass.dtypes), num_saved))
    return tuple(outputs), tuple(jnp.sum(x, axis=0) for x in partials), tuple(saved)
