"""The folders of a run's steps: which of them a run has written, and how they are made and removed.

The name of a step's folder is the step's number. Orbax writes it under another name, and renames it once it is
complete. A run that starts over moves a step of the same number aside, to "NUMBER.earlier", until its own is complete.
"""

import re
import shutil
import time
from pathlib import Path

STATE, LOG, ABOUT = "state", "log", "about"  # the items of a checkpoint
EARLIER, _DROPPED = ".earlier", ".dropped"
_IN_A_CHECKPOINT = {STATE, LOG, ABOUT, "_CHECKPOINT_METADATA"}
_UNFINISHED = re.compile(r"\d+(\.earlier)?(\.orbax-checkpoint-tmp.*|\.dropped)", re.ASCII)


def number_of(path: Path) -> int | None:
    """The step of a folder by its name."""
    match = re.fullmatch(r"(0|[1-9]\d*)(\.earlier)?", path.name, re.ASCII)
    return None if match is None else int(match[1])


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a run's step, intact or damaged.

    Returns `False` for a link, and for a folder with a step's name that holds other things. An empty one counts as a
    step.
    """
    if number_of(path) is None or path.is_symlink() or not path.is_dir():
        return False
    names = {each.name for each in path.iterdir()}
    return not names or bool(names & _IN_A_CHECKPOINT)


def all_of(folder: Path) -> list[Path]:
    """The folders of all steps, in the order of their numbers."""
    paths = filter(is_checkpoint, folder.iterdir()) if folder.is_dir() else []
    return sorted(paths, key=lambda path: (number_of(path) or 0, path.name))


def holds_a_run(folder: Path) -> bool:
    """Whether a run has saved checkpoints into a folder."""
    return any(any(path.iterdir()) for path in all_of(folder))


def move_aside(path: Path) -> None:
    """Makes room for a step of the same number."""
    if path.exists():
        path.rename(path.with_name(path.name + EARLIER))


def remove(path: Path) -> None:
    """Removes a step, after a rename by which it ceases to be one at once."""
    dropped = path.with_name(path.name + _DROPPED)
    path.rename(dropped)
    shutil.rmtree(dropped)


def remove_unfinished(folder: Path, quiet_seconds: float = 0.0) -> None:
    """Removes what a killed run has left of steps that it was writing or removing.

    `quiet_seconds`: how long nothing new may have appeared. If a write has failed, concurrent ones continue for a
    moment and make their folders anew. It waits at most ten times as long.
    """
    begin = last = time.monotonic()
    while True:
        unfinished = [path for path in folder.iterdir() if _is_unfinished(path)]
        for path in unfinished:
            shutil.rmtree(path, ignore_errors=True)
        now = time.monotonic()
        last = now if unfinished else last
        if now - last >= quiet_seconds or now - begin >= 10 * quiet_seconds:
            return
        time.sleep(0.05)


def _is_unfinished(path: Path) -> bool:
    return _UNFINISHED.fullmatch(path.name) is not None and path.is_dir() and not path.is_symlink()
