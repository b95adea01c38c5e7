"""The rows of a stream's steps, with little padding though its documents are not known in advance."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from liger_jax.data.laid_rows import LaidRows
from liger_jax.data.pieces import Piece
from liger_jax.data.step_rows import Laying, StepRows, cheapest
from liger_jax.data.stream import Stream
from liger_jax.ops.labels import IGNORE_INDEX
from liger_jax.training import packing, row_sizes
from liger_jax.training.row_sizes import Size
from liger_jax.training.rows import Rows, batched

_DRAWN = 256  # steps that are drawn from what is held out, to choose sizes
_ONE_SIZE = 1e12  # what a program costs where all batches are to have one size


class StreamRows:
    """The rows of a stream's steps, as in `StepRows`.

    Its documents are not known in advance: the sizes of rows are those that steps of as long documents as the held-out
    ones would have, and one more into which any documents fit.
    """

    def __init__(self, stream: Stream, held_out: LaidRows, steps: int, laying: Laying):
        self._stream, self._laying, self._kept = stream, laying, stream.packed or laying.padded
        length, self.num_segments = held_out.length, 1
        whole = Size(length, laying.at_once, laying.micro_batches)
        self.sizes = [whole]
        at_once = dataclasses.replace(laying, batch=laying.at_once, micro_batches=1, program=_ONE_SIZE)
        chosen_of = lambda i: np.arange(held_out.num_rows)[i * at_once.batch : (i + 1) * at_once.batch]
        in_order = StepRows(held_out, held_out, chosen_of, -(-held_out.num_rows // at_once.batch), at_once)
        self._scored, self._scored_size = in_order.scored(), in_order.scored_size
        self._scored_in_segments = in_order.in_segments
        if not self._kept:
            drawn = np.random.default_rng(0).choice(held_out.sizes, (_DRAWN, laying.batch))
            sizes = np.concatenate([drawn, np.full((1, laying.batch), length)])
            as_often = dataclasses.replace(laying, program=laying.program * _DRAWN / steps)
            self.sizes = cheapest(as_often, length, held_out.in_segments, sizes, np.zeros(0, np.int64)).sizes

    def size_of(self, step: int) -> Size:
        """The size of a step's rows."""
        return self._placed(step)[1]

    def _placed(self, step: int) -> tuple[np.ndarray, Size]:
        """The row of each of a step's pieces, and the size of its rows."""
        count, (*_, largest) = self._laying.micro_batches, self.sizes
        sizes = np.array([len(piece.tokens) for piece in self._stream.pieces_of(step)], np.int64)
        if self._kept:
            return np.arange(len(sizes)), largest
        rows_of, most = np.zeros(len(sizes), np.int64), 0
        for first in range(count):
            share = sizes[first::count]
            rows, tokens = row_sizes.balanced(share, largest.rows)
            if tokens.max() > largest.length:  # as many in each row, which has places for them
                rows = np.arange(len(share)) * largest.rows // len(share)
                tokens = np.bincount(rows, share)
            rows_of[first::count], most = first + count * rows, max(most, int(tokens.max()))
        return rows_of, next(size for size in self.sizes if size.length >= most)

    def rows_of(self, step: int, own: np.ndarray | None = None) -> Rows:
        """The rows of a step, which each process reads by itself."""
        if self._kept:
            return next(batched(self._stream.rows_of(step), self.sizes[0].num_rows))
        return self._laid_of(step)[0]

    def numbers_of(self, step: int) -> np.ndarray:
        """(rows, length), the number of each token's piece."""
        return self._stream.numbers_of(step) if self._kept else self._laid_of(step)[1]

    def _laid_of(self, step: int) -> tuple[Rows, np.ndarray]:
        """A step's rows, and the number of each token's piece."""
        rows_of, size = self._placed(step)
        return self._laid_in(list(zip(self._stream.pieces_of(step), rows_of.tolist(), strict=True)), size)

    def _laid_in(
        self, pieces: list[tuple[Piece, int]], size: Size, in_segments: bool | None = None
    ) -> tuple[Rows, np.ndarray]:
        if in_segments is None:
            in_segments = self._laying.in_segments or size.rows < self._laying.at_once
        shape, names = (size.num_rows, size.length), packing.columns(in_segments)
        arrays = {name: np.full(shape, IGNORE_INDEX if name == "labels" else 0, np.int32) for name in names}
        numbers, ends, segments = np.zeros(shape, np.uint32), *np.zeros((2, size.num_rows), np.int64)
        for i, (piece, row) in enumerate(pieces):
            end = ends[row] + len(piece.tokens)
            segments[row] += 1
            values: dict[str, Any] = dict(input_ids=piece.tokens, labels=piece.labels, token_mask=1)
            values |= dict(segment_ids=segments[row], positions=np.arange(len(piece.tokens)))
            for name in names:
                arrays[name][row, ends[row] : end] = values[name]
            numbers[row, ends[row] : end], ends[row] = i, end
        return arrays, numbers

    def some_of(self, step: int) -> Rows:
        """The first pieces of a step, in the size of a scored batch; rows that are held out if none fits into it."""
        if self._kept:
            return next(batched(self._stream.rows_of(step), self._scored_size.rows))
        size, fitting = self._scored_size, []
        free = np.full(size.rows, size.length)
        most = self._laying.at_once if self._scored_in_segments else size.rows
        for piece in self._stream.pieces_of(step)[:most]:
            if free[row := int(free.argmax())] >= len(piece.tokens):
                fitting.append((piece, row))
                free[row] -= len(piece.tokens)
        return self._laid_in(fitting, size, self._scored_in_segments)[0] if fitting else self._scored[0]

    def scored(self) -> Sequence[Rows]:
        """The rows that are held out, in batches of one size, each made when it is read."""
        return self._scored

    def empty(self, size: Size) -> Rows:
        """Rows of the size without a token, or those of the first step."""
        return self.rows_of(0) if self._kept else self._laid_in([], size)[0]
