"""Documents to train on, one after the other: from files of text or rows, and from datasets of the hub."""

import importlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from liger_jax.chat.messages import IS_TRAINED, VALUES
from liger_jax.chat.strict_json import kind_of
from liger_jax.data import file_rows, files, formats, preferences
from liger_jax.data.documents import Document as Document
from liger_jax.data.sources import DataSource, data_sources
from liger_jax.user_errors import UserError, counted, in_one_line, needed_packages, refusals_kept

Refused = dict[str, UserError] | None


def read(
    data: str | Sequence[str],
    column: str | None = None,
    subset: str | None = None,
    refused: Refused = None,
    form: str | None = None,
) -> list[Document]:
    """Reads all documents into memory. `column` is the field that is trained on, if it is named; `refused` gets errors
    of single files and lines by their place, and `None` raises the first one.
    """
    data = [data] if isinstance(data, str) else data
    sources = data_sources(data)
    files.tell([path for source in sources for path in source.paths])
    documents = [
        document
        for source in sources
        for document in documents_of(
            source, None if source.paths else dataset(source.name, subset), column, form, refused
        )
    ]
    check_named(column, [document.is_named for document in documents], refused)
    documents = with_text(documents)
    if not documents and not refused:
        raise no_text(data)
    if notice := unread(frozenset().union(*(document.unread for document in documents))):
        print(notice)
    return documents


def with_text(documents: Iterable[Document]) -> list[Document]:
    """The documents that have a text, after a line that says how many have none."""
    documents = list(documents)
    if empty := [each.where for each in documents if each.is_empty]:
        have = "1 document has" if len(empty) == 1 else f"{len(empty):,} documents have"
        print(f"data: {have} no text, and {'is' if len(empty) == 1 else 'are'} left out: {first(empty)}")
    return [each for each in documents if not each.is_empty]


def first(places: Sequence[str]) -> str:
    """The first places of several, in words."""
    return ", ".join(places[:3]) + (", …" if len(places) > 3 else "")


def documents_of(
    source: DataSource, rows: Any, column: str | None, form: str | None, refused: Refused = None
) -> Iterator[Document]:
    """The documents of one source that `--data` names, each read when it is needed."""
    if not source.paths:
        yield from rows_to_documents(rows, source.name, column, form, refused)
    for path in source.paths:
        with refusals_kept(refused, str(path)):
            yield from _of_file(path, column, form, refused)


def check_named(column: str | None, are_named: Collection[bool], refused: Refused = None) -> None:
    """Refuses a field that `--column` names and no row has. `are_named`: of the documents that were read."""
    if column is not None and {*are_named} == {False} and not refused:
        raise UserError(
            f"--column={column} is a field of no row, and a row without it is read by the names of its fields. "
            "Name one that rows have, or leave it out."
        )


def dataset(name: str, subset: str | None, **options: Any) -> Any:
    """The split "train" of a dataset of the hub."""
    with needed_packages():
        datasets = importlib.import_module("datasets")
    try:
        return datasets.load_dataset(name, subset, split="train", **options)
    except Exception as error:  # whatever the hub, the network and the dataset's files may raise
        raise UserError(
            f"--data={name} is not a file, and the dataset cannot be loaded: {in_one_line(error)}"
        ) from error


def rows_of(source: DataSource, subset: str | None) -> Any:
    """The rows of a source that is not a file: those of a program, or a dataset of the hub."""
    if source.rows is None:
        return dataset(source.name, subset)
    return _told(source.rows) if isinstance(source.rows, Iterator) else source.rows


_PATIENCE = 30  # seconds after which an iterator may be one without an end


def _told(rows: Iterator[Any]) -> Iterator[Any]:
    """The rows of an iterator, which says so where they take long: it may have no end."""
    told, patience = time.monotonic(), _PATIENCE
    for number, row in enumerate(rows, 1):
        if time.monotonic() - told > patience:
            told, patience = time.monotonic(), 2 * patience
            print(
                f"\n{counted(number, 'row')} of an iterator so far. Cut one without an end by itertools.islice, or let "
                "finetune or distill read it while they train: stream=True with steps and eval_data.",
                flush=True,
            )
        yield row


def rows_to_documents(
    rows: Any, name: str, column: str | None, form: str | None, refused: Refused = None, first: int = 1
) -> Iterator[Document]:
    """The documents of a dataset's rows; `first` is the number of the first row."""
    for number, row in enumerate(rows, first):
        where = f"{name}, row {number}"
        with refusals_kept(refused, where):
            yield _reader(form)(where, _fields(where, row), column, form)


def numbered(rows: Iterable[Any], name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a dataset, each with its place. A program may change its own afterwards."""
    for number, row in enumerate(rows, 1):
        where = f"{name}, row {number}"
        yield where, _fields(where, row)


def _fields(where: str, row: Any) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        cure = " Pass {'text': …} for it." if isinstance(row, str) else ""
        raise UserError(f"{where}, holds {kind_of(row)}, and must hold an object, with text or messages.{cure}")
    return {key: _plain(x) for key, x in row.items()}


def _plain(value: Any, levels: int = formats.MOST_LEVELS + 1) -> Any:
    """A copy of a value in which arrays and tensors are lists and numbers, as a file would have them."""
    value = value.tolist() if hasattr(value, "tolist") and hasattr(value, "dtype") else value
    if levels and isinstance(value, dict):
        return {key: _plain(each, levels - 1) for key, each in value.items()}
    if levels and isinstance(value, list):
        return [_plain(each, levels - 1) for each in value]
    return value


def no_text(data: Sequence[str], flag: str = "--data", rows: Any = None) -> UserError:
    """The error for data without a text. `rows`: those of a program."""
    cure = " It gives its rows once: make it anew for each run, or pass a list." if isinstance(rows, Iterator) else ""
    return UserError(f"{flag}={' '.join(data)} has no text.{cure}")


def unread(fields: frozenset[str]) -> str:
    """A notice of fields that seem to choose what is trained on, but are not read; "" for none."""
    if not fields:
        return ""
    return (
        f"data: {', '.join(sorted(fields))}: not read. {', '.join(IS_TRAINED)} of the assistant's messages say what is "
        f"trained on; tools and {VALUES} beside the messages go to the chat template"
    )


def _of_file(path: Path, column: str | None, form: str | None, refused: Refused) -> Iterator[Document]:
    for row in file_rows.of_file(path):
        if isinstance(row, Document):
            if form in _READERS:
                raise UserError(f"{path} is a text, and {_READERS[form][1]}, as in JSON lines.")
            yield row
            continue
        where, values = row
        with refusals_kept(refused, where):
            if isinstance(values, file_rows.Line):
                values = file_rows.of_line(where, values)
            if not isinstance(values, dict):
                raise UserError(f"{where}, holds {kind_of(values)}, and must hold an object, with text or messages.")
            yield _reader(form)(where, values, column, form)


_READERS = {  # formats of rows that are not texts, with what such rows are
    preferences.PAIRS: (preferences.pair, "pairs are rows with chosen and rejected"),
    preferences.LABELLED: (preferences.labelled, "answers are rows with completion and label"),
    preferences.LABELLED_WITH_OTHERS: (preferences.labelled, "answers are rows with completion and label"),
}


def formats_of_rows() -> tuple[str, ...]:
    """The formats of rows that a program may ask for."""
    return (*formats.FORMATS, preferences.PAIRS, preferences.LABELLED)


def _reader(form: str | None) -> Callable[..., Document]:
    return _READERS[form][0] if form in _READERS else formats.document
