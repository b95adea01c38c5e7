"""The rows of a file, one after the other, so that the file may be larger than the memory. Prose has no rows."""

import csv
import importlib
import io
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from liger_jax.chat import strict_json
from liger_jax.data import files
from liger_jax.data.documents import Document
from liger_jax.models.core.config_fields import MOST
from liger_jax.user_errors import UserError, in_one_line, needed_packages

MOST_AT_ONCE = 2**25  # characters of a file that are held in memory; longer files are read in chunks
_ARROW_FILE = b"ARROW1"  # begins a file of Arrow's that is no stream
_ROWS_AT_ONCE = 256  # of a columnar table
_CHUNK = 2**20
Found = tuple[str, Any]  # where a row is, and the row


def of_file(path: Path) -> Iterator[Found | Document]:
    """The rows of a file, each with where it stands; or its prose.

    A line of JSON lines is a text still: `of_line` reads it, so that the lines after a wrong one are read, too.

    Yields pairs of a place in words and a row, an object where the file is right; or one document of prose.
    """
    end = files.suffix(path)
    if (reason := files.why_not(path)) is not None:
        raise UserError(f"{path} {reason}")
    if end in files.COLUMNAR:
        yield from _of_columns(path)
        return
    with files.opened(path) as file:
        yield from _of_text(path, end, file)


def of_line(where: str, line: str) -> Any:
    """The value of a JSON line."""
    try:
        return strict_json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}, {why_no_json(error)}. Each line must be a separate object.") from error


class Line(str):
    """A line of JSON lines."""


def why_no_json(error: Exception) -> str:
    """Why `json.loads` has failed, as a clause that follows the place."""
    if isinstance(error, RecursionError):
        return "is nested too deep"
    if isinstance(error, json.JSONDecodeError):
        line = f"line {error.lineno}, " if error.lineno > 1 else ""  # of several that `json.loads` was given
        return f"is no JSON: {error.msg}: {line}column {error.colno}"
    return f"cannot be read: {error}"


def _of_text(path: Path, end: str, file: io.TextIOWrapper) -> Iterator[Found | Document]:
    head = file.read(_CHUNK)
    while head and not head.strip() and (more := file.read(_CHUNK)):
        head = more
    if not head.strip():
        raise UserError(f"{path} is empty.")
    if "\n" not in head.lstrip():
        head += file.readline(MOST_AT_ONCE)  # the first line tells JSON lines from other JSON
    files.check_text(path, head)
    first = head.lstrip().partition("\n")[0]
    if end in files.DELIMITERS:
        yield from _of_table(path, _lines(path, head, file), files.DELIMITERS[end])
    elif end in files.JSON_LINES and (end != ".json" or _is_object(first)):
        for number, line in enumerate(_lines(path, head, file), 1):
            if line.strip():
                yield f"{path}, line {number}", Line(line)
    else:
        text = head + file.read(max(0, MOST_AT_ONCE - len(head) + 1))
        files.check_text(path, text)
        if end == ".json":
            yield from _of_long_array(path, text, file) if len(text) > MOST_AT_ONCE else _of_json(path, text)
            return
        if _is_object(first) or _is_json(text, is_whole=len(text) <= MOST_AT_ONCE):
            raise UserError(
                f"{path} holds JSON, which would be trained on as plain text. If it has rows of data, give it a name "
                'that ends in .jsonl or .json. If JSON is the text to train on, write it as JSON lines: {"text": "…"}.'
            )
        yield Document(str(path), text) if len(text) <= MOST_AT_ONCE else Document(str(path), path=path)


def _lines(path: Path, head: str, file: io.TextIOWrapper) -> Iterator[str]:
    """The lines of a file whose first characters are read already."""
    begun = io.StringIO(head)
    place = 0
    for line in begun:
        if not line.endswith("\n"):
            line += file.readline()
        files.check_text(path, line, place)
        place += len(line)
        yield line
    for line in file:
        files.check_text(path, line, place)
        place += len(line)
        yield line


def _of_table(path: Path, lines: Iterator[str], delimiter: str) -> Iterator[Found]:
    """The rows of a table whose first row names the columns."""
    csv.field_size_limit(MOST)  # a document may be long
    table, begin = csv.reader(lines, delimiter=delimiter, strict=True), 1
    try:
        names = next(table)
        _check_delimiter(path, names, delimiter)
        _check_names(f"{path}, line 1", names)
        begin = table.line_num + 1
        for cells in table:
            where, begin = f"{path}, line {begin}", table.line_num + 1  # a cell may have several lines
            if not cells:  # an empty line
                continue
            if len(cells) != len(names):
                raise UserError(
                    f"{where}: the row has {len(cells)} fields, and the first one names {len(names)} columns. Put "
                    f"fields that hold {delimiter!r} between quotation marks."
                )
            yield where, dict(zip(names, cells, strict=True))
    except csv.Error as error:
        raise UserError(f"{path}, line {begin}: {error}, so the table cannot be read.") from error


def _check_delimiter(path: Path, names: Sequence[str], delimiter: str) -> None:
    """Raises a UserError if the first row is a single cell with a separator of other tables in it."""
    other = next((each for each in ",;\t|" if len(names) == 1 and each in names[0]), None)
    if other is None:
        return
    ends = [end for end, each in files.DELIMITERS.items() if each == other]
    anew = f"Write it anew: pandas.read_csv({path.name!r}, sep={other!r}).to_csv('rows.csv', index=False)."
    cure = f"Give the file a name that ends in {ends[0]}." if ends else anew
    raise UserError(f"{path}, line 1: {other!r} separates the columns, and must be {delimiter!r}. {cure}")


def _check_names(where: str, names: Sequence[str]) -> None:
    """Raises a UserError if two columns have one name."""
    if len({*names}) < len(names):
        raise UserError(f"{where}: two columns have one name, among {names}. Rename one.")


def _of_json(path: Path, text: str) -> Iterator[Found]:
    """The elements of an array over the whole file, or one object over many lines."""
    try:
        value = strict_json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}, line {getattr(error, 'lineno', 1)}, {why_no_json(error)}. The file must be an array of objects, "
            "or each line a separate object."
        ) from error
    elements = value if isinstance(value, list) else [value]
    return iter([(f"{path}, element {number}", element) for number, element in enumerate(elements, 1)])


def _of_long_array(path: Path, text: str, file: io.TextIOWrapper) -> Iterator[Found]:
    """The elements of an array that is too long to be held in memory: as many at a time as are whole."""
    text = text.lstrip()
    if not text.startswith("["):
        raise UserError(f"{path} is one value of more than {MOST_AT_ONCE:,} characters. Write its rows as JSON lines.")
    decode, at, end, wanted = strict_json.DECODER.raw_decode, 1, 0, _CHUNK
    for number in itertools.count(1):
        where = f"{path}, element {number}"
        while True:
            at = _behind_space(text, at)
            if text[at : at + 1] == "]" and number == 1:
                return
            try:
                value, end = decode(text, at)
                end = _behind_space(text, end)
                if end < len(text):  # else a number may go on, and what follows is not known
                    break
                error: Exception = json.JSONDecodeError("the array does not end", text[at : at + 100], 0)
            except (ValueError, RecursionError) as failed:
                error = failed
            if not (more := file.read(wanted)) or isinstance(error, RecursionError | strict_json.RepeatedNameError):
                raise UserError(f"{where}, {why_no_json(error)}. The file must be an array of objects.") from error
            files.check_text(path, more)
            text, at, wanted = text[at:] + more, 0, 2 * wanted  # twice as much each time, so that it ends soon
        yield where, value
        if text[end] == "]":
            break
        if text[end] != ",":
            raise UserError(f"{where}: {text[end]!r} follows it, and must be ',' or ']'.")
        at, wanted = end + 1, _CHUNK
    if (text[end + 1 :] + file.read(_CHUNK)).strip():
        raise UserError(f"{path}: there is text after the end of the array. The file must be one array of objects.")


def _behind_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _of_columns(path: Path) -> Iterator[Found]:
    """The rows of a Parquet file, or of a file of Arrow's, as a stream or with its footer."""
    with needed_packages():
        arrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    number = 0
    try:
        if files.suffix(path) == ".parquet":
            batches = parquet.ParquetFile(path, memory_map=True).iter_batches(_ROWS_AT_ONCE)
        else:
            batches = _of_arrow(arrow, path)
        for batch in batches:
            _check_names(str(path), batch.schema.names)
            for begin in range(0, batch.num_rows, _ROWS_AT_ONCE):
                for row in batch.slice(begin, _ROWS_AT_ONCE).to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except (arrow.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as a {path.suffix} file: {in_one_line(error)}") from error
    if not number:
        raise UserError(f"{path} is empty.")


def _of_arrow(arrow: Any, path: Path) -> Iterator[Any]:
    """The batches of a stream, as `datasets` saves them, or of Arrow's format of files, as `pyarrow.feather` does."""
    mapped = arrow.memory_map(str(path))
    if mapped.read(len(_ARROW_FILE)) == _ARROW_FILE:
        table = arrow.ipc.open_file(mapped)
        return (table.get_batch(number) for number in range(table.num_record_batches))
    mapped.seek(0)
    return iter(arrow.ipc.open_stream(mapped))


def _is_object(line: str) -> bool:
    try:
        return line[:1] == "{" and isinstance(json.loads(line), dict)
    except json.JSONDecodeError:
        return False
    except (ValueError, RecursionError):  # JSON so far, with a number or a nesting that Python does not take
        return True


def _is_json(text: str, is_whole: bool) -> bool:
    """Whether a text is one JSON object, or an array of objects. Of a long text, it is the first value that counts."""
    text = text.lstrip()
    try:
        if text[:1] not in ("{", "["):
            return False
        if is_whole:
            value = json.loads(text)
        else:
            value, _ = json.JSONDecoder().raw_decode(text, _behind_space(text, text[0] == "["))
            return isinstance(value, dict)
    except json.JSONDecodeError:
        return False
    except (ValueError, RecursionError):
        return True
    return isinstance(value, dict) or isinstance(value, list) and bool(value) and isinstance(value[0], dict)
