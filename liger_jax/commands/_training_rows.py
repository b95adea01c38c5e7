"""A run's rows from its documents: what `liger-jax finetune` trains on, and what `liger-jax data` shows."""

import dataclasses
from collections.abc import Sequence

from liger_jax.commands._data import Document
from liger_jax.commands._errors import UserError, user_errors
from liger_jax.commands._settings import Settings
from liger_jax.commands._tokenizer import Piece, Tokenizer
from liger_jax.models.hugging_face.source import Source
from liger_jax.planner.architectures import Architecture
from liger_jax.training import pack, pad, share_of_padding
from liger_jax.training.rows import Rows, hold_out, num_rows


@dataclasses.dataclass(frozen=True)
class TrainingRows:
    """The data of a run.

    Attributes:
        train: the pieces to train on.
        held_out: the pieces that are held out.
        rows: the rows of the former.
        held_out_rows: the rows of the latter; `None` if there are none.
        summary: how many there are, in words.
    """

    train: Sequence[Piece]
    held_out: Sequence[Piece]
    rows: Rows
    held_out_rows: Rows | None
    summary: str


def tokenizer(source: Source, model: Architecture) -> Tokenizer:
    """Reads a checkpoint's tokenizer.

    Args:
        source: the checkpoint.
        model: its architecture.

    Returns:
        The tokenizer.

    Raises:
        UserError: one of its files is missing or damaged.
    """
    with user_errors():
        stops = source.stops
    return Tokenizer(source, model.config.vocab_size, stops)


def lay(settings: Settings, pieces: Sequence[Piece], documents: Sequence[Document]) -> TrainingRows:
    """Lays the pieces of documents into rows.

    Args:
        settings: the run.
        pieces: what the tokenizer makes of the documents.
        documents: all of them, also those of which no piece is left.

    Returns:
        The rows to train on, and those that are held out.

    Raises:
        UserError: nothing is left to train on.
    """
    if settings.eval_share and len(pieces) < 2:
        raise UserError("The data is one piece, so that nothing can be held out. Pass more of it, or --eval-share 0.")
    train, held_out = hold_out(pieces, settings.eval_share, settings.seed)
    rows = lambda some: rows_of(some, settings)
    found, tokens = rows(train), sum(len(piece.tokens) for piece in train)
    padding = share_of_padding(found) if settings.pack else 1 - tokens / found["input_ids"].size
    hint = "" if settings.pack or padding < 0.2 else ", which --pack avoids"
    count = lambda number, what: f"{number:,} {what}{'' if number == 1 else 's'}"
    read = f"{count(len(documents), 'document')} in {count(len(pieces), 'piece')}"
    trained = f"{count(len(train), 'piece')} with {tokens:,} tokens in {count(num_rows(found), 'row')} to train on"
    kept = f"{count(len(held_out), 'piece')} held out"
    summary = f"data: {read}; {trained}, {padding:.1%} of them padding{hint}; {kept}"
    return TrainingRows(
        train, held_out, found, rows(held_out) if held_out else None, summary + _unused(pieces, documents)
    )


def rows_of(pieces: Sequence[Piece], settings: Settings) -> Rows:
    """The rows of pieces, none of which is longer than a row: packed, or one for each.

    Args:
        pieces: of the data.
        settings: the run.

    Returns:
        The model's arguments.
    """
    lay = pack if settings.pack else pad
    return lay([piece.tokens for piece in pieces], settings.length, labels=[piece.labels for piece in pieces])


def _unused(pieces: Sequence[Piece], documents: Sequence[Document]) -> str:
    """A line on the documents of which nothing is trained on, such as a conversation that is cut before its answer."""
    used = {id(piece.document) for piece in pieces}
    unused = [document.where for document in documents if id(document) not in used]
    if not unused:
        return ""
    have = "1 document has" if len(unused) == 1 else f"{len(unused):,} documents have"
    return f"\n{have} no token to train on, and no row: {', '.join(unused[:3])}{', …' if len(unused) > 3 else ''}"
