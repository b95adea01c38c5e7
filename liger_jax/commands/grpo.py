"""`liger-jax grpo`: trains a model by rewarding its completions.

liger-jax grpo --model Qwen/Qwen2.5-0.5B-Instruct --data prompts.jsonl --reward rewards:right --lora 16
liger-jax grpo --model ./llama --data prompts.jsonl --reward rewards:right rewards:short=0.2 --loss-type dapo
liger-jax grpo --config runs/grpo/settings.toml --beta 0.02 --out runs/other

Each line of the data has a `prompt`, a text or messages. A reward is a function in a module of the current folder,
or in an installed one, with TRL's signature: it takes `completions`, `prompts` and the lines' fields by name,
each a list over the whole batch, and returns a number for each completion.
"""

import argparse

from liger_jax.commands._arguments import ALTERNATIVES as ALTERNATIVES
from liger_jax.commands._arguments import add_options
from liger_jax.commands._training_command import trained
from liger_jax.trainers.grpo_options import GrpoSettings

SUMS = {"length": ("prompt_length", "completion_length")}
SUMMARY = "train a model by rewarding its completions"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of `liger-jax grpo`."""
    add_options(command, GrpoSettings)


def run(args: argparse.Namespace) -> int:
    """Trains, and prints a user's error as one sentence."""
    return trained("grpo", args, "grpo.TASK", GrpoSettings)
