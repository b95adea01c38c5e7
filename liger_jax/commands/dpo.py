"""`liger-jax dpo`: trains a model on pairs of answers, of which one is preferred.

liger-jax dpo --model ./tuned/model --data pairs.jsonl --lora 16
liger-jax dpo --model ./llama --data org/pairs --lora 16 --pack --loss ipo --beta 0.2
liger-jax dpo --model ./llama --data pairs.parquet --loss orpo --learning-rate 5e-6
liger-jax dpo --model ./llama --data answers.jsonl --loss kto --lora 16

A row has chosen and rejected, and perhaps prompt: texts or lists of messages. For kto it has completion and label.

All else is as in `liger-jax finetune`: the same command goes on with a run that was stopped, OUT/settings.toml has the
options, and transformers loads OUT/model or OUT/adapters.
"""

import argparse

from liger_jax.commands._arguments import ALTERNATIVES as ALTERNATIVES
from liger_jax.commands._arguments import add_options
from liger_jax.commands._training_command import trained
from liger_jax.trainers.dpo_options import PairSettings

SUMMARY = "train a model on pairs of answers, of which one is preferred"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of `liger-jax dpo`."""
    add_options(command, PairSettings)


def run(args: argparse.Namespace) -> int:
    """Trains, and prints a user's error as one sentence."""
    return trained("dpo", args, "dpo.of_run", PairSettings)
