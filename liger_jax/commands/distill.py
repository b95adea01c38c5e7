"""`liger-jax distill`: trains a model to give the probabilities of a larger one.

liger-jax distill --model Qwen/Qwen2.5-0.5B --teacher Qwen/Qwen2.5-7B --data 'letters/*.txt' --pack
liger-jax distill --model ./small --teacher ./large --teacher-quantize nf4 --data chats.jsonl --divergence reverse_kl
liger-jax distill --model ./small --teacher ./large --data chats.jsonl --top-k 64 --hard-weight 0.2 --lora 16

Teacher and student have one vocabulary. With --top-k the teacher reads the data once, before the first step, and its
likeliest tokens are in OUT; else it is beside the student in each step.

All else is as in `liger-jax finetune`: the same command goes on with a run that was stopped, OUT/settings.toml has the
options, and transformers loads OUT/model or OUT/adapters.
"""

import argparse

from liger_jax.commands._arguments import add_data_arguments, add_training_arguments
from liger_jax.commands._distill_settings import DistillSettings, add_teacher_arguments
from liger_jax.commands._settings import ALTERNATIVES as ALTERNATIVES
from liger_jax.commands._training_command import trained

SUMMARY = "train a model to give the probabilities of a larger one"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of `liger-jax distill`."""
    data = "text, or rows of text or messages: files, globs, folders, a dataset's id; FILE=2 takes its rows twice"
    command.add_argument("--data", nargs="+", required=True, metavar="DATA", help=data)
    command.add_argument("--stream", action="store_true", help="read a dataset from the hub while the run goes on")
    add_teacher_arguments(command)
    add_data_arguments(command)
    add_training_arguments(command, DistillSettings)


def run(args: argparse.Namespace) -> int:
    """Trains, and prints a user's error as one sentence."""
    return trained("distill", args, "_distill_task.of_run", DistillSettings)
