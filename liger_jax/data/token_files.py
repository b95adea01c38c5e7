"""Files of tokens: flat arrays, to which pieces of documents are added one after the other."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from liger_jax.data import files, reading
from liger_jax.data.documents import Document, Fingerprint
from liger_jax.data.pieces import NO_TEXT, NO_TOKEN, Piece
from liger_jax.ops.labels import IGNORE_INDEX

ARRAYS = {  # by name
    "tokens": np.int32,  # the tokens of all pieces
    "scored": np.bool_,  # whether each token is trained on
    "ends": np.int64,  # the end of each piece in `tokens`
    "begins": np.int64,  # the index of each piece's first token in its document
    "document": np.int64,  # number of each piece's document
    "totals": np.int64,  # number of tokens of each document before it was cut off
    "title_ends": np.int64,  # the end of each document's title in `titles`
    "labels": np.int8,  # for each piece: 1 for a good answer, 0 for a bad one, -1 without a label
    "titles": np.uint8,  # what is shown of documents, in UTF-8
}
_BATCH = 1024  # documents that are encoded at once
_BATCH_CHARACTERS = 2**20
_MOST_HELD = 1024  # pieces that are written at once


class Writer:
    """Files of tokens, to which pieces are added. A context, which closes them."""

    def __init__(self, folder: Path):
        self._stack = contextlib.ExitStack()
        self._held: dict[str, list[Any]] = {name: [] for name in ARRAYS}  # what follows in each file
        self._files = {name: self._stack.enter_context((folder / name).open("wb")) for name in ARRAYS}
        self._digests = {name: hashlib.sha256() for name in ARRAYS}
        self._trained_on = hashlib.sha256()  # `scored`, with an answer's label at its first token, which no loss reads
        self._fingerprint, self._unread, self._pieces = Fingerprint(), frozenset(), [0]
        self._documents = self._titles = self._tokens = self._count = 0
        self._unused: dict[str, int] = {}  # by the reason why such documents have no token to train on
        self._first_unused: dict[str, list[str]] = {}

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def add(
        self, documents: Sequence[Document], pieces: Iterable[Piece], refused: reading.Refused, why: dict[str, str]
    ) -> None:
        """Adds documents and their pieces; `why` has the reasons of documents without a piece, by their places."""
        used: dict[int, int] = {}  # numbers of documents
        total = 0
        for piece in pieces:
            if not piece.begin or id(piece.document) not in used:  # each answer of a pair has a title and a total
                self._end_document(total)
                used[id(piece.document)], total = self._documents, 0
                self._begin_document(piece.document)
            end = piece.begin + len(piece.tokens)
            total = max(total, piece.total, end)
            self._tokens += len(piece.tokens)
            scored = piece.labels != IGNORE_INDEX
            self._hold(tokens=piece.tokens, scored=scored, ends=self._tokens, begins=piece.begin)
            self._hold(document=used[id(piece.document)], labels=-1 if piece.is_good is None else piece.is_good)
            first = scored[:1] if piece.is_good is None else np.array([piece.is_good])
            self._trained_on.update(np.concatenate([first, scored[1:]]).tobytes())
            self._pieces[-1] += 1
            if len(self._held["tokens"]) == _MOST_HELD:
                self._write()
        self._end_document(total)
        self._write()
        for document in documents:
            if refused and document.where in refused:
                continue
            self._count += 1
            self._unread |= document.unread
            self._fingerprint.add(document)
            if document.path is not None:
                with files.opened(document.path) as file:
                    for text in iter(lambda: file.read(_BATCH_CHARACTERS), ""):
                        self._fingerprint.add_text(text)
            if id(document) not in used:
                self.leave_out(document, why.pop(document.where, NO_TOKEN))

    def leave_out(self, document: Document, what: str = NO_TEXT) -> None:
        """Notes a document without a piece, and why it has none."""
        self._unused[what] = self._unused.get(what, 0) + 1
        first = self._first_unused.setdefault(what, [])
        first += [document.where][: 3 - len(first)]

    def end_source(self) -> None:
        """Ends the pieces of one source that `--data` names."""
        self._pieces.append(0)

    def meta(self) -> dict[str, Any]:
        """The fields of `meta.json`."""
        return {
            "digests": {name: digest.hexdigest() for name, digest in self._digests.items()},
            "trained_on": self._trained_on.hexdigest(),
            "documents": str(self._fingerprint),
            "count": self._count,
            "unused": self._unused,
            "first_unused": self._first_unused,
            "unread": sorted(self._unread),
            "pieces": self._pieces[:-1],
        }

    def _begin_document(self, document: Document | None) -> None:
        where, messages = ("", None) if document is None else (document.where, document.messages)
        roles = None if messages is None else [message["role"] for message in messages]
        title = json.dumps([where, roles, document is not None and document.prompt is not None]).encode()
        self._titles += len(title)
        self._documents += 1
        self._hold(titles=np.frombuffer(title, np.uint8), title_ends=self._titles)

    def _end_document(self, total: int) -> None:
        if total:
            self._hold(totals=total)

    def _hold(self, **values: Any) -> None:
        for name, value in values.items():
            self._held[name].append(value)

    def _write(self) -> None:
        """Writes what is held: numbers, or arrays one after the other."""
        for name, held in self._held.items():
            if held:
                values = np.concatenate(held) if isinstance(held[0], np.ndarray) else held
                data = np.asarray(values, ARRAYS[name]).tobytes()
                self._digests[name].update(data)
                self._files[name].write(data)
                held.clear()


def batches(documents: Iterable[Document], leave_out: Callable[[Document], None]) -> Iterator[list[Document]]:
    """Documents that are not empty, as many at a time as are encoded at once. `leave_out` is given each other one."""
    batch, characters = [], 0
    for document in documents:
        if document.is_empty:
            leave_out(document)
            continue
        batch.append(document)
        characters += len(document.text) + len(str(document.messages or ""))
        if len(batch) == _BATCH or characters > _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
