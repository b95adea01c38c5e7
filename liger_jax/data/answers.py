"""Tokens of preferences: pairs of answers, the chosen one first, or single answers with labels."""

import dataclasses
import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np

from liger_jax.data.documents import Document
from liger_jax.data.pieces import no_place
from liger_jax.data.preferences import SIDES
from liger_jax.data.tokenizer import Piece, Tokenizer
from liger_jax.models.core.config_fields import MOST
from liger_jax.ops.labels import IGNORE_INDEX
from liger_jax.user_errors import UserError, refusals_kept

EMPTY = "an empty answer"  # why a document is left out


class PairTokenizer(Tokenizer):
    """A checkpoint's tokenizer, for documents that are pairs. Its arguments are those of `Tokenizer`."""

    together, kind = 2, "pair"
    _cut_pairs = _num_pairs = _num_doubted = 0
    _first_doubted = ""

    def encoded(
        self, documents: Sequence[Document], length: int, refused: dict[str, UserError] | None = None
    ) -> Iterator[Piece]:
        """Encodes some of the pairs. Both answers of a pair share a row.

        A pair that is longer than a row is cut at its end: first the longer answer, and then both to half a row.

        Yields two pieces for each pair. A pair is left out, and `left_out` says why, if one answer has no token to
        train on, or both are the same within the row.
        """
        sides = [side for each in documents for side in (each, each.rejected) if side is not None]
        return self._paired(documents, super().encoded(sides, MOST, refused), length)

    def _paired(self, documents: Sequence[Document], sides: Iterator[Piece], length: int) -> Iterator[Piece]:
        pieces = {id(piece.document): piece for piece in sides}
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
                    self.left_out[document.where] = f"answers that are equal once they are cut to --length={length}"
                else:
                    yield from pair

    def side(self, piece: Piece, number: int) -> str:
        """Which answer of its pair a piece holds."""
        return SIDES[number % 2]

    def notes(self, length: int) -> list[str]:
        """The notes about all pairs that were encoded."""
        notes = super().notes(length)
        if self._cut_pairs:
            number = f"{self._cut_pairs:,} of {self._num_pairs:,} pairs"
            notes.append(f"{number} are cut off: both answers of a pair share --length={length}, and theirs are longer")
        if self._num_doubted:
            pairs = "1 pair has" if self._num_doubted == 1 else f"{self._num_doubted:,} pairs have"
            notes.append(
                f"{pairs} a score of chosen that is not above that of rejected, first {self._first_doubted}: they are "
                "trained on as they stand"
            )
        return notes


class UnpairedTokenizer(Tokenizer):
    """A checkpoint's tokenizer, for documents with labels. Its arguments are those of `Tokenizer`."""

    kind = "answer"
    in_segments = True

    def encoded(
        self, documents: Sequence[Document], length: int, refused: dict[str, UserError] | None = None
    ) -> Iterator[Piece]:
        """Encodes some of the documents, and cuts them to the length of a row."""
        self.left_out |= {document.where: EMPTY for document in documents if document.is_blank}
        full = [document for document in documents if not document.is_blank]
        return self._labelled(full, super().encoded(full, length, refused), length)

    def _labelled(self, full: Sequence[Document], pieces: Iterator[Piece], length: int) -> Iterator[Piece]:
        there = set()
        for piece in pieces:
            there.add(id(piece.document))
            assert piece.document is not None
            yield dataclasses.replace(piece, is_good=bool(piece.document.desirable))
        if length < MOST:
            self.left_out |= {document.where: no_place(length) for document in full if id(document) not in there}

    def side(self, piece: Piece, number: int) -> str:
        """Whether a piece's answer is good."""
        return "good" if piece.is_good else "bad"


class UnpairedWithOthers(UnpairedTokenizer):
    """The same for losses with a baseline: each answer is followed by one to another prompt."""

    together = 2

    def __init__(self, *given: Any):
        super().__init__(*given)
        self._before: dict[Hashable, Piece] = {}  # answers to two prompts, for later documents that all have one prompt

    def encoded(
        self, documents: Sequence[Document], length: int, refused: dict[str, UserError] | None = None
    ) -> Iterator[Piece]:
        """Encodes some of the documents. An answer shares a row with the answer to another prompt.

        Yields two pieces for each answer: the answer itself, and its prompt with the answer to another prompt that
        `_others` chooses. Where all of these documents have one prompt, the other answer is of earlier documents.
        """
        return self._with_others(super().encoded(documents, MOST, refused), length, refused)

    def _with_others(
        self, answers: Iterator[Piece], length: int, refused: dict[str, UserError] | None
    ) -> Iterator[Piece]:
        pieces = list(answers)
        asked = [_asked(piece) for piece in pieces]
        for piece, prompt, number in zip(pieces, asked, _others(asked), strict=True):
            before = (each for other, each in self._before.items() if other != prompt)
            other = next(before, None) if number is None else pieces[number]
            assert piece.document is not None
            if other is None:
                has = "has one answer" if len(pieces) == 1 else f"begins with {len(pieces):,} answers to one prompt"
                with refusals_kept(refused, piece.document.where):
                    raise UserError(
                        f"The baseline of --loss kto needs answers to other prompts, and the data {has}. Pass answers "
                        "to several prompts in mixed order, or --loss apo_zero_unpaired."
                    )
                continue
            pair = fitted([piece, _with_answer_of(piece, other)], length)
            if all(each.is_scored for each in pair):
                yield from pair
            else:
                self.left_out[piece.document.where] = no_place(length)
        self._before = dict([*(self._before | dict(zip(asked, pieces, strict=True))).items()][-2:])

    def side(self, piece: Piece, number: int) -> str:
        """Whether a piece's answer is good, or belongs to another prompt, for the baseline."""
        return super().side(piece, number) if number % 2 == 0 else "with the answer to another prompt, for the baseline"


def fitted(pair: Sequence[Piece], length: int) -> list[Piece]:
    """Two pieces that share a row, cut at their ends: first the longer one, and then both to half a row."""
    sizes = [len(piece.tokens) for piece in pair]
    ends = [max(length // 2, length - other) for other in sizes[::-1]]
    cut = lambda piece, end: dataclasses.replace(piece, tokens=piece.tokens[:end], labels=piece.labels[:end])
    return [cut(piece, end) for piece, end in zip(pair, ends, strict=True)]


def _are_equal(pair: Sequence[Piece]) -> bool:
    one, other = pair
    return np.array_equal(one.tokens, other.tokens) and np.array_equal(one.labels, other.labels)


def _asked(piece: Piece) -> Hashable:
    """The prompt of a piece's answer."""
    document = piece.document
    if document is not None and document.messages is None:
        return document.prompt
    return piece.tokens[: _begin(piece)].tobytes()


def _others(asked: Sequence[Hashable]) -> list[int | None]:
    """The number of an answer to another prompt, for each answer.

    Neighbours often answer one prompt, first well and then badly. An answer gets that of the next prompt which has the
    same place among its neighbours: the one after it would be of its own prompt, and the next prompt's first answer
    would always be a good one.

    Returns numbers of `asked`, where after the last comes the first; `None` where all answer one prompt.

    >>> _others(["a", "a", "b", "b", "c"])
    [2, 3, 4, 4, 0]
    """
    runs = [[*run] for _, run in itertools.groupby(range(len(asked)), asked.__getitem__)]
    if len(runs) < 2:
        return [None] * len(asked)
    others = []
    for run, after in zip(runs, [*runs[1:], runs[0]], strict=True):
        if asked[after[0]] == asked[run[0]]:  # the last run of equal prompts continues in the first one
            after = runs[1]
        others += [after[i % len(after)] for i in range(len(run))]
    return others


def _begin(piece: Piece) -> int:
    """The index of the first token of a piece's answer."""
    return 1 + int(np.argmax(piece.labels[1:] != IGNORE_INDEX))


def _with_answer_of(piece: Piece, other: Piece) -> Piece:
    """The prompt of one piece with the answer of another."""
    begins = [_begin(each) for each in (piece, other)]
    joined = (
        np.concatenate([mine[: begins[0]], its[begins[1] :]])
        for mine, its in ((piece.tokens, other.tokens), (piece.labels, other.labels))
    )
    tokens, labels = joined
    return dataclasses.replace(piece, tokens=tokens, labels=labels, total=len(tokens))
