"""Sizes of rows: a run's documents are laid into rows of a few static sizes, with little padding.

Each size is a program. The sizes are those with the least cost of the run, the compilations included.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

GRANULE = 128  # lengths are multiples of it
MOST = 4  # sizes of a run
_LEVELS = 256  # the most different lengths that are considered


@dataclasses.dataclass(frozen=True, order=True)
class Size:
    """The shape of a step's batch."""

    length: int  # places in a row
    rows: int  # in a micro-batch
    micro_batches: int = 1

    @property
    def num_rows(self) -> int:
        """The rows of all micro-batches."""
        return self.rows * self.micro_batches

    @property
    def places(self) -> int:
        """The places of all rows."""
        return self.num_rows * self.length

    def __str__(self) -> str:
        """
        >>> str(Size(1408, 1)), str(Size(2048, 2, 4))
        ('1 × 1,408', '4 · 2 × 2,048')
        """
        return f"{'' if self.micro_batches == 1 else f'{self.micro_batches} · '}{self.rows} × {self.length:,}"


def of_a_program() -> float:
    """How many places one more size must save a run, for its compilation.

    A GPU could compute more in the time of a compilation, but compiled programs are cached for later starts.
    """
    return 2.0**13 if jax.default_backend() == "cpu" else 2.0**15


def balanced(sizes: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Lays documents in so many rows, the largest first, each in the row with the fewest tokens.

    Args:
        sizes: (…, documents), tokens of each, 0 where a step has fewer documents.
        rows: R. Where there are as many rows as documents, each document has its own, in their order.

    Returns:
        The row of each document, (…, documents), and the tokens of each row, (…, R).

    Example:
        >>> row_of, tokens = balanced(np.array([3, 5, 4, 2]), 2)
        >>> row_of.tolist(), tokens.tolist()
        ([1, 0, 1, 0], [7, 7])

    References:
        Longest processing time first: Graham, "Bounds on Multiprocessing Timing Anomalies", 1969.
    """
    number = sizes.shape[-1]
    if rows >= number:
        tokens = np.concatenate([sizes, np.zeros((*sizes.shape[:-1], rows - number), sizes.dtype)], axis=-1)
        return np.broadcast_to(np.arange(number), sizes.shape), tokens
    flat = sizes.reshape(-1, number)
    tokens, row_of, every = np.zeros((len(flat), rows), np.int64), np.zeros(flat.shape, np.int64), np.arange(len(flat))
    most = int(np.count_nonzero(flat, axis=1).max(initial=0))  # the empty ones come last, and change nothing
    for document in np.argsort(-flat, axis=1, kind="stable").T[:most]:
        row = tokens.argmin(axis=1)
        row_of[every, document] = row
        tokens[every, row] += flat[every, document]
    return row_of.reshape(sizes.shape), tokens.reshape(*sizes.shape[:-1], rows)


def levels(needs: np.ndarray, costs: np.ndarray, program: float, most: int = MOST) -> list[int]:
    """Chooses sizes for steps of which each takes the least that it fits into, by dynamic programming.

    Args:
        needs: (steps,), what each step needs at least, integers.
        costs: (max(needs) + 1,), what a step of each size costs; none is less than that of a smaller size.
        program: what each size costs.
        most: the most sizes.

    Returns:
        The sizes in their order. Their steps and programs together cost as little as `most` sizes can; where there are
        more than 256 different needs, as little as 256 of them can.

    Example:
        >>> levels(np.array([1, 1, 1, 7, 8]), np.arange(9), program=2.0)
        [1, 8]
    """
    values, counts = np.unique(needs, return_counts=True)
    if len(values) > _LEVELS:
        kept = np.linspace(0, len(values) - 1, _LEVELS).round().astype(int)
        starts = np.concatenate([[0], kept[:-1] + 1])
        values, counts = values[kept], np.add.reduceat(counts, starts)
    before, of_value, number = np.concatenate([[0], np.cumsum(counts)]), costs[values], len(values)
    # total[j]: the least cost of all steps below value j; choice: the value where the steps of the last size begin.
    total, best, sizes = np.array([0.0, *[np.inf] * number]), np.inf, [int(values[-1])]
    choices: list[np.ndarray] = []
    for count in range(1, most + 1):
        each = total[None, :-1] + (before[1:, None] - before[None, :-1]) * of_value[:, None]
        each = np.where(np.arange(number)[None] <= np.arange(number)[:, None], each, np.inf)
        choices.append(each.argmin(axis=1))
        total = np.concatenate([[np.inf], each.min(axis=1)])
        if (cost := total[-1] + count * program) >= best:
            continue
        best, end, sizes = cost, number, []
        for choice in reversed(choices):
            if end:
                sizes.append(int(values[end - 1]))
                end = int(choice[end - 1])
    return sorted(sizes)


def cost(needs: np.ndarray, costs: np.ndarray, program: float, chosen: Sequence[int]) -> float:
    """The cost of steps that take these sizes.

    >>> cost(np.array([1, 1, 1, 7, 8]), np.arange(9), 2.0, [1, 8])
    23.0
    """
    return float(np.sum(costs[np.asarray(chosen)[np.searchsorted(chosen, needs)]]) + len(chosen) * program)
