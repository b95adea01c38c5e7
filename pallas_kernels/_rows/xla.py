"""A pass over rows as plain XLA: whole arrays, fused as the compiler sees fit."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels._tiles import promoted

Terms = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class RowPass:
    """What is computed of rows, and of columns that all rows share.

    Attributes:
        name: of the kernel.
        stages: `stage(sums, *rows, *columns)` gives terms, float32 or wider, whose sums along each row join `sums`.
        outputs: `outputs(sums, *rows, *columns)` gives the row outputs, and terms whose sums over all rows are the
            column outputs.
        dtypes: of the row outputs.
        num_column_outputs: how many sums over all rows there are; they are float32 or wider.
    """

    name: str
    stages: tuple[Callable[..., Terms], ...]
    outputs: Callable[..., tuple[Terms, Terms]]
    dtypes: tuple[jax.typing.DTypeLike, ...]
    num_column_outputs: int = 0


def unsupported(*arrays: jax.Array | None, **case: Any) -> str | None:
    """XLA runs every case."""
    return None


def run(row_pass: RowPass, rows: Sequence[jax.Array], columns: Sequence[jax.Array | None]) -> tuple[Terms, Terms]:
    """rows (N, D), columns (D,) or None → row outputs (N, D), column outputs (D,)."""
    return run_over((-1,), (0,), row_pass, rows, [x if x is None else x[None, :] for x in columns])


def run_over(
    row_axes: tuple[int, ...],
    column_axes: tuple[int, ...],
    row_pass: RowPass,
    rows: Sequence[jax.Array],
    columns: Sequence[jax.Array | None],
) -> tuple[Terms, Terms]:
    """A pass over arrays whose rows lie along `row_axes`; the columns' sums go over `column_axes`."""
    sums: Terms = ()
    for stage in row_pass.stages:
        stage_sums = tuple(jnp.sum(term, axis=row_axes, keepdims=True) for term in stage(sums, *rows, *columns))
        # On GPUs, XLA fuses a row's sums with what is made of them; for sums over rows, that writes x̂ in float32.
        sums += jax.lax.optimization_barrier(stage_sums) if row_pass.num_column_outputs else stage_sums
    outputs, terms = row_pass.outputs(sums, *rows, *columns)
    outputs = tuple(y.astype(dtype) for y, dtype in zip(outputs, row_pass.dtypes, strict=True))
    return outputs, tuple(jnp.sum(term, axis=column_axes) for term in terms)


def wide(x: jax.Array) -> jax.Array:
    """In float32, or in float64 if it is."""
    return x.astype(promoted(x.dtype, jnp.float32))
