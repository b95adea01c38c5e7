"""Writes a checkpoint so that a process killed at any moment leaves the earlier model or the new one, whole.

The new files are first written into the folder `.saving`. Then one rename switches the folder from the earlier model to
the new one. It renames model.safetensors, or the index; the index's shards have names that no earlier index holds.
Files of the earlier model are deleted last.

config.json cannot change in the same rename. If it changes what is computed, or another small file changes, config.json
leaves the folder before the rename and comes back after it. A reader in between finds no model, and never finds one
model's weights with another's config. The files that complete the weights are then in `.saving`
(`checkpoint.files_that_complete`), and the next save puts them back.

Adapters are written in the same way. A link in the folder is replaced and never followed, so that no file elsewhere
changes. All files have the mode that the process gives to new files.
"""

import contextlib
import itertools
import json
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from liger_jax.models.hugging_face import tensor_files
from liger_jax.models.hugging_face.checkpoint import (
    ADAPTERS,
    INDEX,
    MODEL,
    SAVING,
    WEIGHTS,
    Names,
    files_that_complete,
    weight_files,
)
from liger_jax.models.hugging_face.weights import open_weights

_SHARD = re.compile(r"model.*-\d+-of-\d+\.safetensors")


def write(
    folder: pathlib.Path,
    shards: Iterable[tensor_files.Tensors],
    small_files: Mapping[str, bytes | None],
    meaning: Callable[[pathlib.Path], Any],
) -> None:
    """Writes a checkpoint into a folder, in place of one that the folder may hold.

    Tensors are fetched one after another. Until the end the disk holds both models. Of several processes, the
    first one writes, and the others fetch the tensors with it.

    `shards`: groups of tensors. One becomes model.safetensors; several become files and an index. `small_files`:
    config.json and other files, by name or relative path. `None` for a file that the model lacks; an earlier model's
    file of that name is removed. `meaning`: takes a folder and returns what its config.json means. If two folders give
    equal values, their models compute the same. It raises a ValueError or FileNotFoundError if the file is damaged or
    absent.
    """
    if jax.process_index() > 0:
        for shard in shards:
            tensor_files.fetch_all(shard)
        return
    with _mended(folder, MODEL, small_files):
        _replace(folder, MODEL, _write_weights(folder, shards), small_files, meaning)


def write_adapters(
    folder: pathlib.Path, tensors: Mapping[str, np.ndarray], small_files: Mapping[str, bytes | None]
) -> None:
    """Writes adapters into a folder, in place of those that it may hold. A model in the folder stays."""
    if jax.process_index() > 0:
        return
    (weights,) = ADAPTERS.weights
    with _mended(folder, ADAPTERS, small_files):
        tensor_files.write(folder / ADAPTERS.saving / "new" / weights, tensors)
        _replace(folder, ADAPTERS, weights, small_files, lambda folder: (folder / ADAPTERS.config).read_bytes())


@contextlib.contextmanager
def _mended(folder: pathlib.Path, names: Names, small_files: Iterable[str]) -> Iterator[None]:
    """A context for a save, before and after which no other save is left unfinished."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file, or a link to no folder, and must be a folder or not exist.")
    folder.mkdir(parents=True, exist_ok=True)
    for path in {(folder / name).parent for name in small_files}:
        if path != folder and path.is_symlink():  # files elsewhere would be replaced
            raise NotADirectoryError(f"{path} is a link, and must be a folder or not exist. Remove the link.")
    _mend(folder, names)
    for name in ("new", "earlier"):
        (folder / names.saving / name).mkdir(parents=True)
    try:
        yield
    finally:
        _mend(folder, names)


def _replace(
    folder: pathlib.Path,
    names: Names,
    flip: str,
    small_files: Mapping[str, bytes | None],
    meaning: Callable[[pathlib.Path], Any],
) -> None:
    """Replaces the earlier files by the new ones; the weights are in `new`, in the file `flip`."""
    new, earlier = folder / names.saving / "new", folder / names.saving / "earlier"
    others = {name: content for name, content in small_files.items() if name != names.config}
    changed = [name for name, content in others.items() if not _holds(folder / name, content)]
    for name in (*changed, names.config):  # the config is last: files_that_complete relies on it
        if (content := small_files[name]) is not None:
            _write(new / name, content)
    if changed or not _say_the_same(meaning, folder, new):
        for name in (names.config, *changed):
            if os.path.lexists(folder / name):
                _move(folder / name, (earlier / name).parent)
    _move(new / flip, folder)
    _move_all(new, folder, last=names.config)


def _write_weights(folder: pathlib.Path, shards: Iterable[tensor_files.Tensors]) -> str:
    """Writes the weights. Returns the file in `new` that must be renamed last: it switches to the new model."""
    saving, in_shard, total = folder / SAVING, {}, 0
    for i, shard in enumerate(shards):
        tensor_files.write(saving / str(i), shard)
        in_shard |= dict.fromkeys(shard, i)
        total += sum(x.nbytes for x in shard.values())
    count = max(in_shard.values()) + 1
    if count == 1:
        _move(saving / "0", saving / "new", WEIGHTS)
        return WEIGHTS
    if (folder / WEIGHTS).exists():
        _make_a_shard(folder)
    names = _free_names(folder, count)
    for i, name in enumerate(names):
        _move(saving / str(i), folder, name)
    _write_index(saving / "new" / INDEX, {tensor: names[i] for tensor, i in sorted(in_shard.items())}, total)
    return INDEX


def _make_a_shard(folder: pathlib.Path) -> None:
    """Turns model.safetensors into the only shard of an index, which one rename can then replace by another index."""
    try:
        with open_weights(folder / WEIGHTS) as file:
            names = list(file.keys())
    except ValueError:  # the file is damaged, so there is no model to keep
        (folder / WEIGHTS).unlink()
        return
    (shard,) = _free_names(folder, 1)
    _write_index(folder / SAVING / INDEX, dict.fromkeys(names, shard), (folder / WEIGHTS).stat().st_size)
    _move(folder / SAVING / INDEX, folder)  # model.safetensors still takes precedence
    _move(folder / WEIGHTS, folder, shard)


def _free_names(folder: pathlib.Path, count: int) -> list[str]:
    """Names of shards that neither a file nor the index has: Hugging Face's names, with a number added if need be."""
    taken = {path.name for path in folder.iterdir()} | (_weight_files(folder) or set())
    stems = itertools.chain(["model"], (f"model-{n}" for n in itertools.count(2)))
    choices = ([f"{stem}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)] for stem in stems)
    return next(names for names in choices if not taken & set(names))


def _write_index(path: pathlib.Path, weight_map: Mapping[str, str], total_bytes: int) -> None:
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    _write(path, (json.dumps(index, indent=2) + "\n").encode())


def _mend(folder: pathlib.Path, names: Names) -> None:
    """Completes what an interrupted save has left, and deletes files that belong to no model."""
    if not (folder / names.config).exists() and (missing := files_that_complete(folder, names)):
        _move_all(missing, folder, last=names.config)
    if os.path.lexists(folder / names.saving):
        shutil.rmtree(folder / names.saving)
    if names == MODEL:
        _delete_unused(folder)


def _delete_unused(folder: pathlib.Path) -> None:
    """Deletes an index and shards that belong to no model."""
    used = _weight_files(folder)
    if used is None:  # the index is damaged, so nobody knows which files it named
        return
    used |= {INDEX} if WEIGHTS not in used else set()
    for path in folder.iterdir():
        if (path.name == INDEX or _SHARD.fullmatch(path.name)) and path.name not in used:
            path.unlink()


def _weight_files(folder: pathlib.Path) -> set[str] | None:
    try:
        return set(weight_files(folder))
    except ValueError:
        return None


def _say_the_same(meaning: Callable[[pathlib.Path], Any], folder: pathlib.Path, other: pathlib.Path) -> bool:
    try:
        return meaning(folder) == meaning(other)
    except (ValueError, FileNotFoundError):
        return False


def _holds(path: pathlib.Path, content: bytes | None) -> bool:
    """Whether a file has this content, or is absent for `None`. A link must become a file, whatever it leads to."""
    if content is None or path.is_symlink():
        return content is None and not os.path.lexists(path)
    return path.is_file() and path.read_bytes() == content


def _write(path: pathlib.Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    _sync(path)
    _sync(path.parent)


def _move_all(source: pathlib.Path, folder: pathlib.Path, *, last: str) -> None:
    """Moves the files of a folder and of those in it. The config is last: until then a reader finds nothing."""
    files = [path for path in source.rglob("*") if path.is_file()]
    for path in sorted(files, key=lambda path: path.name == last):
        _move(path, (folder / path.relative_to(source)).parent)


def _move(path: pathlib.Path, folder: pathlib.Path, name: str | None = None) -> None:
    """Renames a file, and returns once the rename is on the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    path.replace(folder / (name or path.name))
    _sync(folder)
    _sync(path.parent)


def _sync(path: pathlib.Path) -> None:
    """Waits until a file's content, or a folder's list of names, is on the disk."""
    try:
        file = os.open(path, os.O_RDONLY)
    except PermissionError:
        if path.is_dir():  # Windows opens no folders, and has nothing to wait for
            return
        raise
    try:
        os.fsync(file)
    except OSError:
        if not path.is_dir():  # some network file systems sync no folders
            raise
    finally:
        os.close(file)
