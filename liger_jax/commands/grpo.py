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
from liger_jax.commands._arguments import add_rope_argument, add_training_arguments
from liger_jax.commands._training_command import trained
from liger_jax.trainers.grpo_options import ADVANTAGES, CORRECTIONS, LEVELS, LOSS_TYPES, GrpoSettings

SUMS = {"length": ("prompt_length", "completion_length")}
SUMMARY = "train a model by rewarding its completions"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of `liger-jax grpo`."""
    add = command.add_argument
    data = "lines with a prompt: files, globs, folders, a dataset's id; FILE=2 takes its lines twice"
    add("--data", nargs="+", required=True, metavar="DATA", help=data)
    add("--subset", help="the dataset's configuration")
    add(
        "--reward",
        nargs="+",
        metavar="MODULE:FUNCTION",
        help="functions that score completions; MODULE:FUNCTION=0.5 sets a weight",
    )
    timeout = f"the most seconds that a call of a reward may take (default: {GrpoSettings.reward_timeout:g})"
    add("--reward-timeout", type=float, metavar="SECONDS", help=timeout)
    add("--group", type=int, help=f"completions sampled per prompt (default: {GrpoSettings.group})")
    add("--prompt-length", type=int, help=f"the most tokens of a prompt (default: {GrpoSettings.prompt_length})")
    add(
        "--completion-length",
        type=int,
        help=f"the most tokens of a completion (default: {GrpoSettings.completion_length})",
    )
    add("--temperature", type=float, help="temperature of sampling, and of the policy's probabilities (default: 1)")
    add(
        "--top-p", type=float, help="sample from the most likely tokens whose probabilities add up to this (default: 1)"
    )
    add("--top-k", type=int, help="sample from this many of the most likely tokens (default: all)")
    add("--loss-type", choices=LOSS_TYPES, help="type of the policy loss (default: dapo)")
    add(
        "--importance-level",
        choices=LEVELS,
        help="compute importance ratios per token or per sequence (default: token)",
    )
    add("--advantages", choices=ADVANTAGES, help="how advantages are computed from rewards (default: grpo)")
    add("--epsilon-low", type=float, help="clip the ratio at 1 minus this (default: 0.2)")
    add("--epsilon-high", type=float, help="clip the ratio at 1 plus this (default: --epsilon-low)")
    add(
        "--delta",
        type=float,
        help="upper bound of the ratio where the advantage is negative, as in two-sided clipping (default: none)",
    )
    add("--beta", type=float, help="weight of the KL penalty towards the model without its adapters (default: 0)")
    add(
        "--importance-sampling",
        choices=CORRECTIONS,
        help="correct for the sampler's rounding differing from the policy's (default: no)",
    )
    add("--importance-max", type=float, help=f"the correction's largest ratio (default: {GrpoSettings.importance_max})")
    add("--updates", type=int, help="updates of the policy for each step's completions (default: 1)")
    add("--mask-truncated", action="store_true", help="exclude truncated completions from the loss")
    add("--length", type=int, help="tokens in a packed row (default: --prompt-length plus --completion-length)")
    add("--seed", type=int, help="seed of all random numbers (default: 0)")
    add_rope_argument(command)
    add_training_arguments(command, GrpoSettings)


def run(args: argparse.Namespace) -> int:
    """Trains, and prints a user's error as one sentence."""
    return trained("grpo", args, "grpo.TASK", GrpoSettings)
