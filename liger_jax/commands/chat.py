"""`liger-jax chat`: talks with a model.

liger-jax chat --model runs/finetune
liger-jax chat --model Qwen/Qwen2.5-0.5B-Instruct --system 'Answer in rhymes.' --temperature 0.7

/new begins another conversation, Ctrl-C ends an answer, and Ctrl-D ends the talk.
"""

import argparse

from liger_jax.commands._exit_code import exit_code
from liger_jax.commands._generation import add_generation_arguments, generation_of
from liger_jax.user_errors import needed_packages

SUMMARY = "talk with a model"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of `liger-jax chat`."""
    add_generation_arguments(command)


def run(args: argparse.Namespace) -> int:
    """Talks until the input ends."""

    def work():
        options = generation_of(args)
        with needed_packages():
            from liger_jax.commands import _terminal
        return _terminal.chat(options)

    return exit_code(args, work)
