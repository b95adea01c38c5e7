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

from liger_jax.commands._arguments import ALTERNATIVES as ALTERNATIVES
from liger_jax.commands._arguments import add_options
from liger_jax.commands._training_command import trained
from liger_jax.trainers.finetune_options import FinetuneSettings

SUMMARY = "train a model on your text or conversations"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of `liger-jax finetune`."""
    add_options(command, FinetuneSettings)


def run(args: argparse.Namespace) -> int:
    """Fine-tunes, and prints a user's error as one sentence."""
    return trained("finetune", args, "task.TEXT", FinetuneSettings)
