"""How a program ends: a user's error is one sentence and exit code 2; a bug is a traceback."""

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path


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
def needed_packages(name: str) -> Iterator[None]:
    """A context for a program's imports, which tells whoever starts it which package is missing and how to get it.

    Args:
        name: the module's `__name__`. Where others import it, the ModuleNotFoundError is theirs.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if name != "__main__" or package in ("examples", "liger_jax"):
            raise
        _print_error(f"the package {package!r} is missing. In the checkout's folder: pip install -e '.[examples]'")
        sys.exit(2)


def run(main: Callable[[list[str] | None], None], argv: list[str] | None = None) -> int:
    """Runs a program.

    Args:
        main: takes the program's arguments.
        argv: the arguments; the command line's if none.

    Returns:
        The exit code: 0, or 2 after a `UserError`. The error's sentence is printed.
    """
    try:
        main(argv)
    except UserError as error:
        _print_error(" ".join(str(error).split()))
        return 2
    return 0


def steps_and_folder(argv: list[str] | None, steps: int, out: str) -> tuple[int, Path]:
    """The two flags of a program that trains a tiny model: --steps and --out.

    Args:
        argv: the program's arguments; the command line's if none.
        steps: the default of --steps.
        out: the default of --out.

    Returns:
        The number of steps, and the folder for the picture, which exists.

    Raises:
        UserError: there is no step to take, or nothing can be written to the folder.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=steps, help="training steps (default: %(default)s)")
    parser.add_argument("--out", default=out, help="folder for the picture (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.steps < 1:
        raise UserError(f"--steps={args.steps} must be at least 1.")
    writable_folder(Path(args.out))
    return args.steps, Path(args.out)


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


def _print_error(text: str) -> None:
    print(f"{Path(sys.argv[0]).stem}: {text}", file=sys.stderr)
