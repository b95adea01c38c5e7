"""`liger-jax finetune`: trains a model on your text or conversations.

liger-jax finetune --model Qwen/Qwen2.5-0.5B --data 'letters/*.txt' --pack
liger-jax finetune --model ./llama --data chats.jsonl --lora 16 --batch 8 --micro-batches 4
liger-jax finetune --model ./llama --data org/dataset --lora 16 --quantize nf4 --log csv,tensorboard

If Ctrl-C, kill or a closed terminal stops a run, it saves its state, and the same command continues it. transformers
loads OUT/model or OUT/adapters.
"""

import argparse
import sys

from liger_jax.commands._errors import UserError, in_one_line, needed_packages
from liger_jax.commands._settings import DTYPES, SAVE_DTYPES, add_data_arguments, settings_of
from liger_jax.ops.block_quantized import KINDS
from liger_jax.planner.step import REMATS
from liger_jax.training.listening import listened_or_not

SUMMARY = "train a model on your text or conversations"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of `liger-jax finetune`: one for each field of `Settings`.

    Args:
        command: its parser.
    """
    add = command.add_argument
    add("--model", required=True, help="a checkpoint's folder, or an id such as Qwen/Qwen2.5-0.5B")
    data = "text, or rows of text or messages: files, globs, folders, a dataset's id; FILE=2 takes its rows twice"
    add("--data", nargs="+", required=True, metavar="DATA", help=data)
    add_data_arguments(command)
    add("--stream", action="store_true", help="read a dataset from the hub while the run goes on; needs --steps")
    add("--lora", type=int, nargs="?", const=16, metavar="RANK", help="train adapters of this rank (default: 16)")
    add("--lora-alpha", type=float, help="numerator of their scale (default: twice the rank)")
    add("--quantize", choices=KINDS, help="hold the frozen weights of layers in 4 or 8 bits")
    add("--batch", type=int, help="rows in a step (default: 8)")
    add("--micro-batches", type=int, help="equal parts of a batch, one after the other (default: 1)")
    add("--epochs", type=float, help="how often each row is trained on, such as 2.5 (default: 1)")
    add("--steps", type=int, help="training steps, in the place of --epochs")
    add("--learning-rate", type=float, help="the peak (default: 1e-5, with --lora 2e-4)")
    add("--remat", choices=REMATS, help="what layers keep for the backward (default: full, which keeps least)")
    add("--dtype", choices=DTYPES, help="of the computation (default: bfloat16, on a CPU float32)")
    add("--param-dtype", choices=DTYPES, help="of the weights (default: float32, with --lora the checkpoint's own)")
    add("--every", type=int, help="steps between checkpoints, each with an evaluation (default: 100)")
    add("--keep", type=int, help="newest checkpoints to keep, beside the best by held-out loss (default: 1)")
    add("--log", type=lambda text: tuple(text.split(",")), help="csv, tensorboard or both (default: csv)")
    add("--out", help="folder for checkpoints, logs and the result (default: runs/finetune)")
    add("--merge", action="store_true", help="add the adapters to the weights in the result")
    add("--save-dtype", choices=SAVE_DTYPES, help="of the weights in the result (default: as the model came)")
    add("--fresh", action="store_true", help="start over, whatever checkpoint there is")
    add("--verify", action="store_true", help="read all weights to know that the model is still the run's")


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
