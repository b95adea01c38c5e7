"""`liger-jax data`: shows the rows that `liger-jax finetune` would train on, and which of their tokens are scored.

liger-jax data --model Qwen/Qwen2.5-0.5B-Instruct chats.jsonl
liger-jax data --model ./llama 'letters/*.txt' --pack --length 1024 --rows 1
liger-jax data --model ./llama chats.jsonl --check

The model's weights are not needed. Scored tokens are green, or underlined where the output has no colours.
"""

import argparse
import os
import sys

import jax

from liger_jax.commands._errors import UserError, in_one_line, needed_packages
from liger_jax.commands._settings import add_data_arguments, settings_of

SUMMARY = "show your text or conversations as they would be trained on"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of `liger-jax data`, most of them those of `liger-jax finetune`.

    Args:
        command: its parser.
    """
    what = "as finetune's --data: files, globs, folders, a dataset's id"
    command.add_argument("data", nargs="*", default=argparse.SUPPRESS, metavar="FILE", help=what)
    command.add_argument("--data", nargs="+", metavar="DATA", help="the same, as the commands that train take it")
    command.add_argument("--model", required=True, help="a checkpoint's folder, or an id such as Qwen/Qwen2.5-0.5B")
    add_data_arguments(command)
    command.add_argument("--rows", type=int, default=3, help="how many rows are shown (default: 3)")
    command.add_argument("--check", action="store_true", help="show no rows, but every line that would be refused")


def run(args: argparse.Namespace) -> int:
    """Shows or checks the data.

    Args:
        args: the parsed arguments that `add_arguments` has added.

    Returns:
        The exit code: 0, 1 if `--check` has found something, or 2 for an error.
    """
    if "JAX_PLATFORMS" not in os.environ:  # nothing is trained, and looking for an accelerator takes seconds
        jax.config.update("jax_platforms", "cpu")
    try:
        if args.rows < 1:
            raise UserError(f"--rows={args.rows} must be at least 1.")
        if not args.data:
            raise UserError("no data: name files, globs, folders or a dataset's id, such as --data chats.jsonl.")
        settings = settings_of(args)
        with needed_packages():
            from liger_jax.commands import _show
        if args.check:
            return _show.check(settings, shorten=args.length is None)
        _show.show(settings, args.rows, shorten=args.length is None)
        return 0
    except BrokenPipeError:  # who reads it, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        return 1
    except UserError as error:
        print("liger-jax data:", in_one_line(error), file=sys.stderr)
        return 2
