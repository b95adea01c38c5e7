"""Files of data by a path or a glob: the kind of each by its name, and the texts of text files."""

import bz2
import codecs
import contextlib
import glob
import gzip
import io
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from liger_jax.user_errors import UserError, refusals_kept

JSON_LINES = (".jsonl", ".ndjson", ".json")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
COLUMNAR = (".parquet", ".arrow")  # Apache's formats: tables by columns, with types
COMPRESSED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_NOT_READ = {
    "Write its table as Parquet: pandas.read_feather(…).to_parquet('rows.parquet').": ".feather",
    "Unpack it first.": ".zip .tar .tgz .tbz2 .txz .7z .rar .zst",
    "Write its text to a .txt file.": ".pdf .doc .docx .odt .rtf .epub .pptx .ipynb",
    "Save its sheet as a .csv file.": ".xls .xlsx .ods",
}
KNOWN = (*JSON_LINES, *DELIMITERS, *COLUMNAR, *COMPRESSED, *" ".join(_NOT_READ.values()).split(), ".txt", ".md")
_CONTROL = re.compile(rb"[\0-\x08\x0e-\x1a\x1c-\x1f\x7f]")  # bytes that do not occur in text


def suffix(path: Path) -> str:
    """The extension that says what a file holds: in lower case, and without that of its compression."""
    name = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return name.suffix.lower()


def why_not(path: Path) -> str | None:
    """Why a file is not read, and the cure; `None` if it is read."""
    end = suffix(path)
    if end in COLUMNAR and path.suffix.lower() in COMPRESSED:
        return "is compressed as a whole, and cannot be read in chunks. Unpack it first."
    cure = next((cure for cure, ends in _NOT_READ.items() if end in ends.split()), None)
    return None if cure is None else f"is a {end} file, which is not read as it is. {cure}"


def is_rows(path: Path) -> bool:
    """Whether a file holds rows and not prose, by its name."""
    return suffix(path) in (*JSON_LINES, *DELIMITERS, *COLUMNAR)


def tell(paths: Iterable[Path]) -> None:
    """Prints which files are read as what, if they are not all of one kind."""
    kinds: dict[str, list[str]] = {}
    for path in paths:
        end = suffix(path)
        kind = "a table" if end in (*DELIMITERS, *COLUMNAR) else "JSON" if end in JSON_LINES else "prose"
        kinds.setdefault(kind, []).append(path.name)
    if len(kinds) > 1:
        named = (
            f"as {kind} {', '.join(names[:3])}{f' and {len(names) - 3:,} more' if names[3:] else ''}"
            for kind, names in kinds.items()
        )
        print(f"data: read {'; '.join(named)}")


def read_texts(pattern: str, refused: dict[str, UserError] | None = None) -> dict[Path, str]:
    """Reads text files.

    `pattern`: a file, or a glob; its folders are passed over, and `**` follows no links to folders. Returns the files'
    texts by their paths, in the order of the paths.
    """
    paths = [path for path in found(pattern) if path.is_file()]
    if not paths:
        raise UserError(f"No file matches {pattern!r}. Pass --data a file or a quoted glob.")
    texts = {}
    for path in paths:
        with refusals_kept(refused, str(path)):
            texts[path] = _read_text(path)
    return texts


def found(pattern: str, flag: str = "--data") -> list[Path]:
    """The files and folders of a name or a glob.

    `pattern`: an existing name takes precedence over a glob, so that chats[1].jsonl is found. `**` stands for all
    folders below, as in Python's glob, except those behind links, which may be circular.
    """
    try:
        return [Path(pattern)] if os.path.exists(pattern) else sorted(map(Path, set(_matches(pattern))))
    except (ValueError, re.error) as error:  # a null character, or a malformed set of characters
        raise UserError(f"{flag}={pattern!r} is neither a file's name nor a valid glob: {error}.") from error


def _matches(pattern: str) -> Iterator[str]:
    parts = pattern.split("/")
    if "**" not in parts:
        yield from glob.iglob(pattern)
        return
    at = parts.index("**")
    head, rest = "/".join(parts[:at]), "/".join(parts[at + 1 :]) or "*"
    head = "/" if at == 1 and not head else head
    for base in glob.iglob(head) if head else [""]:
        for folder, folders, _ in os.walk(base or "."):
            folders[:] = [name for name in folders if not name.startswith(".")]
            inside = os.path.relpath(folder, base or ".")
            place = base if inside == "." else os.path.join(base, inside)
            yield from _matches(os.path.join(glob.escape(place), rest) if place else rest)


def _read_text(path: Path) -> str:
    with opened(path) as file:
        try:
            text = file.read()
        except MemoryError as error:
            raise UserError(f"{path} is too large for this machine's memory. Split it into several files.") from error
        check_text(path, text)
        return text


@contextlib.contextmanager
def opened(path: Path) -> Iterator[io.TextIOWrapper]:
    """A context with a text file, which may be compressed."""
    if (reason := why_not(path)) is not None:
        raise UserError(f"{path} {reason}")
    how = COMPRESSED.get(path.suffix.lower(), open)
    try:
        with how(path, "rt", encoding="utf-8-sig") as file:  # without the byte order mark of some editors
            try:
                yield file
            except UnicodeDecodeError as error:
                at = file.buffer.tell() - len(error.object) + error.start
                raise _no_utf8(path, error.object, error.start, at) from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:  # a compressed file may be cut off or damaged
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error


def checked(path: Path, file: io.TextIOWrapper) -> Callable[[int], str]:
    """Reads a file in chunks, and checks that each is text.

    Returns a function that returns the next n characters, and fewer at the end.
    """
    begin = 0

    def read(size: int) -> str:
        nonlocal begin
        text = file.read(size)
        check_text(path, text, begin)
        begin += len(text)
        return text

    return read


def check_text(path: Path, text: str, begin: int = 0) -> None:
    """Checks that a chunk of a file is text."""
    if (at := text.find("\0")) >= 0:
        raise _no_text(path, f"character {begin + at} is a null character, which text files do not have")


def _no_text(path: Path, reason: str) -> UserError:
    return UserError(f"{path} is no text file: {reason}. Let --data match text files only.")


def _no_utf8(path: Path, data: bytes, begin: int, at: int) -> UserError:
    """The error for a file that is not UTF-8: text in another encoding, if no control character is near the byte."""
    cure = "convert it by: iconv -f {} -t UTF-8 {} > FILE."
    if not at and data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return UserError(f"{path} is in UTF-16, and must be in UTF-8: {cure.format('UTF-16', path.name)}")
    wrong = f"byte {data[begin]:#04x} at {at}"
    if _CONTROL.search(data):
        return _no_text(path, f"{wrong} is no UTF-8")
    cure = cure.format("ISO-8859-1", path.name)
    return UserError(f"{path} is not in UTF-8: {wrong}. If it is text in Latin-1, {cure}")
