"""Documents of any length in rows of one length: packed, so that few places stay empty, or padded. No token is lost."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from liger_jax.ops.labels import IGNORE_INDEX

_WINDOW = 1024  # rows in which a document looks for room, the latest ones: so the time grows with the documents only


def pack(
    documents: Iterable[Any], length: int, *, labels: Iterable[Any] | None = None, pad_id: int = 0
) -> Mapping[str, np.ndarray]:
    """Packs documents into rows for `model(**batch)`: each goes into the first row that has room for it.

    A document is a segment of its row: attention, positions and loss stay within it. One that is longer than a row is
    cut into segments of `length` tokens and a rest. Rows come in the order in which their first documents came.

    Args:
        documents: token ids, a sequence of integers for each document. Empty ones are passed over.
        length: tokens in a row, at least 1.
        labels: for each document as many labels, unshifted, -100 where a token is not scored; `None` for the tokens.
        pad_id: the token id at places that no document fills.

    Returns:
        The model's arguments, int32 arrays of (rows, length): `input_ids`; `labels`, which are -100 at empty places;
        `segment_ids`, which count a row's segments from 1 and are 0 at empty places; and `positions`, which count a
        segment's tokens from 0.

    Raises:
        TypeError: a document's tokens are no integers.
        ValueError: `length` is less than 1, a document is no sequence, its labels are of another length, or there is
            no token.

    Example:
        >>> batch = pack([[5, 6, 7], [8, 9], [10]], length=4)
        >>> batch["input_ids"].tolist()
        [[5, 6, 7, 10], [8, 9, 0, 0]]
        >>> batch["segment_ids"].tolist()
        [[1, 1, 1, 2], [1, 1, 0, 0]]
        >>> share_of_padding(batch)
        0.25

    References:
        First fit, which takes at most 1.7 times the fewest rows: Johnson et al., "Worst-Case Performance Bounds for
        Simple One-Dimensional Packing Algorithms", 1974.
    """
    segments = _segments("pack", documents, length, labels)
    rows, begins = _first_fit([len(tokens) for tokens, _ in segments], length)

    shape = max(rows) + 1, length
    batch = {
        "input_ids": np.full(shape, pad_id, np.int32),
        "labels": np.full(shape, IGNORE_INDEX, np.int32),
        "segment_ids": np.zeros(shape, np.int32),
        "positions": np.zeros(shape, np.int32),
    }
    counts = [0] * shape[0]
    for (tokens, targets), row, begin in zip(segments, rows, begins, strict=True):
        counts[row] += 1
        places = row, slice(begin, begin + len(tokens))
        batch["input_ids"][places] = tokens
        batch["labels"][places] = targets
        batch["segment_ids"][places] = counts[row]
        batch["positions"][places] = np.arange(len(tokens))
    return batch


def pad(
    documents: Iterable[Any], length: int, *, labels: Iterable[Any] | None = None, pad_id: int = 0
) -> Mapping[str, np.ndarray]:
    """Gives each document rows of its own for `model(**batch)`, filled up at their ends.

    A document that is longer than a row is cut into rows of `length` tokens and a rest.

    Args:
        documents: token ids, a sequence of integers for each document. Empty ones are passed over.
        length: tokens in a row, at least 1.
        labels: for each document as many labels, unshifted, -100 where a token is not scored; `None` for the tokens.
        pad_id: the token id at places that no document fills.

    Returns:
        The model's arguments, int32 arrays of (rows, length): `input_ids`, and `labels`, which are -100 at empty
        places. Attention is causal, so that no token sees the places behind it.

    Raises:
        TypeError: a document's tokens are no integers.
        ValueError: `length` is less than 1, a document is no sequence, its labels are of another length, or there is
            no token.

    Example:
        >>> batch = pad([[5, 6, 7], [8, 9]], length=4)
        >>> batch["input_ids"].tolist(), batch["labels"].tolist()
        ([[5, 6, 7, 0], [8, 9, 0, 0]], [[5, 6, 7, -100], [8, 9, -100, -100]])
    """
    segments = _segments("pad", documents, length, labels)
    shape = len(segments), length
    batch = {"input_ids": np.full(shape, pad_id, np.int32), "labels": np.full(shape, IGNORE_INDEX, np.int32)}
    for row, (tokens, targets) in enumerate(segments):
        batch["input_ids"][row, : len(tokens)] = tokens
        batch["labels"][row, : len(targets)] = targets
    return batch


def share_of_padding(batch: Mapping[str, np.ndarray]) -> float:
    """The share of a packed batch's places that hold no token.

    Args:
        batch: what `pack` returns, or some of its rows.

    Returns:
        A number in [0, 1).

    Example:
        >>> share_of_padding(pack([[1, 2, 3]], length=4))
        0.25
    """
    return float(np.mean(batch["segment_ids"] == 0))


def _segments(caller: str, documents: Any, length: int, labels: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens and labels of each document, cut where they are longer than a row."""
    if not isinstance(length, int) or length < 1:
        raise ValueError(f"{caller}: length={length!r} must be a Python int of at least 1.")
    documents = [_as_tokens(f"{caller}: documents", number, document) for number, document in enumerate(documents)]
    if labels is None:
        scored = documents
    else:
        scored = [_as_tokens(f"{caller}: labels", number, document) for number, document in enumerate(labels)]
        _check_labels(caller, documents, scored)
    segments = [
        (tokens[begin : begin + length], targets[begin : begin + length])
        for tokens, targets in zip(documents, scored, strict=True)
        for begin in range(0, len(tokens), length)
    ]
    if not segments:
        raise ValueError(f"{caller}: {len(documents)} documents have no token; pass at least one that has.")
    return segments


def _as_tokens(name: str, number: int, document: Any) -> np.ndarray:
    tokens = np.asarray(document)
    if tokens.ndim != 1:
        raise ValueError(f"{name}[{number}] has shape {tokens.shape}, but must be a sequence of token ids.")
    if tokens.size and not np.issubdtype(tokens.dtype, np.integer):
        raise TypeError(f"{name}[{number}] holds {tokens.dtype}; token ids are integers.")
    return tokens


def _check_labels(caller: str, documents: list[np.ndarray], labels: list[np.ndarray]) -> None:
    if len(labels) != len(documents):
        raise ValueError(f"{caller}: there are {len(labels)} labels and {len(documents)} documents; pass one for each.")
    for number, (tokens, targets) in enumerate(zip(documents, labels, strict=True)):
        if len(tokens) != len(targets):
            raise ValueError(
                f"{caller}: labels[{number}] has {len(targets)} entries and documents[{number}] has {len(tokens)} "
                "tokens; pass one label for each token, -100 where it is not scored."
            )


def _first_fit(sizes: list[int], length: int) -> tuple[list[int], list[int]]:
    """The row of each segment, and the place in the row at which it begins."""
    room = np.zeros(len(sizes), np.int64)  # what the opened rows have left
    opened, rows, begins = 0, [], []
    for size in sizes:
        first = max(0, opened - _WINDOW)
        fits = np.flatnonzero(room[first:opened] >= size)
        if fits.size:
            row = first + int(fits[0])
        else:
            row, opened = opened, opened + 1
            room[row] = length
        rows.append(row)
        begins.append(length - int(room[row]))
        room[row] -= size
    return rows, begins
