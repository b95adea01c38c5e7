"""Digests of a run's model and data, by which a resumed run checks that they have not changed."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from liger_jax.training import digests
from liger_jax.training.errors import CheckpointError

_BLOCK = 4096  # bytes that are read of each block of a tensor
_PLACES = 3  # begin, middle and end
_MOST_HEADER = 2**28
_NAMED = 4  # differences that a message names
_SHOWN = 60  # characters of a value in a message


def of_files(contents: Mapping[str, bytes | None]) -> dict[str, str]:
    """Digests of small files, such as a tokenizer's.

    Args:
        contents: the files' contents by name; `None` for a missing file.

    Returns:
        Digests by name, of the files that exist.

    Example:
        >>> of_files({"tokenizer.json": b"{}", "merges.txt": None})
        {'tokenizer.json': '44136fa355b3'}
    """
    return {name: digests.of_bytes(data)[:12] for name, data in contents.items() if data is not None}


def of_weights(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Cheap digests of files of weights, from their sizes, headers, and three blocks of every tensor.

    Args:
        folder: where the files are.
        names: of safetensors files.

    Returns:
        Digests by name, without those of files that cannot be read: reading the weights will report these.
    """
    return _each(folder, names, _sample)


def of_whole_weights(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Digests of all bytes of files of weights.

    Args:
        folder: where the files are.
        names: of the files.

    Returns:
        Digests by name, as in `of_weights`.
    """
    return {f"all of {name}": digest for name, digest in _each(folder, names, digests.of_file).items()}


def check_same(folder: Path, old: Mapping[str, Any], new: Mapping[str, Any], growing: Sequence[str] = ()) -> None:
    """Checks that a resumed run has the settings that it began with.

    `growing`: names of numbers that may have become larger. `None` for such a number means that another setting
    replaces it.
    """
    names = [name for name in dict.fromkeys([*new, *old]) if old.get(name) != new.get(name)]
    # Files are read as a whole only on request: if one side has not done so, there is nothing to compare.
    names = [name for name in names if not name.startswith("all of ") or name in old and name in new]
    names = [name for name in names if name not in growing or _is_less(new.get(name), old.get(name))]
    if not names:
        return
    changes = [_change(name, old.get(name), new.get(name)) for name in names[:_NAMED]]
    more = [f"{len(names) - _NAMED} more differ"] if len(names) > _NAMED else []
    raise CheckpointError(f"{folder} holds another run: {', '.join(changes + more)}.")


def _is_less(new: Any, old: Any) -> bool:
    return new is not None and old is not None and new < old


def _change(name: str, before: Any, now: Any) -> str:
    if before is None:
        return f"{name}={_told(now)} is new"
    return f"{name}={_told(before)} is gone" if now is None else f"{name}={_told(before)} became {_told(now)}"


def _told(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN + 60 else f"{text[:_SHOWN]}…{text[-20:]}"


def _each(folder, names, digest):
    digests = {}
    for name in names:
        try:
            digests[name] = digest(folder / name)[:12]
        except OSError:
            continue
    return digests


def _sample(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        header = file.read(min(length, _MOST_HEADER, size))
        blocks = [f"{size}".encode(), header]
        for first, end in _places(header):
            for place in range(_PLACES):
                at = first + max(0, end - first - _BLOCK) * place // (_PLACES - 1)
                file.seek(8 + length + at)
                blocks.append(file.read(min(_BLOCK, max(0, end - at))))
    return digests.of_bytes(*blocks)


def _places(header: bytes) -> list[tuple[int, int]]:
    """Begins and ends of the tensors after the header; none if the header is damaged, which the reader will report."""
    try:
        tensors = json.loads(header)
        ranges = [tensors[name]["data_offsets"] for name in tensors if name != "__metadata__"]
        return sorted((int(first), int(end)) for first, end in ranges if 0 <= first <= end < 2**62)
    except (ValueError, TypeError, KeyError, RecursionError):
        return []
