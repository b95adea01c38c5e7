"""Tokens in the user's folder for caches, for runs of the same data in other folders; it may be deleted at any time.

A run has its tokens beside it, and the files here are the same ones by hard links, or small copies on another disk. A
folder gets its name at once and whole, so that several processes may keep and take the same tokens. What is taken is
checked by its digests.
"""

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from liger_jax.training.user_caches import are_used, user_caches

_MOST_BYTES = 20 * 2**30  # of all tokens here; those that were not used for longest are removed
_MOST_COPIED = 2**30  # bytes of what is kept on another disk, such as that of a small home
_UNFINISHED, _ABANDONED_SECONDS = ".unfinished-", 24 * 3600.0


def folder() -> Path:
    """Where tokens are kept."""
    return user_caches() / "tokens"


def keep(tokens: Path, key: str) -> None:
    """Keeps a folder of tokens under a name that says what they are made of, unless it is there or cannot be."""
    kept = folder() / key
    if not are_used():
        return
    with contextlib.suppress(OSError):
        if kept.is_dir():
            os.utime(kept)
            return
        if (size := _size(tokens)) > _MOST_BYTES:
            return
        folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=folder()))
        try:
            _link(tokens, unfinished, may_copy=size <= _MOST_COPIED)
            unfinished.rename(kept)  # an error where another process was first
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        _remove_oldest(kept)


def take(key: str, target: Path) -> bool:
    """Puts the tokens of this name into a new folder. Returns whether there are any."""
    kept = folder() / key
    if not are_used() or not kept.is_dir():
        return False
    try:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        _link(kept, target, may_copy=True)
    except OSError:  # removed meanwhile, or this disk is full: they are made anew, which says so
        shutil.rmtree(target, ignore_errors=True)
        return False
    with contextlib.suppress(OSError):  # a folder that can only be read
        os.utime(kept)
    return True


def forget(key: str) -> None:
    """Removes tokens that are damaged."""
    shutil.rmtree(folder() / key, ignore_errors=True)


def _link(source: Path, target: Path, *, may_copy: bool) -> None:
    for path in source.iterdir():
        try:
            os.link(path, target / path.name)
        except OSError:
            if not may_copy:
                raise
            shutil.copyfile(path, target / path.name)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _remove_oldest(latest: Path) -> None:
    with_ages = sorted(((path.stat().st_mtime, path) for path in folder().iterdir() if path.is_dir()), reverse=True)
    total = 0
    for used, path in with_ages:
        is_abandoned = path.name.startswith(_UNFINISHED) and time.time() - used > _ABANDONED_SECONDS
        total += _size(path)
        if is_abandoned or (total > _MOST_BYTES and path != latest and not path.name.startswith(_UNFINISHED)):
            shutil.rmtree(path, ignore_errors=True)
