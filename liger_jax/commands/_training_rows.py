"""A run's rows from its documents: what `liger-jax finetune` trains on, and what `liger-jax data` shows."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from liger_jax.commands import _rows
from liger_jax.commands._data import Document
from liger_jax.commands._errors import user_errors
from liger_jax.commands._rows import Rows
from liger_jax.commands._tokenizer import Piece, Tokenizer
from liger_jax.commands.finetune import Settings
from liger_jax.models.hugging_face import checkpoint
from liger_jax.planner.architectures import Architecture
from liger_jax.training import share_of_padding


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


def tokenizer(folder: Path, model: Architecture) -> Tokenizer:
    """Reads a checkpoint's tokenizer.

    Args:
        folder: the checkpoint's.
        model: its architecture.

    Returns:
        The tokenizer.

    Raises:
        UserError: one of its files is missing or damaged.
    """
    with user_errors():
        stops = checkpoint.kept_of(folder, checkpoint.read_config(folder), ()).stops
    return Tokenizer(folder, model.config.vocab_size, stops)


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
    train, held_out = _rows.split(pieces, settings.eval_share, settings.seed)
    rows = lambda some: _rows.rows(some, settings.length, packed=settings.pack)
    found, tokens = rows(train), sum(len(piece.tokens) for piece in train)
    padding = share_of_padding(found) if settings.pack else 1 - tokens / found["input_ids"].size
    hint = "" if settings.pack or padding < 0.2 else ", which --pack avoids"
    are_held_out = "piece is held out" if len(held_out) == 1 else "pieces are held out"
    read = "1 document" if len(documents) == 1 else f"{len(documents):,} documents"
    summary = (
        f"data: {read}; {tokens:,} tokens in {_rows.count(found):,} rows to train on, "
        f"{padding:.1%} of them padding{hint}; {len(held_out):,} {are_held_out}"
    )
    return TrainingRows(
        train, held_out, found, rows(held_out) if held_out else None, summary + _unused(pieces, documents)
    )


def _unused(pieces: Sequence[Piece], documents: Sequence[Document]) -> str:
    """A line on the documents of which nothing is trained on, such as a conversation that is cut before its answer."""
    used = {id(piece.document) for piece in pieces}
    unused = [document.where for document in documents if id(document) not in used]
    if not unused:
        return ""
    have = "1 document has" if len(unused) == 1 else f"{len(unused):,} documents have"
    return f"\n{have} no token to train on, and no row: {', '.join(unused[:3])}{', …' if len(unused) > 3 else ''}"
