"""Rows of equal length to train on and to hold out, and the batches that are made of them."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from liger_jax.commands._errors import UserError
from liger_jax.commands._tokenizer import Piece
from liger_jax.ops.labels import IGNORE_INDEX
from liger_jax.training import pack

Rows = Mapping[str, np.ndarray]  # the model's arguments, each (rows, length)


def split(pieces: Sequence[Piece], share: float, seed: int) -> tuple[list[Piece], list[Piece]]:
    """Draws the pieces that are held out.

    Args:
        pieces: all of them.
        share: the share that is held out; at least one piece if it is not 0.
        seed: seed of the draw.

    Returns:
        The pieces to train on, and the pieces that are held out.

    Raises:
        UserError: there is only one piece, which cannot be both.
    """
    if not share:
        return list(pieces), []
    if len(pieces) < 2:
        raise UserError("The data is one piece, so that nothing can be held out. Pass more of it, or --eval-share 0.")
    count = min(max(1, round(share * len(pieces))), len(pieces) - 1)
    held_out = set(np.random.default_rng(seed).permutation(len(pieces))[:count].tolist())
    train = [piece for i, piece in enumerate(pieces) if i not in held_out]
    return train, [pieces[i] for i in sorted(held_out)]


def rows(pieces: Sequence[Piece], length: int, *, packed: bool) -> Rows:
    """Lays pieces into rows.

    Args:
        pieces: none is longer than a row.
        length: tokens in a row.
        packed: pieces share rows as segments that do not see each other; else each has a row of its own.

    Returns:
        What `pack` returns, or `input_ids` and `labels`, which are -100 at empty places.
    """
    if packed:
        return pack([piece.tokens for piece in pieces], length, labels=[piece.labels for piece in pieces])
    shape = len(pieces), length
    found = {"input_ids": np.zeros(shape, np.int32), "labels": np.full(shape, IGNORE_INDEX, np.int32)}
    for i, piece in enumerate(pieces):
        found["input_ids"][i, : len(piece.tokens)] = piece.tokens
        found["labels"][i, : len(piece.labels)] = piece.labels
    return found


def count(rows: Rows) -> int:
    """Counts rows.

    Args:
        rows: of `rows`.

    Returns:
        Their number.
    """
    return len(rows["input_ids"])


def steps(number: int, batch: int, epochs: float) -> int:
    """Counts the steps of a run.

    Args:
        number: rows to train on.
        batch: rows in a step.
        epochs: how often each row is trained on.

    Returns:
        The number of steps, at least 1. No step has rows of two epochs.

    Example:
        >>> steps(10, 8, 1.0), steps(10, 8, 2.5), steps(3, 8, 1.0)
        (2, 5, 1)
    """
    whole, rest = divmod(_row_visits(number, epochs), number)
    return whole * math.ceil(number / batch) + math.ceil(rest / batch)


def batches(rows: Rows, batch: int, seed: int, epochs: float | None = None) -> Callable[[int], Rows]:
    """The rows of each step by its number, whatever ran before.

    An epoch has each row once. Its last step has the rows that are left, which may be fewer than `batch`.

    Args:
        rows: of `rows`.
        batch: the most rows in a step.
        seed: seed of the rows' order, which is new in each epoch.
        epochs: how often each row is trained on. A fraction of an epoch is the first share of the epoch's order.
            `None` for epochs without an end.

    Returns:
        A function of the step, from 0. There are no rows in the steps after the last one, which `steps` counts.
    """
    number = count(rows)
    steps_in_epoch = math.ceil(number / batch)

    def rows_of(step: int) -> Rows:
        epoch, step_in_epoch = divmod(step, steps_in_epoch)
        order = np.random.default_rng([seed, epoch]).permutation(number)
        if epochs is not None:
            order = order[: max(0, _row_visits(number, epochs) - epoch * number)]
        chosen = order[step_in_epoch * batch : (step_in_epoch + 1) * batch]
        return {name: values[chosen] for name, values in rows.items()}

    return rows_of


def parts(rows: Rows, size: int) -> Iterator[Rows]:
    """Cuts rows into equal parts. The last part is filled up with rows that are not scored, and so weigh nothing.

    Args:
        rows: of `rows`.
        size: rows in a part.

    Returns:
        The parts in their order.
    """
    for begin in range(0, count(rows), size):
        part = {name: values[begin : begin + size] for name, values in rows.items()}
        missing = size - count(part)
        empty = {name: IGNORE_INDEX if name == "labels" else 0 for name in part}
        yield {name: np.pad(x, ((0, missing), (0, 0)), constant_values=empty[name]) for name, x in part.items()}


def fingerprint(*some: Rows) -> str:
    """A text by which these rows can be told from others.

    Args:
        some: rows to train on, and perhaps rows that are held out.

    Returns:
        The number of rows and a hash of all that they hold, in words.
    """
    digest = hashlib.sha256()
    for rows in some:
        for name, values in rows.items():
            digest.update(f"{name} {values.shape} {values.dtype}".encode())
            digest.update(np.ascontiguousarray(values))
    number = sum(map(count, some))
    return f"{number} rows, as tokenizer and chat template make them: {digest.hexdigest()[:12]}"


def _row_visits(number: int, epochs: float) -> int:
    """How many rows the steps of a run have together."""
    return max(1, round(epochs * number))
