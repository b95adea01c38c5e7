"""`liger-jax grpo`: trains a model by rewards of what it writes.

liger-jax grpo --model Qwen/Qwen2.5-0.5B-Instruct --data prompts.jsonl --reward rewards:right --lora 16
liger-jax grpo --model ./llama --data prompts.jsonl --reward rewards:right rewards:short=0.2 --loss-type dapo
liger-jax grpo --config runs/grpo/settings.toml --beta 0.02 --out runs/other

Each line of the data has a `prompt`, a text or messages. A reward is a function of yours, in a module of the current
folder or an installed one, and has TRL's signature: it takes `completions`, `prompts` and the lines' fields by name,
each a list over the whole batch, and returns a number for each completion.
"""

import argparse

from liger_jax.commands._arguments import ALTERNATIVES as ALTERNATIVES
from liger_jax.commands._arguments import add_rope_argument, add_training_arguments
from liger_jax.commands._training_command import trained
from liger_jax.trainers.grpo_options import ADVANTAGES, CORRECTIONS, LEVELS, LOSS_TYPES, GrpoSettings

SUMS = {"length": ("prompt_length", "completion_length")}
SUMMARY = "train a model by rewards of what it writes"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of `liger-jax grpo`."""
    add = command.add_argument
    data = "lines with a prompt: files, globs, folders, a dataset's id; FILE=2 takes its lines twice"
    add("--data", nargs="+", required=True, metavar="DATA", help=data)
    add("--subset", help="the dataset's configuration")
    add("--reward", nargs="+", metavar="MODULE:FUNCTION", help="what scores completions; MODULE:FUNCTION=0.5 weighs it")
    timeout = f"seconds that a call of one may take (default: {GrpoSettings.reward_timeout:g})"
    add("--reward-timeout", type=float, metavar="SECONDS", help=timeout)
    add("--group", type=int, help=f"completions of a prompt (default: {GrpoSettings.group})")
    add("--prompt-length", type=int, help=f"the most tokens of a prompt (default: {GrpoSettings.prompt_length})")
    add("--completion-length", type=int, help=f"the most tokens of one (default: {GrpoSettings.completion_length})")
    add("--temperature", type=float, help="of sampling, and of the policy (default: 1)")
    add("--top-p", type=float, help="draw from the likeliest tokens with this probability together (default: 1)")
    add("--top-k", type=int, help="draw from so many of the likeliest tokens (default: all)")
    add("--loss-type", choices=LOSS_TYPES, help="how the policy's loss is made (default: dapo)")
    add("--importance-level", choices=LEVELS, help="what has a ratio, a token or a sequence (default: token)")
    add("--advantages", choices=ADVANTAGES, help="how rewards become advantages (default: grpo)")
    add("--epsilon-low", type=float, help="how far the ratio may fall (default: 0.2)")
    add("--epsilon-high", type=float, help="how far it may rise (default: as far as it may fall)")
    add("--delta", type=float, help="the largest ratio of a worse completion (default: none)")
    add("--beta", type=float, help="weight of the distance from the model without its adapters (default: 0)")
    add("--importance-sampling", choices=CORRECTIONS, help="correct for the sampler's own rounding (default: no)")
    add("--importance-max", type=float, help=f"the correction's largest ratio (default: {GrpoSettings.importance_max})")
    add("--updates", type=int, help="of the policy on a step's completions (default: 1)")
    add("--mask-truncated", action="store_true", help="leave completions out of the loss that were cut off")
    add("--length", type=int, help="tokens in a packed row (default: a longest prompt's and completion's)")
    add("--seed", type=int, help="of all that is random (default: 0)")
    add_rope_argument(command)
    add_training_arguments(command, GrpoSettings)


def run(args: argparse.Namespace) -> int:
    """Trains, and prints a user's error as one sentence."""
    return trained("grpo", args, "grpo.TASK", GrpoSettings)
