"""Rows of equal length to train on and to hold out, and the batches that are made of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from liger_jax.commands._errors import UserError
from liger_jax.commands._tokenizer import Piece
from liger_jax.ops.labels import IGNORE_INDEX
from liger_jax.packing import pack

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


def batches(rows: Rows, batch: int, seed: int) -> Callable[[int], Rows]:
    """The training data by the step's number, whatever ran before.

    Args:
        rows: of `rows`.
        batch: rows in a step.
        seed: seed of the rows' order, which is new in each epoch.

    Returns:
        A function of the step, from 0.
    """
    number = count(rows)

    def batch_of(step: int) -> Rows:
        places = np.arange(step * batch, (step + 1) * batch)
        epochs = range(places[0] // number, places[-1] // number + 1)
        order = np.concatenate([np.random.default_rng([seed, epoch]).permutation(number) for epoch in epochs])
        chosen = order[places - epochs[0] * number]
        return {name: values[chosen] for name, values in rows.items()}

    return batch_of


def parts(rows: Rows, size: int) -> Iterator[Rows]:
    """Cuts rows into equal parts. The last part is filled up with rows that are not scored.

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
