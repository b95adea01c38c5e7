"""Single answers with labels as tokens. A piece's first label, which no loss reads, says whether the answer is good."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from liger_jax.commands._document import Document
from liger_jax.commands._errors import UserError, refusals_kept
from liger_jax.commands._pair_tokenizer import EMPTY, fitted
from liger_jax.commands._pieces import no_place
from liger_jax.commands._settings import MOST
from liger_jax.commands._tokenizer import Piece, Tokenizer
from liger_jax.ops.labels import IGNORE_INDEX


class UnpairedTokenizer(Tokenizer):
    """A checkpoint's tokenizer, for documents with labels. Its arguments are those of `Tokenizer`."""

    kind = "answer"
    in_segments = True

    def encoded(
        self, documents: Sequence[Document], length: int, refused: dict[str, UserError] | None = None
    ) -> Iterator[Piece]:
        """Encodes some documents of many, and cuts them to the length of a row.

        Args:
            documents: answers with labels.
            length: the most tokens of a piece.
            refused: where errors of single documents go, by where they are; `None` to raise the first.

        Yields:
            A piece for each answer of which a token is scored.

        Raises:
            UserError: as `Tokenizer.encoded` does.
        """
        self.left_out |= {document.where: EMPTY for document in documents if document.is_blank}
        full, there = [document for document in documents if not document.is_blank], set()
        for piece in super().encoded(full, length, refused):
            there.add(id(piece.document))
            yield _marked(piece)
        if length < MOST:
            self.left_out |= {document.where: no_place(length) for document in full if id(document) not in there}

    def side(self, piece: Piece, number: int) -> str:
        """Whether a piece's answer is good."""
        return "bad" if piece.labels[0] == IGNORE_INDEX else "good"


class UnpairedWithOthers(UnpairedTokenizer):
    """The same for losses with a baseline: each answer is followed by one that another prompt got."""

    together = 2
    _before: Piece | None = None

    def encoded(
        self, documents: Sequence[Document], length: int, refused: dict[str, UserError] | None = None
    ) -> Iterator[Piece]:
        """Encodes some documents of many. An answer and the other one share a row.

        Args:
            documents: answers with labels.
            length: the most tokens of both; what is longer is cut as pairs are.
            refused: where errors of single documents go, by where they are; `None` to raise the first.

        Yields:
            Two pieces for each answer: it, and its prompt with the next document's answer, or for the last document
            with that of the first, or of the one before.

        Raises:
            UserError: as `Tokenizer.encoded` does, and that there is one answer alone.
        """
        found = list(super().encoded(documents, MOST, refused))
        for number, piece in enumerate(found):
            other = found[(number + 1) % len(found)] if len(found) > 1 else self._before
            assert piece.document is not None
            if other is None:
                with refusals_kept(refused, piece.document.where):
                    raise UserError(
                        "The baseline of --loss kto is of answers to other prompts, and the data has one answer. Pass "
                        "more of it, or --loss apo_zero_unpaired."
                    )
                continue
            pair = fitted([piece, _with_answer_of(piece, other)], length)
            if all(each.is_scored for each in pair):
                yield from pair
            else:
                self.left_out[piece.document.where] = no_place(length)
        self._before = found[-1] if found else self._before

    def side(self, piece: Piece, number: int) -> str:
        """Whether a piece's answer is good; or that it is another one's, for the baseline."""
        return super().side(piece, number) if number % 2 == 0 else "with the answer to another prompt, for the baseline"


def _marked(piece: Piece) -> Piece:
    assert piece.document is not None
    labels = piece.labels.copy()
    labels[0] = piece.tokens[0] if piece.document.desirable else IGNORE_INDEX
    return dataclasses.replace(piece, labels=labels)


def _with_answer_of(piece: Piece, other: Piece) -> Piece:
    """The prompt of one piece with the answer of another."""
    begins = [1 + int(np.argmax(each.labels[1:] != IGNORE_INDEX)) for each in (piece, other)]
    joined = (
        np.concatenate([mine[: begins[0]], its[begins[1] :]])
        for mine, its in ((piece.tokens, other.tokens), (piece.labels, other.labels))
    )
    tokens, labels = joined
    return dataclasses.replace(piece, tokens=tokens, labels=labels, total=len(tokens))
