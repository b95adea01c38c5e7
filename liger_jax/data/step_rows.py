"""The rows of each step of a run, with little padding.

A step has its pieces, or bundles of pieces that belong together, in the order in which they are drawn. Bundle i belongs
to micro-batch i mod N, and the bundles of a micro-batch are laid into rows of one of a few sizes, which are all known
before step 1.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from liger_jax.data.laid_rows import LaidRows
from liger_jax.ops.labels import IGNORE_INDEX
from liger_jax.training import packing, row_sizes
from liger_jax.training.row_sizes import Size
from liger_jax.training.rows import Rows

_SHARED = 1.02  # the cost of a place in a row of several documents, relative to one in a row of a single document
_SAMPLED = 2**12  # the most steps that are looked at to choose the number of rows
_TRIED = 12  # how many numbers of rows are tried


@dataclasses.dataclass(frozen=True, kw_only=True)
class Laying:
    """The settings by which rows are laid."""

    batch: int  # bundles in a step; with `--pack`, rows
    micro_batches: int = 1
    shards: int = 1  # devices that split the rows of a micro-batch
    padded: bool = False  # each bundle has a row of the whole length
    alone: bool = False  # each bundle has its own row
    whole_batches: bool = False  # scores depend on which bundles are in a batch, which has as many as it may
    longest: int = 2**14  # the most places in a row of several bundles, or the length of all rows if that is more
    in_segments: bool = False  # rows have segment ids, even if each has a single document
    # By how much the cost of a place grows with each place of its row, where attention computes whole rows; 0 where it
    # computes only within documents.
    growth: float = 0.0
    program: float = 2.0**15  # how many places one more size must save a run, for its compilation

    @property
    def at_once(self) -> int:
        """The bundles of a micro-batch."""
        return self.batch // self.micro_batches

    def each_of(self, number: int) -> int:
        """The bundles of a batch if so many are in as few batches as hold them, all of about equal numbers."""
        batches = max(1, -(-number // self.at_once))
        most = min(number, self.at_once) if self.whole_batches else -(-number // batches)
        return max(1, -(-most // self.shards)) * self.shards


class Laid(NamedTuple):
    """Rows, and the bundles in them."""

    rows: Rows
    numbers: np.ndarray | None  # (rows, length) uint32, the number of each token's piece; `None` if not known yet
    # For each bundle or packed row its number, its row here, and the segment and the place at which it begins there.
    places: Sequence[tuple[int, int, int, int]]


class Sizes(NamedTuple):
    """The sizes of the rows of a run."""

    sizes: list[Size]
    of_steps: np.ndarray  # (steps,), which of them each step has
    scored: Size  # of scored batches
    rows: int  # in a micro-batch that lacks no bundle


class StepRows:
    """The rows of a run's steps.

    `laid` are the rows to train on and `held_out` those that are scored: packed, or with a bundle in each row.
    `chosen_of` returns the indices of the rows in `laid` that a step has; there are `steps` steps.
    """

    def __init__(
        self,
        laid: LaidRows,
        held_out: LaidRows | None,
        chosen_of: Callable[[int], np.ndarray],
        steps: int,
        laying: Laying,
    ):
        self._laid, self._held_out, self._chosen_of, self._laying = laid, held_out, chosen_of, laying
        self._packed = laid.packed
        chosen = [chosen_of(step) for step in range(steps)]
        self.tokens = int(sum(laid.sizes[some].sum() for some in chosen))  # in all steps
        find = self._packed_sizes if self._packed else self._own_sizes
        self.sizes, self._size_of, self.scored_size, self._rows = find(chosen)
        self.in_segments = laid.in_segments or laying.in_segments or self._rows < laying.at_once
        self.places = int(sum(self.sizes[i].places * n for i, n in enumerate(np.bincount(self._size_of))))  # of all
        self._made = functools.lru_cache(2)(self._laid_of)

    def size_of(self, step: int) -> Size:
        """The size of a step's rows."""
        return self.sizes[self._size_of[step]]

    def steps_of(self, size: Size) -> int:
        """The number of steps of a size."""
        return int(np.count_nonzero(self._size_of == self.sizes.index(size)))

    @property
    def num_segments(self) -> int:
        """The largest number of pieces that a row may have."""
        if self._packed:
            return max(each.most_in_a_row for each in (self._laid, self._held_out) if each is not None)
        most = self._laying.at_once - self._rows + 1  # each row has at least one bundle, if there are enough
        return max(1, most) * self._laid.tokens.together

    def rows_of(self, step: int, own: np.ndarray | None = None) -> Rows:
        """The rows of a step. `own`: the rows that this process reads, if others read the rest; `None` for all."""
        return self._made(step, None if own is None else tuple(own.tolist())).rows

    def numbers_of(self, step: int) -> np.ndarray:
        """(rows, length) uint32, the number of each token's piece, which seeds its dropout wherever it is laid."""
        if not self._packed:
            numbers = self._made(step, None).numbers
            assert numbers is not None
            return numbers
        chosen, size = self._chosen_of(step), self.size_of(step)
        numbers = np.zeros((size.num_rows, size.length), np.uint32)
        pieces = self._laid.pieces[self._laid.made("pieces", chosen)]
        numbers[: len(chosen)] = pieces + len(self._laid.tokens) * _turns(chosen)[:, None]
        return numbers

    def some_of(self, step: int) -> Rows:
        """Some rows of a step, in the size of a scored batch."""
        chosen, rows = self._chosen_of(step), self.scored_size.rows
        some = chosen if self._packed else chosen[:: self._laying.micro_batches]
        if self._packed or rows < self._rows:
            some = some[:rows]
        return self._laid_in(self._laid, some, self.scored_size, None).rows

    def in_order(self, laid: LaidRows) -> Iterator[Laid]:
        """All bundles of some rows, in their order and a micro-batch at a time, without the columns beside them."""
        laying = dataclasses.replace(self._laying, batch=self._laying.each_of(laid.num_rows), micro_batches=1)
        chosen_of = lambda i: np.arange(laid.num_rows)[i * laying.batch : (i + 1) * laying.batch]
        steps = StepRows(laid, None, chosen_of, -(-laid.num_rows // laying.batch), laying)
        for i in range(len(steps._size_of)):
            yield steps._laid_in(laid, chosen_of(i), steps.size_of(i), None, has_beside=False)

    def scored(self) -> Sequence[Rows]:
        """The rows that are held out, in batches of one size, each made when it is read."""
        return _Scored(self, self._held_out)

    def empty(self, size: Size) -> Rows:
        """Rows of a size without a token."""
        return self._laid_in(self._laid, np.zeros(0, np.int64), size, None).rows

    def _laid_of(self, step: int, own: tuple[int, ...] | None) -> Laid:
        return self._laid_in(self._laid, self._chosen_of(step), self.size_of(step), own)

    def _laid_in(
        self, laid: LaidRows, chosen: np.ndarray, size: Size, own: tuple[int, ...] | None, has_beside: bool = True
    ) -> Laid:
        """Bundles laid into rows of a size; rows that are packed already stay as they are."""
        beside = laid.beside if has_beside else {}
        mine = np.isin(np.arange(size.num_rows), np.arange(size.num_rows) if own is None else own)
        turns = _turns(chosen)
        if self._packed:
            names = [name for name in laid if has_beside or name not in laid.beside]
            places = [(row, i, 0, 0) for i, row in enumerate(chosen.tolist())]
            return Laid(_packed(laid, names, chosen, size, mine), None, places)
        tokens, together, count = laid.tokens, laid.tokens.together, size.micro_batches
        shape, names = (size.num_rows, size.length), packing.columns(laid.in_segments or self.in_segments)
        arrays: dict[str, Any] = {name: np.zeros(shape, np.int32) for name in names}
        arrays["labels"][:] = IGNORE_INDEX
        for name, column in beside.items():  # values of segments (rows, S), or of tokens (rows, length, …)
            of_row = (self.num_segments,) if column.ndim == 2 else (size.length, *column.shape[2:])
            arrays[name] = np.zeros((size.num_rows, *of_row), column.dtype)
        numbers, segments, ends = (np.zeros(n, np.int64) for n in (shape, size.num_rows, size.num_rows))
        rows_of, places = np.zeros(len(chosen), np.int64), []
        for first in range(count):
            rows_of[first::count] = first + count * row_sizes.balanced(laid.sizes[chosen[first::count]], size.rows)[0]
        for bundle, row, turn in zip(chosen.tolist(), rows_of.tolist(), turns.tolist(), strict=True):
            if not mine[row]:
                continue
            places.append((bundle, row, int(segments[row]), int(ends[row])))
            for name, column in beside.items():
                begin, width = (segments[row], together) if column.ndim == 2 else (ends[row], laid.sizes[bundle])
                arrays[name][row, begin : begin + width] = column[bundle][:width]
            for piece in laid.pieces[bundle * together : (bundle + 1) * together].tolist():
                of_piece, labels = tokens.arrays(piece)
                end, number = ends[row] + len(of_piece), segments[row] + 1
                values: dict[str, Any] = dict(input_ids=of_piece, labels=labels, segment_ids=number, token_mask=1)
                values |= dict(positions=np.arange(len(of_piece)))
                for name in names:
                    arrays[name][row, ends[row] : end] = values[name]
                numbers[row, ends[row] : end] = piece + len(tokens) * turn
                segments[row], ends[row] = number, end
        return Laid(arrays, numbers.astype(np.uint32), places)

    # --- sizes --------------------------------------------------------------------------------------------------------

    def _packed_sizes(self, chosen: list[np.ndarray]) -> Sizes:
        """Sizes for rows that are packed over all data: fewer rows for steps that have fewer."""
        laying, numbers = self._laying, np.array([len(some) for some in chosen])
        shapes = [self._shape_of(number) for number in range(laying.batch + 1)]
        costs = np.maximum.accumulate([float(shape.places) for shape in shapes])
        levels = row_sizes.levels(numbers, costs, laying.program)
        held_out = 0 if self._held_out is None else self._held_out.num_rows
        scored = dataclasses.replace(self._shape_of(laying.each_of(held_out)), micro_batches=1)
        return Sizes([shapes[level] for level in levels], np.searchsorted(levels, numbers), scored, laying.at_once)

    def _shape_of(self, number: int) -> Size:
        """The smallest size for a number of packed rows, in no more micro-batches than they need."""
        laying = self._laying
        count = laying.micro_batches if laying.padded else max(1, -(-number // laying.at_once))
        number = laying.batch if laying.padded else number
        each = max(1, -(-number // (count * laying.shards))) * laying.shards
        return Size(self._laid.length, each, count)

    def _own_sizes(self, chosen: list[np.ndarray]) -> Sizes:
        """Sizes for bundles that each step lays by itself."""
        laying, laid = self._laying, self._laid
        if laying.padded:
            size = Size(laid.length, laying.at_once, laying.micro_batches)
            scored = Size(laid.length, laying.each_of(0 if self._held_out is None else self._held_out.num_rows))
            return Sizes([size], np.zeros(len(chosen), np.int64), scored, size.rows)
        sizes = np.zeros((len(chosen), laying.batch), np.int64)
        for of_step, some in zip(sizes, chosen, strict=True):
            of_step[: len(some)] = laid.sizes[some]
        held = np.zeros(0, np.int64) if self._held_out is None else self._held_out.sizes
        return cheapest(laying, laid.length, laid.in_segments, sizes, held)


class _Scored(Sequence[Rows]):
    """Batches of the rows that are held out."""

    def __init__(self, steps: StepRows, laid: LaidRows | None):
        self._steps, self._laid = steps, laid
        self._each = steps._laying.each_of(0 if laid is None else laid.num_rows)

    def __len__(self) -> int:
        return 0 if self._laid is None else -(-self._laid.num_rows // self._each)

    def __getitem__(self, index: Any) -> Any:
        if self._laid is None or not 0 <= index < len(self):
            raise IndexError(index)
        some = np.arange(self._laid.num_rows)[index * self._each : (index + 1) * self._each]
        return self._steps._laid_in(self._laid, some, self._steps.scored_size, None).rows


def _packed(laid: LaidRows, names: Sequence[str], chosen: np.ndarray, size: Size, mine: np.ndarray) -> Rows:
    """Packed rows unchanged, and rows without a token after them."""
    some, here = {}, mine[: len(chosen)]
    for name in names:
        empty, column = IGNORE_INDEX if name == "labels" else 0, laid[name]
        some[name] = np.full((size.num_rows, *column.shape[1:]), empty, column.dtype)
        some[name][: len(chosen)][here] = column[chosen[here]]
    return some


def _turns(chosen: np.ndarray) -> np.ndarray:
    """How often each value occurred earlier in the step.

    >>> _turns(np.array([3, 1, 3, 3, 1])).tolist()
    [0, 0, 1, 2, 1]
    """
    order = np.argsort(chosen, kind="stable")
    ordered, turns = chosen[order], np.zeros(len(chosen), np.int64)
    turns[order] = np.arange(len(chosen)) - np.searchsorted(ordered, ordered)
    return turns


def cheapest(laying: Laying, length: int, in_segments: bool, sizes: np.ndarray, held: np.ndarray) -> Sizes:
    """The sizes of rows that cost the least.

    `sizes` (steps, batch) are the tokens of each step's bundles, 0 for none, and `held` (bundles,) of those that are
    scored.
    """
    at_once, count, number = laying.at_once, laying.micro_batches, len(sizes)
    shares = sizes.reshape(number, at_once, count).swapaxes(1, 2)  # bundle i is of micro-batch i mod N
    each_scored = laying.each_of(len(held))
    held = np.pad(held, (0, -len(held) % each_scored)).reshape(-1, each_scored)
    granule = min(row_sizes.GRANULE, length)

    def needs(rows: int, steps: slice = slice(None)) -> tuple[np.ndarray, int]:
        """The lengths that steps and scored batches need, in granules."""
        some = shares[steps]
        loads = row_sizes.balanced(some.reshape(-1, at_once), rows)[1].reshape(len(some), -1).max(axis=1)
        of_scores = row_sizes.balanced(held, rows)[1].max(initial=1)
        return -(-loads // granule), int(-(-of_scores // granule))

    def costs(rows: int, most: int) -> np.ndarray:
        lengths = np.minimum(np.arange(most + 1) * granule, length if rows == at_once else at_once * length)
        shared = 1.0 if rows == at_once and not in_segments else _SHARED
        return shared * count * rows * lengths * (1 + laying.growth * lengths)

    def fits(rows: int, need: np.ndarray, of_scores: int) -> bool:
        """Whether no row is too long, and no micro-batch has more places than one of padded rows."""
        most = min(max(int(need.max()), of_scores) * granule, at_once * length)
        return rows == at_once or rows * most <= at_once * length and most <= max(laying.longest, length)

    def total(rows: int) -> float:
        need, of_scores = needs(rows, slice(0, None, -(-number // _SAMPLED)))
        if not fits(rows, need, of_scores):
            return np.inf
        each = costs(rows, max(int(need.max()), of_scores))
        return row_sizes.cost(need, each, laying.program, row_sizes.levels(need, each, laying.program))

    shards, most = laying.shards, at_once // laying.shards
    numbers = {at_once} if laying.alone else {shards * round(most ** (i / _TRIED)) for i in range(_TRIED + 1)}
    best = next(rows for rows in sorted(sorted(numbers), key=total) if fits(rows, *needs(rows)))
    need, of_scores = needs(best)
    levels = row_sizes.levels(need, costs(best, int(need.max())), laying.program)
    cap = length if best == at_once else at_once * length
    length_of = lambda level: min(int(level) * granule, cap)
    scored = Size(length_of(max(levels[-1], of_scores)), min(best, each_scored))
    found, size_of = [Size(length_of(level), best, count) for level in levels], np.searchsorted(levels, need)
    bundles = np.count_nonzero(sizes, axis=1)
    short = (bundles > 0) & (bundles < laying.batch)
    if best == at_once and short.any():  # the last steps of epochs, which lack rows
        most_bundles = int(bundles[short].max())
        fewer = min(count, most_bundles)
        rows = -(-most_bundles // (fewer * shards)) * shards
        size = Size(length_of(need[short].max()), rows, fewer)
        saved = sum(found[i].places - size.places for i in size_of[short].tolist())
        if size.num_rows < laying.batch and saved > laying.program:
            size_of[short] = len(found)
            used, size_of = np.unique(size_of, return_inverse=True)
            found = [[*found, size][i] for i in used.tolist()]
    return Sizes(found, size_of, scored, best)
