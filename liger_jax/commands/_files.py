"""Text files by a path or a glob, some of them compressed."""

import glob
import lzma
import zlib
from pathlib import Path

from liger_jax.commands import _formats
from liger_jax.commands._errors import UserError, refusals_kept


def read_texts(pattern: str, refused: dict[str, UserError] | None = None) -> dict[Path, str]:
    """Reads text files.

    Args:
        pattern: a file, or a glob; its folders are passed over.
        refused: where errors of single files go, by where they are; `None` to raise the first.

    Returns:
        The files' texts by their paths, in the order of the paths.

    Raises:
        UserError: nothing matches, or a file is no UTF-8 text, cannot be read, or is of a kind that is not read.
    """
    paths = [path for path in sorted(map(Path, glob.glob(pattern, recursive=True))) if path.is_file()]
    if not paths:
        raise UserError(f"No file matches {pattern!r}. Pass --data a file or a quoted glob.")
    texts = {}
    for path in paths:
        with refusals_kept(refused, str(path)):
            texts[path] = _read_text(path)
    return texts


def _read_text(path: Path) -> str:
    if (reason := _formats.why_not(path)) is not None:
        raise UserError(f"{path} {reason}")
    opened = _formats.COMPRESSED.get(path.suffix.lower(), open)
    try:
        with opened(path, "rt", encoding="utf-8-sig") as file:  # without the mark that some editors begin with
            text = file.read()
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:  # a compressed file may be cut off or damaged
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    except UnicodeDecodeError as error:
        reason = f"byte {error.object[error.start]:#04x} at {error.start} is no UTF-8"
    else:
        if (at := text.find("\0")) < 0:
            return text
        reason = f"character {at} is a null, which is in no text"
    raise UserError(f"{path} is no text file: {reason}. Let --data match text files only.")
