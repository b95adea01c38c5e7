"""Pairs of answers as tokens: two pieces one after the other, the chosen one first."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from liger_jax.data.documents import Document
from liger_jax.data.pairs import SIDES
from liger_jax.data.pieces import no_place
from liger_jax.data.tokenizer import Piece, Tokenizer
from liger_jax.models.core.config_fields import MOST
from liger_jax.user_errors import UserError

EMPTY = "an empty answer"  # what a document has that is left out


class PairTokenizer(Tokenizer):
    """A checkpoint's tokenizer, for documents that are pairs. Its arguments are those of `Tokenizer`."""

    together, kind = 2, "pair"
    _cut_pairs = _num_pairs = _num_doubted = 0
    _first_doubted = ""

    def encoded(
        self, documents: Sequence[Document], length: int, refused: dict[str, UserError] | None = None
    ) -> Iterator[Piece]:
        """Encodes some pairs of many. Both answers of a pair share a row.

        A pair that is longer than a row is cut at its end: first the longer answer, and then both to half a row.

        Yields two pieces for each pair. A pair is left out, and `left_out` says why, if one answer has no token to
        train on, or both are the same within the row.
        """
        sides = [side for each in documents for side in (each, each.rejected) if side is not None]
        pieces = {id(piece.document): piece for piece in super().encoded(sides, MOST, refused)}
        for document in documents:
            if document.is_doubted:
                self._first_doubted = self._first_doubted or document.where
                self._num_doubted += 1
            pair = [pieces[id(side)] for side in (document, document.rejected) if id(side) in pieces]
            if document.is_blank:
                self.left_out[document.where] = EMPTY
            elif len(pair) == 2 and _are_equal(pair):
                self.left_out[document.where] = "equal answers"
            elif len(pair) == 2:
                self._num_pairs += 1
                self._cut_pairs += sum(len(piece.tokens) for piece in pair) > length
                pair = fitted(pair, length)
                if not all(piece.is_scored for piece in pair):
                    self.left_out[document.where] = no_place(length)
                elif _are_equal(pair):
                    self.left_out[document.where] = f"answers that are equal as far as --length={length} reaches"
                else:
                    yield from pair

    def side(self, piece: Piece, number: int) -> str:
        """Which answer of its pair a piece is."""
        return SIDES[number % 2]

    def notes(self, length: int) -> list[str]:
        """What is to be said of all pairs that were encoded."""
        notes = super().notes(length)
        if self._cut_pairs:
            number = f"{self._cut_pairs:,} of {self._num_pairs:,} pairs"
            notes.append(f"{number} are cut off, as longer than --length={length}, which both answers of a pair share")
        if self._num_doubted:
            pairs = "1 pair has" if self._num_doubted == 1 else f"{self._num_doubted:,} pairs have"
            notes.append(
                f"{pairs} a score of chosen that is not above that of rejected, first {self._first_doubted}: they are "
                "trained on as they stand"
            )
        return notes


def fitted(pair: Sequence[Piece], length: int) -> list[Piece]:
    """Two pieces that share a row, cut at their ends: first the longer one, and then both to half a row."""
    sizes = [len(piece.tokens) for piece in pair]
    ends = [max(length // 2, length - other) for other in sizes[::-1]]
    cut = lambda piece, end: dataclasses.replace(piece, tokens=piece.tokens[:end], labels=piece.labels[:end])
    return [cut(piece, end) for piece, end in zip(pair, ends, strict=True)]


def _are_equal(pair: Sequence[Piece]) -> bool:
    one, other = pair
    return np.array_equal(one.tokens, other.tokens) and np.array_equal(one.labels, other.labels)
