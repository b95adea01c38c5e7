"""The command `liger-jax` and what it can do: `plan`, `data` and `finetune`."""

import argparse

from liger_jax.commands import _warnings, data, finetune, plan
from liger_jax.commands._cache import compiled_programs_kept as compiled_programs_kept
from liger_jax.commands._errors import UserError as UserError
from liger_jax.commands._errors import training_errors as training_errors
from liger_jax.commands._errors import user_errors as user_errors
from liger_jax.commands._errors import writable_folder as writable_folder
from liger_jax.commands._files import read_texts as read_texts


def main(argv: list[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: its arguments; the command line's if none.

    Returns:
        The exit code, which is 2 for whatever the user can mend.
    """
    parser = argparse.ArgumentParser(prog="liger-jax", description="Kernels and models for training in JAX.")
    commands = parser.add_subparsers(required=True)
    for command in (plan, data, finetune):
        name = command.__name__.rpartition(".")[2]
        subparser = commands.add_parser(
            name, help=command.SUMMARY, epilog=command.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.add_arguments(subparser)
        subparser.add_argument("--no-cache", action="store_true", help="compile anew, and keep no compiled programs")
        subparser.set_defaults(run=command.run)
    args = parser.parse_args(argv)
    with compiled_programs_kept(not args.no_cache), _warnings.in_one_line():
        return args.run(args)
