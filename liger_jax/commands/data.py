"""`liger-jax data`: shows the rows that `finetune` or `dpo` would train on, and which of their tokens are scored.

liger-jax data --model Qwen/Qwen2.5-0.5B-Instruct chats.jsonl
liger-jax data --model ./llama 'letters/*.txt' --pack --length 1024 --rows 1
liger-jax data --model ./llama chats.jsonl --check
liger-jax data --model ./llama pairs.jsonl --loss sigmoid

The model's weights are not needed. Scored tokens are green, or underlined where the output has no colours.
"""

import argparse
import os
from typing import Any

import jax

from liger_jax.commands._arguments import add_options, settings_of
from liger_jax.commands._exit_code import exit_code
from liger_jax.trainers.finetune_options import FinetuneOptions
from liger_jax.trainers.options import Settings
from liger_jax.user_errors import UserError, needed_packages

_OPTIONS = ("eval_data", "subset", "column", "format", "pack", "length", "rope_scaling", "eval_share", "seed")
SUMMARY = "show your text or conversations as they would be trained on"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of `liger-jax data`, most of them those of `liger-jax finetune`."""
    what = "as finetune's --data: files, globs, folders, a dataset's id"
    command.add_argument("files", nargs="*", metavar="FILE", help=what)
    command.add_argument(
        "--data", nargs="+", metavar="DATA", help="the same, under the name that the training commands use"
    )
    command.add_argument("--model", required=True, help="a checkpoint's folder, or an id such as Qwen/Qwen2.5-0.5B")
    add_options(command, FinetuneOptions, _OPTIONS)
    loss = "one of dpo's losses: shows pairs (sigmoid) or single answers (kto) instead of finetune's rows"
    command.add_argument("--loss", dest="loss_type", metavar="LOSS", help=loss)
    command.add_argument("--rows", type=int, default=3, help="how many rows are shown (default: 3)")
    command.add_argument(
        "--check", action="store_true", help="list every line that would be refused, instead of showing rows"
    )


def run(args: argparse.Namespace) -> int:
    """Shows or checks the data. Returns the exit code: 0, 1 if `--check` has found something, or 2 for an error."""
    if "JAX_PLATFORMS" not in os.environ:  # nothing is trained, and looking for an accelerator takes seconds
        jax.config.update("jax_platforms", "cpu")

    def work():
        if args.rows < 1:
            raise UserError(f"--rows={args.rows} must be at least 1.")
        args.data = [*args.files, *(args.data or [])]
        if not args.data:
            raise UserError("no data: name files, globs, folders or a dataset's id, such as --data chats.jsonl.")
        settings = settings_of(args, FinetuneOptions) if args.loss_type is None else _of_pairs(args)
        with needed_packages():
            from liger_jax.commands import _show
        if args.check:
            return _show.check(settings, shorten=args.length is None)
        _show.show(settings, args.rows, shorten=args.length is None)
        return 0

    return exit_code(args, work)


def _of_pairs(args: argparse.Namespace) -> Settings[Any]:
    """The settings of a run of `liger-jax dpo`."""
    for name in ("column", "format"):
        if getattr(args, name) is not None:
            raise UserError(f"--{name} does not go with --loss: the fields of pairs have one name each. Leave it out.")
    with needed_packages():
        from liger_jax.trainers.dpo_options import PairOptions
    # The loss's other options do not affect its rows.
    smoothing = dict(label_smoothing=0.1) if {"exo_pair", "robust"} & {*args.loss_type.split(",")} else {}
    return settings_of(argparse.Namespace(**vars(args), **smoothing), PairOptions)
