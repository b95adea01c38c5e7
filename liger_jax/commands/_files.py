"""Text files by a path or a glob, some of them compressed."""

import glob
import lzma
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from liger_jax.commands import _formats
from liger_jax.commands._errors import UserError, refusals_kept


def read_texts(pattern: str, refused: dict[str, UserError] | None = None) -> dict[Path, str]:
    """Reads text files.

    Args:
        pattern: a file, or a glob; its folders are passed over, and `**` follows no links to folders.
        refused: where errors of single files go, by where they are; `None` to raise the first.

    Returns:
        The files' texts by their paths, in the order of the paths.

    Raises:
        UserError: nothing matches, or a file is no UTF-8 text, cannot be read, or is of a kind that is not read.
    """
    paths = [path for path in found(pattern) if path.is_file()]
    if not paths:
        raise UserError(f"No file matches {pattern!r}. Pass --data a file or a quoted glob.")
    texts = {}
    for path in paths:
        with refusals_kept(refused, str(path)):
            texts[path] = _read_text(path)
    return texts


def found(pattern: str) -> list[Path]:
    """The files and folders of a name or a glob.

    Args:
        pattern: a name counts before a glob, so that chats[1].jsonl is found. `**` stands for all folders below, as in
            Python's glob, but for those behind links, which may lead in a circle.

    Returns:
        Their paths, in order.
    """
    try:
        return [Path(pattern)] if os.path.exists(pattern) else sorted(map(Path, set(_matches(pattern))))
    except (ValueError, re.error) as error:  # a null, or a set of characters that is none
        raise UserError(f"--data={pattern!r} is no name and no glob: {error}.") from error


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
    if (reason := _formats.why_not(path)) is not None:
        raise UserError(f"{path} {reason}")
    opened = _formats.COMPRESSED.get(path.suffix.lower(), open)
    try:
        with opened(path, "rt", encoding="utf-8-sig") as file:  # without the mark that some editors begin with
            text = file.read()
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:  # a compressed file may be cut off or damaged
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    except MemoryError as error:
        raise UserError(f"{path} is too large for this machine's memory. Split it into several files.") from error
    except UnicodeDecodeError as error:
        reason = f"byte {error.object[error.start]:#04x} at {error.start} is no UTF-8"
    else:
        if (at := text.find("\0")) < 0:
            return text
        reason = f"character {at} is a null, which is in no text"
    raise UserError(f"{path} is no text file: {reason}. Let --data match text files only.")
