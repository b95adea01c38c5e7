"""Prints rows: their text with the scored tokens marked, the source of each piece, and the rows to be refused."""

import dataclasses
import os
import re
import sys
import tempfile
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from liger_jax.data import training_rows
from liger_jax.data.tokenizer import Piece, Tokenizer
from liger_jax.losses import shifted_labels
from liger_jax.models.hugging_face import source
from liger_jax.ops.labels import IGNORE_INDEX
from liger_jax.planner.architectures import architecture_of
from liger_jax.trainers import long_rows, pairs
from liger_jax.trainers.dpo_options import PairOptions
from liger_jax.trainers.errors import training_errors
from liger_jax.trainers.options import Settings
from liger_jax.training.rows import Rows
from liger_jax.user_errors import UserError, counted, in_one_line, of_option, user_errors

_GREEN, _PLAIN = "\033[32m", "\033[0m"
_NEW_LINE = "↵\n"  # a mark that can be scored, and the line's end
Stretch = tuple[str, bool]  # a text, and whether it is scored


@training_errors()
def show(settings: Settings, count: int, *, shorten: bool) -> None:
    """Prints the first rows as they would be trained on."""
    settings, tokenizer = _prepared(settings, shorten)
    with tempfile.TemporaryDirectory() as place:
        data, _ = _laid(settings, tokenizer, Path(place), None)
        if data is not None:
            _show_rows(data, count, tokenizer)


@training_errors()
def check(settings: Settings, *, shorten: bool) -> int:
    """Prints all errors in the data for which a run would be refused; a run stops at the first one.

    Returns the exit code: 1 if there is something, else 0.
    """
    settings, tokenizer = _prepared(settings, shorten)
    refused: dict[str, UserError] = {}
    with tempfile.TemporaryDirectory() as place:
        _, good = _laid(settings, tokenizer, Path(place), refused)
    for where in sorted(refused, key=_in_order):
        print(in_one_line(refused[where]))
    print(f"{len(refused):,} of {counted(len(refused) + good, 'document')} would be refused")
    return 1 if refused else 0


def scored_places(rows: Rows) -> np.ndarray:
    """Which tokens the loss counts: the loss's labels, which are shifted to the previous token, moved back."""
    targets = np.asarray(shifted_labels(rows["labels"], rows.get("segment_ids")))
    return np.pad(targets[:, :-1] != IGNORE_INDEX, ((0, 0), (1, 0)))


def row_lines(
    row: tuple[np.ndarray, ...], pieces: Mapping[int, Piece], tokenizer: Tokenizer, mark: Any
) -> Iterator[str]:
    """The text of a row: each piece after a line that says what it is, and the tokens that are cut off or padding."""
    tokens, scored, numbers = row
    for number in dict.fromkeys(numbers[numbers >= 0].tolist()):
        piece, here = pieces[number], numbers == number
        yield f"── {_title(piece)}"
        yield mark(stretches(tokenizer, tokens[here], scored[here]))
        if left := piece.total - piece.begin - len(piece.tokens):
            where = ", which are dropped" if _is_one(piece) else " in other pieces"
            yield f"── cut here: {left:,} more tokens{where}"
    if padding := np.count_nonzero(numbers < 0):
        yield f"── {padding:,} places of padding"


def stretches(tokenizer: Tokenizer, tokens: np.ndarray, scored: np.ndarray) -> list[Stretch]:
    """The text of tokens, in stretches that are scored or not.

    The text of a token may depend on those before it, as spaces do, and a character may have several tokens. So the
    text of a stretch is what its tokens add to the text of all tokens before it.
    """
    text, stretches, begin = tokenizer.text(tokens.tolist()), [], 0
    changes = np.flatnonzero(np.diff(scored)) + 1
    for end_token, is_scored in zip([*changes.tolist(), len(tokens)], scored[[0, *changes]].tolist(), strict=True):
        until = text if end_token == len(tokens) else tokenizer.text(tokens[:end_token].tolist())
        end = max(begin, len(os.path.commonprefix([text, until])))
        stretches.append((text[begin:end], is_scored))
        begin = end
    return stretches


def coloured(some: Sequence[Stretch]) -> str:
    """The text with its scored stretches in green.

    Returns lines with a terminal's escape sequences, which begin and end in each line.
    """
    green = lambda line: f"{_GREEN}{line}{_PLAIN}" if line else ""
    text = ""
    for stretch, is_scored in some:
        lines = _visible(stretch).split("\n")
        text += "\n".join(map(green, lines) if is_scored else lines)
    return text.removesuffix("\n")


def underlined(some: Sequence[Stretch]) -> str:
    """The text with a line of `~` under its scored stretches."""
    lines, line, under = [], "", ""
    for text, is_scored in some:
        for character in _visible(text):
            if character == "\n":
                lines += [line, under.rstrip()]
                line = under = ""
                continue
            line += character
            under += "\t" if character == "\t" else ("~" if is_scored else " ") * _width(character)
    return "\n".join(each for each in [*lines, line, under.rstrip()] if each)


def _prepared(settings: Settings, shorten: bool) -> tuple[Settings, Tokenizer]:
    if (reconfigure := getattr(sys.stdout, "reconfigure", None)) is not None:
        reconfigure(errors="replace")  # a text may have characters that the terminal's encoding lacks
    with user_errors():
        with of_option("--model"):
            checkpoint = source.find(settings.placement.model, weights=False)
        model = architecture_of(checkpoint)
    kind = pairs.of_run(settings).tokenizer if isinstance(settings.method, PairOptions) else Tokenizer
    if shorten:
        rows, line = long_rows.within(settings.rows, model)
        settings = dataclasses.replace(settings, rows=rows)
        if line:
            print(line)
    config = long_rows.stretched_for(settings.rows, model).config
    return settings, training_rows.tokenizer(checkpoint, config.vocab_size, kind)


def _laid(
    settings: Settings, tokenizer: Tokenizer, place: Path, refused: dict[str, UserError] | None
) -> tuple[training_rows.TrainingRows | None, int]:
    """The rows as a run lays them, `None` if all are refused, and the number of documents. Prints a summary."""
    train, scored = None, None
    for flag, sources in training_rows.sources_of(settings.rows).items():
        tokens = training_rows.tokens_of(settings.rows, tokenizer, place, sources, flag, refused, is_kept=False)
        train, scored = (tokens, None) if train is None else (train, tokens)
    number = sum(each.meta["count"] for each in (train, scored) if each is not None)
    if not train:
        return None, number
    if len(train) == train.together and settings.rows.share_held_out:
        settings = settings.changed(eval_share=0.0)
        command = settings.method.command
        print(f"The data is one {train.kind}, so that nothing can be held out. {command} needs --eval-share 0.")
    data = training_rows.lay(settings.rows, settings.recipe.seed, train, scored)
    print(data.summary, f"scored: {train.num_scored(data.rows.pieces):,} of the tokens to train on", sep="\n")
    return data, number


def _show_rows(data: training_rows.TrainingRows, count: int, tokenizer: Tokenizer) -> None:
    mark, how = (coloured, "green") if _has_colours() else (underlined, "underlined")
    print(f"\nThe scored tokens are {how}; {_NEW_LINE[0]} is the end of a line.")
    for kind, rows in (("row", data.rows), ("held-out row", data.held_out_rows)):
        if rows is None or count <= 0:
            break
        for i in range(min(count, rows.num_rows)):
            one = {name: column[i : i + 1] for name, column in rows.items()}
            row = one["input_ids"][0], scored_places(one)[0], rows["pieces"][i]
            if not rows.packed:  # nothing is computed after its tokens
                row = row[0][: rows.sizes[i]], row[1][: rows.sizes[i]], row[2][: rows.sizes[i]]
            pieces = {}
            for number in {*row[2].tolist()} - {-1}:
                place = int(rows.pieces[number])
                piece = rows.tokens.piece(place)
                pieces[number] = _with_side(piece, tokenizer.side(piece, place))
            title = f"\n{kind} {i + 1:,} of {rows.num_rows:,}: {_counts(row)}"
            print(title, *row_lines(row, pieces, tokenizer, mark), sep="\n")
        count -= rows.num_rows


def _has_colours() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _title(piece: Piece) -> str:
    document = piece.document
    if document is None:
        return ""
    if document.messages is not None:
        return f"{document.where}: {', '.join(message['role'] for message in document.messages)}"
    end = piece.begin + len(piece.tokens)
    if _is_one(piece) or piece.total == end - piece.begin:
        return document.where
    return f"{document.where}, tokens {piece.begin + 1:,} to {end:,} of {piece.total:,}"


def _is_one(piece: Piece) -> bool:
    """Whether the tokens of a document that do not fit into a row are dropped."""
    return piece.document is not None and (piece.document.messages is not None or piece.document.prompt is not None)


def _with_side(piece: Piece, side: str) -> Piece:
    """The piece, with its name within its group, such as "chosen", in the title."""
    if piece.document is None or not side:
        return piece
    document = dataclasses.replace(piece.document, where=f"{piece.document.where}, {side}")
    return dataclasses.replace(piece, document=document)


def _counts(row: tuple[np.ndarray, ...]) -> str:
    _, scored, numbers = row
    return f"{counted(int(np.count_nonzero(numbers >= 0)), 'token')}, {np.count_nonzero(scored):,} of them scored"


def _in_order(where: str) -> list[Any]:
    """Sorts line 10 after line 9."""
    return [int(each) if i % 2 else each for i, each in enumerate(re.split(r"(\d+)", where))]


def _visible(text: str) -> str:
    """The text with printable symbols in place of control characters, which a terminal would execute."""
    signs = {code: chr(0x2400 + code) for code in range(32)} | {127: "␡"} | {code: "�" for code in range(128, 160)}
    return text.translate(signs | {ord("\n"): _NEW_LINE, ord("\t"): "\t"})


def _width(character: str) -> int:
    """The number of columns that a character takes."""
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1
