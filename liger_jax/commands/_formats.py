"""What a file of data holds, by its name: prose, JSON or a table. Nothing but prose is trained on as prose."""

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from liger_jax.commands._errors import UserError

JSON_LINES = (".jsonl", ".ndjson", ".json")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
COMPRESSED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_NOT_READ = {
    "Write its rows as JSON lines: datasets.Dataset.from_parquet(…).to_json('rows.jsonl').": ".parquet .arrow .feather",
    "Unpack it first.": ".zip .tar .tgz .tbz2 .txz .7z .rar .zst",
    "Write its text to a .txt file.": ".pdf .doc .docx .odt .rtf .epub .pptx .ipynb",
    "Save its sheet as a .csv file.": ".xls .xlsx .ods",
}
KNOWN = (*JSON_LINES, *_DELIMITERS, *COMPRESSED, *" ".join(_NOT_READ.values()).split(), ".txt", ".md")


def suffix(path: Path) -> str:
    """The end of a file's name that says what it holds: in small letters, and without that of its compression."""
    name = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return name.suffix.lower()


def why_not(path: Path) -> str | None:
    """Why a file is not read, and the cure; `None` if it is read."""
    end = suffix(path)
    cure = next((cure for cure, ends in _NOT_READ.items() if end in ends.split()), None)
    return None if cure is None else f"is a {end} file, which is not read as it is. {cure}"


def values(path: Path, text: str) -> Iterator[tuple[str, Any]] | None:
    """The rows of a table or of one JSON value over the whole file, each with where it stands.

    Args:
        path: the file.
        text: its text.

    Returns:
        The rows, each an object where the file is right; `None` for prose and for JSON lines.

    Raises:
        UserError: the name says prose, and the text is JSON; or the file cannot be read as what its name says.
    """
    end = suffix(path)
    if end in _DELIMITERS:
        return _of_table(path, text, _DELIMITERS[end])
    if end == ".json" and not _is_object(text.lstrip().partition("\n")[0]):
        return _of_json(path, text)
    if end not in JSON_LINES and (_is_object(text.lstrip().partition("\n")[0]) or _is_json(text)):
        raise UserError(
            f"{path} holds JSON, which would be trained on as prose. If its rows are meant, give it a name that ends "
            'in .jsonl or .json. If JSON itself is the text, make it the text of a JSON line: {"text": "…"}.'
        )
    return None


def why_no_json(error: Exception) -> str:
    """Why `json.loads` has failed, as a clause behind the place.

    Args:
        error: a ValueError or RecursionError that it raised.

    Returns:
        The clause.
    """
    if isinstance(error, RecursionError):
        return "is nested too deep"
    return f"is no JSON: {error}" if isinstance(error, json.JSONDecodeError) else f"cannot be read: {error}"


def tell(paths: Iterable[Path]) -> None:
    """Prints which files are read as what, if they are not all of one kind.

    Args:
        paths: the files.
    """
    kinds: dict[str, list[str]] = {}
    for path in paths:
        end = suffix(path)
        kind = "a table" if end in _DELIMITERS else "JSON" if end in JSON_LINES else "prose"
        kinds.setdefault(kind, []).append(path.name)
    if len(kinds) > 1:
        named = (
            f"as {kind} {', '.join(names[:3])}{f' and {len(names) - 3:,} more' if names[3:] else ''}"
            for kind, names in kinds.items()
        )
        print(f"data: read {'; '.join(named)}")


def _of_table(path: Path, text: str, delimiter: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The rows of a table whose first row names the columns."""
    csv.field_size_limit(2**31 - 1)  # a document may be long
    table = csv.reader(io.StringIO(text), delimiter=delimiter, strict=True)
    try:
        names = next(table)
        if len({*names}) < len(names):
            raise UserError(f"{path}, line 1: two columns have one name, among {names}. Rename one.")
        for cells in table:
            where = f"{path}, line {table.line_num}"
            if not cells:  # an empty line
                continue
            if len(cells) != len(names):
                raise UserError(
                    f"{where}: the row has {len(cells)} fields, and the first one names {len(names)} columns. Put "
                    f"fields that hold {delimiter!r} between quotation marks."
                )
            yield where, dict(zip(names, cells, strict=True))
    except csv.Error as error:
        raise UserError(f"{path}, line {table.line_num}: {error}, so that the table cannot be read.") from error


def _of_json(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """The elements of an array over the whole file, or one object over many lines."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}, line {getattr(error, 'lineno', 1)}, {why_no_json(error)}. The file must be an array of objects, "
            "or each line an object of its own."
        ) from error
    elements = found if isinstance(found, list) else [found]
    return iter([(f"{path}, element {number}", element) for number, element in enumerate(elements, 1)])


def _is_object(line: str) -> bool:
    try:
        return line[:1] == "{" and isinstance(json.loads(line), dict)
    except json.JSONDecodeError:
        return False
    except (ValueError, RecursionError):  # JSON so far, with a number or a nesting that Python does not take
        return True


def _is_json(text: str) -> bool:
    """Whether a text is one JSON object, or an array of objects."""
    try:
        found = json.loads(text) if text.lstrip()[:1] in ("{", "[") else None
    except json.JSONDecodeError:
        return False
    except (ValueError, RecursionError):
        return True
    return isinstance(found, dict) or isinstance(found, list) and bool(found) and isinstance(found[0], dict)
