"""Small files of a run, and its folder."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from liger_jax.training.errors import FolderError


def read_json(path: Path) -> dict[str, Any]:
    """Reads a small file of a run."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def write_json(path: Path, values: Any) -> None:
    """Writes a file in one rename."""
    new = path.with_suffix(".new")
    with new.open("w") as file:
        json.dump(values, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def check_writable(folder: Path) -> None:
    """Makes a folder, if there is none."""
    for path in (folder, *folder.parents):
        if path.is_symlink() and not path.exists():
            raise FolderError(
                f"Nothing can be written to {folder}: {path} is a link to {path.readlink()}, which is not there."
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise FolderError(f"Nothing can be written to {folder}: {error.strerror}.") from error
