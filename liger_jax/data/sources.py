"""The sources that `--data` names: files, globs, folders and datasets of the hub, each with its weight in an epoch."""

import dataclasses
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from liger_jax.data.files import KNOWN, found, is_rows
from liger_jax.user_errors import UserError

_SPLITS = {  # words in the names of files and folders, as the hub's datasets use them
    "train": "train", "training": "train", "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
}  # fmt: skip
_ABOUT = re.compile(
    r"(readme|license|licence|citation|changelog)(\.\w+)?|(dataset_infos?|dataset_dict|state)\.json", re.I
)


@dataclasses.dataclass(frozen=True)
class DataSource:
    """A source that `--data` names."""

    name: str  # the argument without its weight
    weight: float = 1.0  # how often its rows are in an epoch
    paths: tuple[Path, ...] = ()  # its files; none for a dataset of the hub
    rows: Any = None  # a program's iterable of rows; `None` for files and datasets


def data_sources(given: Sequence[str], flag: str = "--data") -> list[DataSource]:
    """The sources that the arguments of a flag name, one for each, perhaps with a weight, as in `chats.jsonl=2`."""
    sources = [_data_source(text, flag) for text in given]
    seen: dict[Any, str] = {}
    for source in sources:
        for identity, name in _identities(source):
            if (other := seen.get(identity)) is not None:
                also = "" if os.path.abspath(name) == os.path.abspath(other) else f", also as {other}"
                raise UserError(
                    f"{flag} names {name} more than once{also}. Leave one out; {source.name}=2 takes its rows twice."
                )
            seen[identity] = name
    return sources


def in_both(some: Sequence[DataSource], others: Sequence[DataSource]) -> str | None:
    """The first file or dataset of the second sources that is also among the first ones, under any name."""
    first = {identity for source in some for identity, _ in _identities(source)}
    return next((name for source in others for identity, name in _identities(source) if identity in first), None)


def resolved(names: str) -> list[str]:
    """Names separated by spaces, each resolved if it is a path, so that spellings of a path compare equal."""
    words = (re.fullmatch(r"(.*?)(=[\d.e+-]+)?", word, re.S) for word in names.split(" "))
    return [os.path.realpath(word[1]) + (word[2] or "") for word in words if word]


def _identities(source: DataSource) -> Iterator[tuple[Any, str]]:
    """Keys that identify the files or the dataset of a source, with their names. A link has the key of its target."""
    for path in source.paths:
        stat = path.stat()
        yield (stat.st_dev, stat.st_ino), str(path)
    if not source.paths:
        yield source.name, source.name


def _name_and_weight(text: str, flag: str) -> tuple[str, float]:
    """The name and the weight of an argument."""
    name, equals, number = text.rpartition("=")
    if not equals or not _is_found(name):
        return text, 1.0
    weight = _number(number)
    if os.path.exists(text):
        if weight is None:
            return text, 1.0
        longer = number + ("0" if "." in number else ".0")  # the same number in a spelling that is not a file's name
        raise UserError(f"{flag}={text}: both {name} and {text} exist. Write {name}={longer} or {text}=1.")
    if weight is None:
        raise UserError(f"{flag}={text}: what comes after {name}= must be a number above 0, such as {name}=2.")
    return name, weight


def _data_source(text: str, flag: str) -> DataSource:
    name, weight = _name_and_weight(text, flag)
    if os.path.isdir(name):
        return DataSource(name, weight, tuple(_of_folder(Path(name), flag)))
    paths = tuple(path for path in found(name, flag) if path.is_file())
    if not paths and not may_be_id(name):
        raise UserError(f"No file matches {name!r}. Pass {flag} a file, a folder or a quoted glob.")
    return DataSource(name, weight, paths)


def weight(text: str) -> float:
    """How often the rows of an argument of `--data` are in an epoch.

    Returns the number after the last "=" if it is a weight, else 1.
    """
    return _name_and_weight(text, "--data")[1]


def may_be_id(name: str) -> bool:
    """Whether a name may be a dataset's id. If its owner is the name of a folder here, it is a mistyped path."""
    organisation, slash, _ = name.rpartition("/")
    is_id = re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", name) is not None and not name.lower().endswith(KNOWN)
    return is_id and not (slash and os.path.isdir(organisation))


def _is_found(name: str) -> bool:
    """Whether a name is a file, a folder, a glob that matches, or a dataset's id with its owner."""
    return bool(name) and (bool(found(name)) or "/" in name and may_be_id(name))


def _number(text: str) -> float | None:
    """The weight that a text is; `None` if it is not one."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < math.inf else None


def _of_folder(folder: Path, flag: str) -> list[Path]:
    """The files of a folder to read: of one kind, and of one split where their names have splits."""
    paths = sorted(_all_in(folder))
    rows = [path for path in paths if is_rows(path) and not _ABOUT.fullmatch(path.name)]
    others = sorted({*paths} - {*rows})
    if rows and (unclear := [path for path in others if not _ABOUT.fullmatch(path.name)]):
        raise UserError(
            f"{folder} holds rows, such as {rows[0]}, and other files, such as {unclear[0]}. Name the files that are "
            f"meant: {flag} '{folder}/**/*{rows[0].suffix}'."
        )
    if rows and others:
        print(f"data: {_some(others)}: skipped, since they describe the data")
    if not (files := rows or others):
        raise UserError(f"{folder} holds no files. Pass {flag} another folder, or a file.")
    return _of_split(folder, files, flag)


def _of_split(folder: Path, paths: list[Path], flag: str) -> list[Path]:
    splits = {path: _split(path.relative_to(folder)) for path in paths}
    if len({*splits.values()}) == 1:
        return paths
    wanted = [path for path, split in splits.items() if split == "train"]
    if flag != "--data" or not wanted or None in splits.values():
        names = ", ".join(sorted(f"{split or 'no split'} ({next(p for p in paths if splits[p] == split)})"
                                 for split in {*splits.values()}))  # fmt: skip
        raise UserError(
            f"{folder} holds files of several splits by their names: {names}. Name the files that are meant."
        )
    left = sorted({*paths} - {*wanted})
    print(f"data: {_some(left)}: skipped, since by their names they are not for training; --eval-data accepts them")
    return wanted


def _split(path: Path) -> str | None:
    """The split that a path names, by the file's name first and then by its folders'."""
    for part in reversed(path.parts):
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in _SPLITS:
                return _SPLITS[word]
    return None


def _all_in(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]
        yield from (Path(place) / name for name in names if not name.startswith("."))


def _some(paths: Sequence[Path]) -> str:
    more = f" and {len(paths) - 3:,} more" if len(paths) > 3 else ""
    return ", ".join(map(str, paths[:3])) + more
