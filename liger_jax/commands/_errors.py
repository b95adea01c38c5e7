"""A user's errors: one sentence that says how to mend them, and exit code 2. A bug stays a traceback."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from liger_jax._install import install_command


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


def writable_folder(folder: Path) -> None:
    """Makes a folder, if there is none.

    Args:
        folder: a path, as it was typed.

    Raises:
        UserError: it cannot be made, or nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"Nothing can be written to {folder}: {error.strerror}. Pass another --out.") from error
