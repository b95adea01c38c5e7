"""How a program ends: a user's error is one sentence and exit code 2; a bug is a traceback."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


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


def run(main: Callable[[list[str]], Any], argv: list[str] | None = None) -> int:
    """Runs a program. Its compiled programs are kept for the next start, unless --no-cache is among its arguments.

    Args:
        main: takes the program's other arguments.
        argv: the arguments; the command line's if none.

    Returns:
        The exit code: 0, or 2 after a `UserError`. The error's sentence is printed.
    """
    from liger_jax.training.compiled_programs import compiled_programs_kept
    from liger_jax.user_errors import UserError  # `needed_packages` comes before

    arguments = sys.argv[1:] if argv is None else argv
    try:
        with compiled_programs_kept("--no-cache" not in arguments):
            main([argument for argument in arguments if argument != "--no-cache"])
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
    flags = all_flags(argparse.ArgumentParser(), argv, steps, out)
    return flags.steps, flags.out


def all_flags(parser: argparse.ArgumentParser, argv: list[str] | None, steps: int, out: str) -> argparse.Namespace:
    """The flags of a program that has others beside --steps and --out.

    Args:
        parser: knows the others.
        argv: the program's arguments; the command line's if none.
        steps: the default of --steps.
        out: the default of --out.

    Returns:
        All flags. `out` is the path of a folder that exists.

    Raises:
        UserError: there is no step to take, or nothing can be written to the folder.
    """
    from liger_jax.trainers.errors import writable_folder
    from liger_jax.user_errors import UserError

    parser.add_argument("--steps", type=int, default=steps, help="training steps (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path(out), help="folder for the picture (default: %(default)s)")
    flags = parser.parse_args(argv)
    if flags.steps < 1:
        raise UserError(f"--steps={flags.steps} must be at least 1.")
    writable_folder(flags.out)
    return flags


def _print_error(text: str) -> None:
    print(f"{Path(sys.argv[0]).stem}: {text}", file=sys.stderr)
