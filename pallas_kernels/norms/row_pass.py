"""A row pass: what a norm's forward or backward computes, one row at a time.

It reads matrices (N, D), whose rows are independent of each other, and vectors (D,), which all rows share. Each row
goes through these steps:

      matrices (N, D)                     vectors (D,)
    ┌─────────────────────┐             ┌─────────────┐
    │  x, or dy and x, …  │             │ scale, bias │
    └──────────┬──────────┘             └──────┬──────┘
               ├───────────────────────────────┘
               ▼
     1. statistics ──── Σ along the row ────► sums (N, 1)         as Σ x². The forward pass may save these sums,
        rescues    ──── Σ along the row ────► sums (N, 1)         and the backward pass then begins with them.
               ▼
     2. stages     ──── Σ along the row ────► sums (N, 1)         as Σ dx̂·x̂, which needs Σ x².
               ▼
     3. outputs    ─┬── element by element ─► outputs (N, D)      y or dx.
                    └── Σ over all rows ────► totals (D,)         dscale and dbias.

A stage makes terms, element by element; the runner adds them up along the row. The rescues are a second chance for a
row whose last statistic overflowed to infinity, or vanished: their terms are squares of a smaller or a larger multiple
of the row.

The mathematics of a pass is written once, for any piece of a row. A runner calls it for whole arrays (XLA),
for pieces of a row in registers (Triton, Mosaic GPU) or for chunks of many rows (TPU). A runner may save the sums of
the statistics for the backward pass, which then has one stage left.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels.tiles import split

Arrays = tuple[jax.Array, ...]
Stage = Callable[..., Arrays]  # stage(sums, *matrices, *vectors) → terms, float32 or wider
Run = Callable[..., tuple[Arrays, Arrays, Arrays]]  # run(row_pass, matrices, vectors) → outputs, totals, sums to save


@dataclasses.dataclass(frozen=True)
class RowPass:
    """What is computed of the rows of matrices, and of vectors that all rows share.

    Every function takes `(sums, *matrices, *vectors)`. `sums` are the sums along the row that were made before, in
    order; an absent vector is None.
    """

    name: str  # the kernel's name
    outputs: Callable[..., tuple[Arrays, Arrays]]  # returns the output matrices, and the terms of the totals
    output_dtypes: tuple[jax.typing.DTypeLike, ...]  # the dtypes of the output matrices
    statistics: tuple[Stage, ...] = ()  # the first stages, each of one term. Their sums can be saved.
    # Stages of one term each, for rows that need them. They are given the same sums as the last statistic, and their
    # own sums come right after that one's. In other rows nobody reads their sums.
    rescues: tuple[Stage, ...] = ()
    # Says of sums of the last statistic which need the rescues.
    needs_rescue: Callable[[jax.Array], jax.Array] | None = None
    stages: tuple[Stage, ...] = ()  # the stages after the statistics
    num_totals: int = 0  # how many totals there are. They are float32 or wider.

    @property
    def num_statistics(self) -> int:
        """How many sums can be saved."""
        return len(self.statistics) + len(self.rescues)

    @property
    def all_stages(self) -> tuple[Stage, ...]:
        """Every stage in order, for a runner that makes the rescues' sums for every row."""
        if not self.rescues:
            return (*self.statistics, *self.stages)
        return (*self.statistics[:-1], together(self.statistics[-1], *self.rescues), *self.stages)


def together(*stages: Stage) -> Stage:
    """One stage with the terms of several."""

    def stage(*arguments):
        return tuple(term for each in stages for term in each(*arguments))

    return stage


# --- what the runners of Pallas kernels share -------------------------------------------------------------------------


def statistic_sums(
    row_pass: RowPass, sum_along_row: Callable[..., Arrays], is_any: Callable[[jax.Array], jax.Array]
) -> Arrays:
    """The sums of the statistics and of the rescues. The rescues run only if a row needs them; else their sums are 0.

    `sum_along_row(stage, sums, number)` makes the sums of a stage. All sums of a pass are numbered in order, and
    `number` is the number of the stage's first sum.
    `is_any(needed)` says whether any row's is true.
    """
    if not row_pass.statistics:
        return ()
    before: Arrays = ()
    for stage in row_pass.statistics[:-1]:
        before += sum_along_row(stage, before, len(before))
    last = sum_along_row(row_pass.statistics[-1], before, len(before))
    if row_pass.needs_rescue is None:
        return before + last
    rescued = jax.lax.cond(
        is_any(row_pass.needs_rescue(last[0])),
        lambda: sum_along_row(together(*row_pass.rescues), before, len(before) + 1),
        lambda: (jnp.zeros_like(last[0]),) * len(row_pass.rescues),
    )
    return before + last + rescued


class Refs(NamedTuple):
    """A kernel's references to memory, by what is there."""

    matrices: Sequence[Any]
    known_sums: Sequence[Any]  # which an earlier pass saved
    vectors: Sequence[Any]  # those that are present
    outputs: Sequence[Any]
    saved_sums: Sequence[Any]
    totals: Sequence[Any]  # each program's or block's own share of them
    scratch: Sequence[Any]


@dataclasses.dataclass(frozen=True)
class Signature:
    """How many arrays of each kind a kernel reads and writes, in the order of `Refs`."""

    num_matrices: int
    num_known_sums: int
    has_vector: tuple[bool, ...]
    num_outputs: int
    num_saved_sums: int
    num_totals: int

    @classmethod
    def of(
        cls,
        row_pass: RowPass,
        matrices: Sequence[jax.Array],
        vectors: Sequence[jax.Array | None],
        known_sums: Arrays,
        *,
        saves_sums: bool,
    ) -> "Signature":
        """The signature of a pass over these arrays. Sums that are known already are not saved again."""
        return cls(
            num_matrices=len(matrices),
            num_known_sums=len(known_sums),
            has_vector=tuple(x is not None for x in vectors),
            num_outputs=len(row_pass.output_dtypes),
            num_saved_sums=row_pass.num_statistics if saves_sums and not known_sums else 0,
            num_totals=row_pass.num_totals,
        )

    def refs(self, refs: Sequence[Any]) -> Refs:
        """A kernel's references, sorted."""
        operands = self.num_matrices, self.num_known_sums, sum(self.has_vector)
        return Refs(*split(refs, (*operands, self.num_outputs, self.num_saved_sums, self.num_totals)))

    def results(self, results: Sequence[jax.Array]) -> Sequence[Sequence[jax.Array]]:
        """A kernel's results, sorted: outputs, saved sums, and every program's share of the totals."""
        return split(results, (self.num_outputs, self.num_saved_sums))
