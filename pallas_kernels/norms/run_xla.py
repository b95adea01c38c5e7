"""A pass over rows as plain XLA: whole arrays, fused as the compiler sees fit."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels._tiles import promoted

Terms = tuple[jax.Array, ...]
Stage = Callable[..., Terms]


@dataclasses.dataclass(frozen=True)
class RowPass:
    """What is computed of rows, and of columns that all rows share.

    Attributes:
        name: of the kernel.
        statistics: the first stages, of one term each, whose sums a forward pass may save for the backward. A stage is
            `stage(sums, *rows, *columns)`, and gives terms, float32 or wider, whose sums along each row join `sums`.
        rescue: a stage beside the last of `statistics`, whose sum comes behind its, and is needed only for rows where
            that is infinite.
        stages: what follows.
        outputs: `outputs(sums, *rows, *columns)` gives the row outputs, and terms whose sums over all rows are the
            column outputs.
        dtypes: of the row outputs.
        num_column_outputs: how many sums over all rows there are; they are float32 or wider.
    """

    name: str
    outputs: Callable[..., tuple[Terms, Terms]]
    dtypes: tuple[jax.typing.DTypeLike, ...]
    statistics: tuple[Stage, ...] = ()
    rescue: Stage | None = None
    stages: tuple[Stage, ...] = ()
    num_column_outputs: int = 0

    @property
    def num_statistics(self) -> int:
        """How many sums can be saved."""
        return len(self.statistics) + (self.rescue is not None)

    @property
    def all_stages(self) -> tuple[Stage, ...]:
        """With the rescue made for every row."""
        if self.rescue is None:
            return (*self.statistics, *self.stages)
        last, rescue = self.statistics[-1], self.rescue
        return (*self.statistics[:-1], lambda *arrays: (*last(*arrays), *rescue(*arrays)), *self.stages)


def unsupported(*arrays: jax.Array | None, **case: Any) -> str | None:
    """XLA runs every case."""
    return None


def run(
    row_pass: RowPass, rows: Sequence[jax.Array], columns: Sequence[jax.Array | None], known: Terms = ()
) -> tuple[Terms, Terms, Terms]:
    """rows (N, D), columns (D,) or None → row outputs (N, D), column outputs (D,), and no sums to save.

    `known` are sums that were saved: none here, where the passes over memory are what they are with or without them.
    """
    del known
    outputs = run_over((-1,), (0,), row_pass, rows, [x if x is None else x[None, :] for x in columns])
    return *outputs, ()


def run_over(
    row_axes: tuple[int, ...],
    column_axes: tuple[int, ...],
    row_pass: RowPass,
    rows: Sequence[jax.Array],
    columns: Sequence[jax.Array | None],
) -> tuple[Terms, Terms]:
    """A pass over arrays whose rows lie along `row_axes`; the columns' sums go over `column_axes`."""
    sums: Terms = ()
    for stage in row_pass.all_stages:
        stage_sums = tuple(jnp.sum(term, axis=row_axes, keepdims=True) for term in stage(sums, *rows, *columns))
        # On GPUs, XLA fuses a row's sums with what is made of them; for sums over rows, that writes x̂ in float32.
        sums += jax.lax.optimization_barrier(stage_sums) if row_pass.num_column_outputs else stage_sums
    outputs, terms = row_pass.outputs(sums, *rows, *columns)
    outputs = tuple(y.astype(dtype) for y, dtype in zip(outputs, row_pass.dtypes, strict=True))
    return outputs, tuple(jnp.sum(term, axis=column_axes) for term in terms)


def wide(x: jax.Array) -> jax.Array:
    """In float32, or in float64 if it is."""
    return x.astype(promoted(x.dtype, jnp.float32))
