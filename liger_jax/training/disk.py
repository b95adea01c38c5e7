"""Space on the disk: checked before it is needed, and reported in a sentence when it runs out."""

import contextlib
import errno
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from liger_jax.training.errors import DiskError

_FULL = ("no space left", "os error 28", "disk quota exceeded", "os error 122")  # of libraries with their own errors


def check_space(folder: Path, needed_bytes: int, what_for: str) -> None:
    """Checks before a run that there is enough space."""
    free = shutil.disk_usage(folder).free
    if needed_bytes > free:
        raise DiskError(f"The disk of {folder} has {size(free)} left, and {what_for} need {size(needed_bytes)}.")


def is_full(error: BaseException) -> bool:
    """Whether an error, of any library, says that a disk or a quota is full."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    text = str(error).lower()
    return any(words in text for words in _FULL)


def full(what: str, folder: Path, needed_bytes: int) -> DiskError:
    """The error for a disk that became full."""
    free = shutil.disk_usage(folder).free
    return DiskError(
        f"{what} cannot be written to {folder}: the disk is full. It needs {size(needed_bytes)}, and {size(free)} are "
        "left. Nothing that was saved before is lost."
    )


@contextlib.contextmanager
def late_writes_untold() -> Iterator[None]:
    """A context for tensorstore, which prints a traceback for each write that ends after one has failed.

    The error of the first write is raised, and is enough. Others may end after the context, which stays in effect then.
    """
    before = sys.unraisablehook

    def hook(args):
        if str(args.exc_value) != "Event loop is closed":
            before(args)

    sys.unraisablehook = hook
    yield  # and no `finally`: see above
    sys.unraisablehook = before


def num_bytes(tree: Any) -> int:
    """The size of arrays."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def size(num_bytes: int) -> str:
    """A number of bytes in words."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 2**power:
            return f"{num_bytes / 2**power:.1f} {unit}"
    return f"{num_bytes} bytes"
