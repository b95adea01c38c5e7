"""`liger-jax generate`: continues a text, or answers a message.

liger-jax generate --model runs/finetune --prompt 'Once upon a time'
liger-jax generate --model Qwen/Qwen2.5-0.5B-Instruct --chat --prompt 'Who wrote Faust?' --temperature 0.7 --top-k 50
liger-jax generate --model runs/finetune --file prompts.jsonl --max-new-tokens 100

A file of JSON lines holds a prompt or messages in each; another file is one prompt. The text goes to the standard
output, and its length and speed to the standard error.
"""

import argparse

from liger_jax.commands._exit_code import exit_code
from liger_jax.commands._generation import add_generation_arguments, generation_of
from liger_jax.user_errors import UserError, is_text, needed_packages

SUMMARY = "continue a text, or answer a message"
ALTERNATIVES = (("prompt", "file"),)


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of `liger-jax generate`."""
    add_generation_arguments(command)
    command.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    command.add_argument("--file", help="read prompts from a file: one text, or JSON lines with a prompt or messages")
    command.add_argument(
        "--chat",
        action="store_true",
        help="treat --prompt as a user's message, by the chat template (default: as the beginning of a text)",
    )


def run(args: argparse.Namespace) -> int:
    """Generates."""

    def work():
        options = generation_of(args)
        if (args.prompt is None) == (args.file is None):
            raise UserError("Pass either --prompt TEXT or --file FILE.")
        if not is_text(args.prompt or ""):
            raise UserError(f"--prompt={ascii(args.prompt)} is not valid UTF-8.")
        if options.system is not None and not args.chat and args.prompt is not None:
            raise UserError("--system is for conversations: pass --chat as well.")
        with needed_packages():
            from liger_jax.commands import _terminal
        return _terminal.generate(options, args.prompt, args.file, bool(args.chat))

    return exit_code(args, work)
