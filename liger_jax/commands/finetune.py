"""`liger-jax finetune`: trains a model on your text or conversations.

liger-jax finetune --model Qwen/Qwen2.5-0.5B --data 'letters/*.txt' --pack
liger-jax finetune --model ./llama --data chats.jsonl --lora 16 --batch 8 --micro-batches 4
liger-jax finetune --model ./llama --data org/dataset --lora 16 --quantize nf4 --log csv,tensorboard
liger-jax finetune --config runs/finetune/settings.toml --learning-rate 1e-4 --out runs/other

A run writes its options to OUT/settings.toml, which --config reads.

If Ctrl-C, kill or a closed terminal stops a run, it saves its state, and the same command continues it. transformers
loads OUT/model or OUT/adapters.
"""

import argparse
import sys

from liger_jax.commands._errors import UserError, in_one_line, needed_packages
from liger_jax.commands._settings import ALTERNATIVES as ALTERNATIVES
from liger_jax.commands._settings import add_training_arguments, settings_of
from liger_jax.training.listening import listened_or_not

SUMMARY = "train a model on your text or conversations"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of `liger-jax finetune`: those of every command that trains.

    Args:
        command: its parser.
    """
    add_training_arguments(command)


def run(args: argparse.Namespace) -> int:
    """Fine-tunes, and prints a user's error as one sentence.

    Args:
        args: the parsed arguments that `add_arguments` has added.

    Returns:
        The exit code: 0, 2 for what the user can mend, or 128 and a signal's number if one stopped the run.
    """
    try:
        settings = settings_of(args)
        with needed_packages():
            from liger_jax.commands import _run
        with listened_or_not():
            return _run.finetune(settings)
    except UserError as error:
        print("liger-jax finetune:", in_one_line(error), file=sys.stderr)
        return 2
    except MemoryError:
        print("liger-jax finetune: This machine has too little memory. Pass a smaller --batch.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # the training loop has a handler of its own
        print("liger-jax finetune: stopped outside of training; nothing new is saved.", file=sys.stderr)
        return 130
