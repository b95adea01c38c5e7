"""Documents to train on: text files, JSON lines of text or conversations, and datasets of the hub."""

import dataclasses
import hashlib
import importlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from liger_jax.commands import _files, _formats, _messages
from liger_jax.commands._errors import UserError, needed_packages, refusals_kept
from liger_jax.commands._messages import IS_TRAINED, VALUES

MOST_LEVELS = 100  # of lists and objects in one another; what reads them later calls itself at each


@dataclasses.dataclass(frozen=True)
class Document:
    """A text or a conversation.

    Attributes:
        where: where it was found, in words.
        text: the text; empty for a conversation.
        messages: the conversation's, or `None` for a text.
        tools: functions that the assistant may call, for the chat template.
        values: more variables of the chat template.
        unread: fields that look as if they chose what is trained on, and do not.
    """

    where: str
    text: str = ""
    messages: list[dict[str, Any]] | None = None
    tools: Any = None
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    unread: frozenset[str] = frozenset()


def read(data: str, column: str, subset: str | None, refused: dict[str, UserError] | None = None) -> list[Document]:
    """Reads the documents.

    Args:
        data: a file, a glob or a dataset's id. The first two come first.
        column: the field that holds the text, where there are no `messages`.
        subset: the dataset's configuration.
        refused: where errors of single files and lines go, by where they are; `None` to raise the first.

    Returns:
        The documents that are not empty.

    Raises:
        UserError: nothing is found, or something found is no document.
    """
    if not _files.found(data) and _may_be_id(data):
        documents = list(_of_dataset(data, column, subset, refused))
    else:
        documents, texts = [], _files.read_texts(data, refused)
        for path, text in texts.items():
            with refusals_kept(refused, str(path)):
                documents += _of_file(path, text, column, refused)
        _formats.tell(texts)
    documents = [document for document in documents if document.messages is not None or document.text.strip()]
    if not documents and not refused:
        raise UserError(f"--data={data} has no text.")
    if unread := sorted(set().union(*(document.unread for document in documents))):
        print(
            f"data: {', '.join(unread)}: not read. {', '.join(IS_TRAINED)} of the assistant's messages say what is "
            f"trained on; tools and {VALUES} beside the messages go to the chat template"
        )
    return documents


def fingerprint(documents: Sequence[Document]) -> str:
    """A text by which these documents can be told from others.

    Args:
        documents: the data of a run.

    Returns:
        Their number and a hash, in words.
    """
    content = [(document.text, document.messages, document.tools, document.values) for document in documents]
    digest = hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()
    return f"{len(documents)} documents {digest[:12]}"


def _of_file(path: Path, text: str, column: str, refused: dict[str, UserError] | None) -> Iterator[Document]:
    if not text.strip():
        raise UserError(f"{path} is empty.")
    if (found := _formats.values(path, text)) is not None:
        for where, values in found:
            with refusals_kept(refused, where):
                yield _row(where, values, column)
        return
    if _formats.suffix(path) not in _formats.JSON_LINES:
        yield Document(str(path), text)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{path}, line {number}"
            with refusals_kept(refused, where):
                yield _of_line(where, line, column)


def _of_line(where: str, line: str, column: str) -> Document:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}, {_formats.why_no_json(error)}. Each line must be an object of its own.") from error
    return _row(where, values, column)


def _of_dataset(name: str, column: str, subset: str | None, refused: dict[str, UserError] | None) -> Iterator[Document]:
    with needed_packages():
        datasets = importlib.import_module("datasets")
    try:
        rows = datasets.load_dataset(name, subset, split="train")
    except Exception as error:  # whatever the hub, the network and the dataset's files may raise
        raise UserError(f"--data={name} is no file here, and the dataset cannot be loaded: {error}") from error
    for number, row in enumerate(rows, 1):
        where = f"{name}, row {number}"
        with refusals_kept(refused, where):
            yield _document(where, dict(row), column)


def _row(where: str, values: Any, column: str) -> Document:
    if not isinstance(values, dict):
        raise UserError(f"{where}, holds a {type(values).__name__}, and must hold an object, with text or messages.")
    return _document(where, values, column)


def _document(where: str, values: dict[str, Any], column: str) -> Document:
    if _is_deeper(values, MOST_LEVELS):
        raise UserError(f"{where}: lists and objects are nested to more than {MOST_LEVELS} levels.")
    if values.get("messages") is not None:
        try:
            found = Document(
                where,
                messages=_messages.messages(values),
                tools=_messages.tools(values.get("tools")),
                values=_messages.template_values(values.get(VALUES)),
                unread=frozenset(_messages.look_alikes(values)),
            )
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
    elif isinstance(values.get(column), str):
        found = Document(where, values[column])
    else:
        raise UserError(
            f"{where}: there are no messages, and no text in {column!r}, among {sorted(values)}. Name the text's "
            "field: --column."
        )
    try:
        json.dumps([found.text, found.messages, found.tools, found.values], default=str, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can write and UTF-8 cannot
        raise UserError(f"{where}: {error.object[error.start]!r} is no character.") from error
    return found


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested to more levels than these."""
    inside = [value]
    for _ in range(levels + 1):
        inside = [each for each in inside if isinstance(each, dict | list)]
        if not inside:
            return False
        inside = [part for each in inside for part in (each.values() if isinstance(each, dict) else each)]
    return True


def _may_be_id(name: str) -> bool:
    """Whether a name may be a dataset's. If its first part is a folder here, it is a mistyped path."""
    organisation, slash, _ = name.rpartition("/")
    is_id = re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", name) is not None and not name.lower().endswith(_formats.KNOWN)
    return is_id and not (slash and os.path.isdir(organisation))
