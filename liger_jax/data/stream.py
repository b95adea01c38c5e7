"""Rows of a dataset that is read from the hub during the run.

Each step has the next documents of the stream, in their order, so that the number of a row and of a piece say where a
step begins. These places are stored in the run's folder, and a resumed run begins to read there.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from liger_jax.data import files, reading, sources
from liger_jax.data.options import RowOptions
from liger_jax.data.pieces import NO_TEXT, Piece, nothing_to_train_on
from liger_jax.data.tokenizer import Tokenizer
from liger_jax.training import digests, pack, pad
from liger_jax.training.packing import FirstFit
from liger_jax.training.rows import Rows
from liger_jax.user_errors import UserError, in_one_line

_AT_ONCE = 64  # rows that are encoded together
_KEPT = 2  # batches: a step's, and the previous step's, by which weights are checked
Place = tuple[int, int]  # how many rows of the stream are done, and how many pieces of the next row


class Stream:
    """The rows of each step, in any order of steps."""

    def __init__(self, options: RowOptions, batch: int, encoder: Tokenizer, folder: Path):
        self._options, self._rows_in_step, self._encoder, self._name = options, batch, encoder, options.data[0]
        self._own = options.rows.get(self._name)  # rows of a program: stored places may be of other rows
        if self._own is None and (files.found(self._name) or not sources.may_be_id(self._name)):
            raise UserError(
                f"--stream reads a dataset of the hub, and --data={self._name} is not one. Leave out --stream."
            )
        made_of = [encoder.identity(), options.data, options.subset, options.column, options.format]
        made_of += [options.length, batch, options.pack]
        key = digests.of_json(made_of)
        self._path = folder / f"stream-{key}"
        self._rows = reading.dataset(self._name, options.subset, streaming=True) if self._own is None else self._own
        is_noted = self._own is None and self._path.is_file()
        noted = np.fromfile(self._path, np.int64) if is_noted else np.zeros(0, np.int64)
        self._is_read = False
        self._places: list[Place] = [(0, 0), *zip(noted[::2].tolist(), noted[1::2].tolist(), strict=False)]
        self._done: dict[int, list[Piece]] = {}
        self._pieces: Iterator[tuple[Place, Piece]] = iter(())
        self._printed: set[str] = set()  # the notices that were printed, which each batch of documents would repeat
        self._next = -1  # the next step of `_pieces`

    @property
    def packed(self) -> bool:
        """Whether pieces fill the rows of a step together."""
        return self._options.pack

    def made_of(self) -> dict[str, str]:
        """A text that identifies rows of a program by their first step: an iterator may have been read before."""
        if self._own is None:
            return {}
        first = b"".join(each.tokens.tobytes() + each.labels.tobytes() for each in self.pieces_of(0))
        return {"stream": f"its first step has the digest {digests.of_bytes(first)[:12]}"}

    def rows_of(self, step: int) -> Rows:
        """The rows of a step, packed or padded."""
        chosen = self.pieces_of(step)
        return self._lay([each.tokens for each in chosen], [each.labels for each in chosen])

    def numbers_of(self, step: int) -> np.ndarray:
        """Which piece each token of `rows_of` belongs to."""
        return self._lay([np.full(len(each.tokens), i, np.int32) for i, each in enumerate(self.pieces_of(step))])[
            "input_ids"
        ]

    def _lay(self, tokens: list[Any], labels: list[Any] | None = None) -> Rows:
        return (pack if self._options.pack else pad)(tokens, self._options.length, labels=labels)

    def pieces_of(self, step: int) -> list[Piece]:
        """The pieces of a step, in their order."""
        while step not in self._done:
            begun = min(step, len(self._places) - 1)  # the last step before it whose begin is stored
            if self._next != begun:
                self._pieces, self._next = self._from(self._places[begun]), begun
            chosen, place = self._batch()
            self._note(begun + 1, place)
            self._done[begun], self._next = chosen, begun + 1
            for old in sorted(self._done, key=lambda each: abs(each - step))[_KEPT:]:
                del self._done[old]
        return self._done[step]

    def _batch(self) -> tuple[list[Piece], Place]:
        """The next pieces, as many as have room in a step's rows, and the place after them."""
        chosen: list[Piece] = []
        row_of = FirstFit(self._options.length, self._options.pack)
        for place, piece in self._pieces:
            row, _ = row_of(len(piece.tokens))
            if row == self._rows_in_step:
                self._pieces = itertools.chain([(place, piece)], self._pieces)
                return chosen, place
            chosen.append(piece)
        raise nothing_to_train_on()

    def _from(self, place: Place) -> Iterator[tuple[Place, Piece]]:
        """The pieces from a place on, each with its own. A stream that ends begins again."""
        row, skipped = place
        while True:
            is_empty = True
            for number, pieces in self._documents(row):
                for i, piece in enumerate(pieces):
                    is_empty = False
                    if number > row or i >= skipped:
                        yield (number, i), piece
            if is_empty and not row:
                raise nothing_to_train_on(f"the rows have {what}" for what in self._encoder.left_out.values())
            row, skipped = 0, 0

    def _documents(self, row: int) -> Iterator[tuple[int, list[Piece]]]:
        """The pieces of each row of the stream, with the row's number from 0."""
        options = self._options
        documents = reading.rows_to_documents(
            self._read(row), self._name, options.column, options.format, None, row + 1
        )
        while some := list(itertools.islice(documents, _AT_ONCE)):
            full = [each for each in some if not each.is_empty]
            pieces: dict[int, list[Piece]] = {}
            self._encoder.left_out.clear()
            for piece in self._encoder.encoded(full, options.length):
                pieces.setdefault(id(piece.document), []).append(piece)
            notices = self._encoder.notices()
            if len(full) < len(some):
                empty = next(each.where for each in some if each.is_empty)
                notices = {**notices, NO_TEXT: f"data: rows with {NO_TEXT} are left out, such as {empty}"}
            for about in notices.keys() - self._printed:
                print(notices[about])
            self._printed |= notices.keys()
            for document in some:
                yield row, pieces.get(id(document), [])
                row += 1

    def _read(self, row: int) -> Iterator[Any]:
        if self._own is not None:
            yield from self._read_own(row)
            return
        try:
            yield from self._rows.skip(row) if row else self._rows
        except Exception as error:  # whatever the hub and the network may raise
            raise UserError(
                f"--data={self._name} cannot be read any more: {in_one_line(error)} The same command resumes from the "
                "last checkpoint."
            ) from error

    def _read_own(self, row: int) -> Iterator[Any]:
        """The rows of a program from a number on. An iterator can be read only once."""
        if self._is_read and isinstance(self._own, Iterator):
            raise UserError(
                f"--data={self._name} is an iterator that is at its end, or was read further, and it cannot begin "
                "again. Pass fewer --steps, or rows that can be read again, such as a list."
            )
        self._is_read = True
        yield from itertools.islice(self._rows, row, None)

    def _note(self, step: int, place: Place) -> None:
        """Stores where a step begins."""
        if step < len(self._places):
            return
        self._places.append(place)
        if self._own is not None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            file.write(np.array(place, np.int64).tobytes())
