"""`liger-jax distill`: trains a model to match the probabilities of a larger one.

liger-jax distill --model Qwen/Qwen2.5-0.5B --teacher Qwen/Qwen2.5-7B --data 'letters/*.txt' --pack
liger-jax distill --model ./small --teacher ./large --teacher-quantize nf4 --data chats.jsonl --divergence reverse_kl
liger-jax distill --model ./small --teacher ./large --data chats.jsonl --top-k 64 --hard-weight 0.2 --lora 16

Teacher and student have one vocabulary. With --top-k the teacher reads the data once, before the first step, and its
likeliest tokens are in OUT; else it is beside the student in each step.

All else is as in `liger-jax finetune`: the same command goes on with a run that was stopped, OUT/settings.toml has the
options, and transformers loads OUT/model or OUT/adapters.
"""

import argparse

from liger_jax.commands._arguments import ALTERNATIVES as ALTERNATIVES
from liger_jax.commands._arguments import add_data_arguments, add_training_arguments
from liger_jax.commands._training_command import trained
from liger_jax.ops.block_quantized import KINDS
from liger_jax.ops.linear.fused_linear_distillation import DIVERGENCES
from liger_jax.ops.linear.fused_linear_topk_distillation import TAILS
from liger_jax.trainers.distill_options import DistillSettings

SUMMARY = "train a model to match the probabilities of a larger one"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of `liger-jax distill`."""
    data = "text, or rows of text or messages: files, globs, folders, a dataset's id; FILE=2 takes its rows twice"
    command.add_argument("--data", nargs="+", required=True, metavar="DATA", help=data)
    command.add_argument("--stream", action="store_true", help="stream a dataset from the hub during the run")
    _add_teacher_arguments(command)
    add_data_arguments(command)
    add_training_arguments(command, DistillSettings)


def run(args: argparse.Namespace) -> int:
    """Trains, and prints a user's error as one sentence."""
    return trained("distill", args, "distillation.of_run", DistillSettings)


def _add_teacher_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of the teacher and of the loss."""
    add = command.add_argument
    add("--teacher", required=True, metavar="MODEL", help="a folder or an id, with the tokenizer of --model")
    add("--teacher-quantize", choices=KINDS, help="quantize the teacher's weights to 4 or 8 bits")
    add("--divergence", choices=DIVERGENCES, help="divergence between student and teacher (default: forward_kl)")
    add("--beta", type=float, help="the teacher's weight in the mixture, for jsd (default: 0.5)")
    add("--temperature", type=float, help="temperature of both distributions (default: 1)")
    add("--hard-weight", type=float, help="weight, from 0 to 1, of the labels' cross-entropy in the loss (default: 0)")
    add(
        "--top-k",
        type=int,
        metavar="K",
        help="store the teacher's K most likely tokens before training (default: run the teacher in each step)",
    )
    add(
        "--tail",
        choices=TAILS,
        help="ignore the tokens that are not stored, or treat them as one event, a bucket (default: bucket)",
    )
