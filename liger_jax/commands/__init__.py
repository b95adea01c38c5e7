"""The command `liger-jax`: `plan`, `data`, `finetune`, `dpo`, `grpo`, `distill`, `generate`, `chat` and `doctor`.

Each is a file with the command's summary, its arguments and its work. The package has the command line: the parser,
files of options, and the terminal's output. `liger_jax.trainers` has the training.
"""

import argparse
import contextlib
import functools
import sys

from liger_jax import _interrupt
from liger_jax._install import version
from liger_jax.commands import _warnings, chat, data, distill, doctor, dpo, finetune, generate, grpo, plan
from liger_jax.commands._parser import Parser
from liger_jax.planner import cards
from liger_jax.training import processes, user_caches, waiting
from liger_jax.training.compiled_programs import compiled_programs_kept
from liger_jax.training.listening import OutputError, output_needed

_COMMANDS = {
    "plan": plan, "data": data, "finetune": finetune, "dpo": dpo, "grpo": grpo, "distill": distill,
    "generate": generate, "chat": chat, "doctor": doctor,
}  # fmt: skip

_WITHOUT_DEVICES = ("plan", "data")


def main(argv: list[str] | None = None) -> int:
    """Runs the command.

    Returns its exit code: 2 for an error of the user's, 1 if the output is closed, and 130 for Ctrl-C.
    """
    _interrupt.is_over()
    if argv is not None and list(argv) != sys.argv[1:]:  # called by a program, which must not be ended
        return _main(argv)
    code = _main(argv, owns_process=True)
    if waiting.is_busy():
        processes.leave(code)
    return code


def _main(argv: list[str] | None, owns_process: bool = False) -> int:
    name = ""
    try:
        with output_needed():
            args = _parsers()[0].parse_args(argv)
            name, args.owns_process = f" {args.command}", owns_process
            if owns_process and args.command not in _WITHOUT_DEVICES:
                place = getattr(args, "distributed", None)
                if held := cards.take(are_several=place is not None, one_each=place == ""):
                    print(f"liger-jax{name}: {held}", file=sys.stderr)
            with (
                compiled_programs_kept(args.cache is not False),
                user_caches.used(args.cache is not False),
                _warnings.in_one_line(),
                _warnings.retries_reported_once(),
            ):
                return _said_of_file(args)
    except KeyboardInterrupt:
        if not owns_process:
            raise
        print(f"liger-jax{name}: {_interrupt.STOPPED.partition(': ')[2]}", file=sys.stderr)
        return 130
    except OutputError as error:
        if error.is_unread:  # its reader, such as `head`, has closed it
            return 1
        with contextlib.suppress(OSError):
            print(f"liger-jax{name}: {error}", file=sys.stderr)
        return 2


def _said_of_file(args: argparse.Namespace) -> int:
    """Runs the command, and says which options of its file are not read: before a run, and after an answer."""
    tell = lambda: print(*args.of_file, sep="\n", file=sys.stderr) if args.of_file else None
    if args.command not in _WITHOUT_DEVICES:
        tell()
    code = args.run(args)
    if args.command in _WITHOUT_DEVICES:
        tell()
    return code


@functools.cache
def option_names() -> frozenset[str]:
    """The names of all commands' options, as a file of options may have them."""
    return frozenset(action.dest for each in _parsers()[1] for action in each._actions) - {"help", "help_all", "config"}


def _parsers() -> tuple[Parser, list[Parser]]:
    """The parser, and those of the commands."""
    about = "Kernels and models for training in JAX."
    parser = Parser(prog="liger-jax", description=about, epilog="liger-jax COMMAND --help shows a command's options.")
    parser.add_argument("--version", action="version", version=f"liger-jax {version()}")
    commands = parser.add_subparsers(required=True, metavar="command")
    parsers = []
    for name, command in _COMMANDS.items():
        subparser = commands.add_parser(
            name,
            help=command.SUMMARY,
            epilog=command.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            alternatives=getattr(command, "ALTERNATIVES", ()),
            sums=getattr(command, "SUMS", None),
            known=option_names,
        )
        command.add_arguments(subparser)
        add = subparser.add_argument
        add("--config", metavar="FILE", help="a TOML file of these options; the command line takes precedence")
        add("--cache", action="store_true", help="cache compiled programs and tokens for other starts (default: yes)")
        named = {action.dest: action.option_strings[0] for action in subparser._actions if action.option_strings}
        subparser.set_defaults(run=command.run, command=name, options=named, of_file=[])
        parsers.append(subparser)
    return parser, parsers
