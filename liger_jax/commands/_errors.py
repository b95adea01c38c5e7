"""A user's errors: one sentence that says how to mend them, and exit code 2. A bug stays a traceback."""

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from liger_jax._install import install_command
from liger_jax.training.errors import (
    CheckpointError,
    DiskError,
    FolderError,
    ForeignStepError,
    LockedError,
    NotFiniteError,
    OutOfMemoryError,
    TrainingError,
)
from liger_jax.training.files import check_writable

_CURES = {  # in the command line's words
    CheckpointError: "Pass --fresh to start over, or another --out.",
    DiskError: "Make room, or pass another --out.",
    FolderError: "Pass another --out.",
    ForeignStepError: "Move it, or pass another --out.",
    LockedError: "Wait for it, end it, or pass another --out.",
    NotFiniteError: "Try a smaller --learning-rate with --fresh, or with another --out.",
    OutOfMemoryError: "Try more --micro-batches, --remat offload or a smaller --length.",
}


_LONGEST = 2000  # characters of a message


def in_one_line(error: Exception) -> str:
    """A message for the terminal.

    Args:
        error: its text may come from a file, and so be of any length.

    Returns:
        One line. The middle of a long one is left out: it begins with what is wrong, and ends with the cure.

    Example:
        >>> in_one_line(ValueError("no   room"))
        'no room'
    """
    text = str(error)
    if len(text) > _LONGEST:
        half = _LONGEST // 2
        text = f"{text[:half]} … ({len(text) - 2 * half:,} characters are left out) … {text[-half:]}"
    return " ".join(text.split())


def exit_code(command: str, work: Callable[[], int]) -> int:
    """Does a command's work, and prints an error that the user can mend as one sentence.

    Args:
        command: its name.
        work: returns the exit code.

    Returns:
        That code; 2 for an error, and 130 for Ctrl-C.
    """
    try:
        return work()
    except UserError as error:
        print(f"liger-jax {command}:", in_one_line(error), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


class UserError(ValueError):
    """An error that whoever typed the command can mend; the message says how."""


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """A context for code that depends on flags and files: the user can mend its errors.

    Raises:
        UserError: for a ValueError, OSError or ImportError, with its message.
    """
    try:
        yield
    except UserError:
        raise
    except (ValueError, OSError, ImportError) as error:
        raise UserError(str(error)) from error


@contextlib.contextmanager
def training_errors() -> Iterator[None]:
    """A context for a training run, whose errors get the cure in the words of the command line.

    Raises:
        UserError: for a TrainingError.
    """
    try:
        yield
    except TrainingError as error:
        raise UserError(f"{error.problem} {_CURES.get(type(error), error.cure)}".rstrip()) from error


@contextlib.contextmanager
def refusals_kept(refused: dict[str, UserError] | None, where: str) -> Iterator[None]:
    """A context for a file or a line of the data, so that what is behind one that is refused is read as well.

    Args:
        refused: where its error goes, by `where`; `None` to end with the first error.
        where: the file or line, in words.

    Raises:
        UserError: the line's, if `refused` is `None`.
    """
    try:
        yield
    except UserError as error:
        if refused is None:
            raise
        refused[where] = error


@contextlib.contextmanager
def needed_packages() -> Iterator[None]:
    """A context for imports of packages that only the extra `finetune` installs.

    Raises:
        UserError: a package is missing; the message has the command that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package == "liger_jax":
            raise
        raise UserError(f"The package {package!r} is missing: {install_command('finetune')}.") from error


def need(*packages: str) -> None:
    """Looks at the start of a run for packages that are imported late.

    Args:
        packages: their names.

    Raises:
        UserError: one is not installed.
    """
    for package in packages:
        with needed_packages():
            if importlib.util.find_spec(package) is None:
                raise ModuleNotFoundError(name=package)


@training_errors()
def writable_folder(folder: Path) -> None:
    """Makes a folder, if there is none.

    Args:
        folder: a path, as it was typed.

    Raises:
        UserError: it cannot be made, or nothing can be written there.
    """
    check_writable(folder)
