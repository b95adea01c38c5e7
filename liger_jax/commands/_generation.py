"""The options that `liger-jax generate` and `liger-jax chat` share: which model runs, and how tokens are chosen."""

import argparse
import dataclasses

from liger_jax._options import LEAST_FLOAT, MOST, MOST_FLOAT
from liger_jax.ops.block_quantized import KINDS
from liger_jax.trainers.options import DTYPES
from liger_jax.user_errors import UserError, is_text

MOST_NEW_TOKENS = 512


@dataclasses.dataclass(frozen=True)
class Generation:
    """Who speaks, and how."""

    model: str  # a folder of a run, a checkpoint or adapters, or an id such as "org/name"
    base: str | None = None  # the model that adapters belong to; `None` for the one that they name
    quantize: str | None = None  # how the weights of layers are held, "nf4" or "int8"; `None` for as they are
    dtype: str | None = None  # dtype of the computation; `None` for float32 on a CPU and bfloat16 elsewhere
    # The most tokens of a text; `None` for `MOST_NEW_TOKENS`, or for what the model still takes.
    max_new_tokens: int | None = None
    temperature: float = 0.0  # 0 takes the likeliest token
    top_p: float = 1.0  # the share of the likeliest tokens' probability that is drawn from
    top_k: int | None = None  # how many of the likeliest tokens are drawn from; `None` for all
    seed: int = 0  # seed of random tokens
    system: str | None = None  # the first message of a conversation; `None` for none

    def __post_init__(self):
        if self.system is not None and not is_text(self.system):
            raise UserError(f"--system={ascii(self.system)} is not valid UTF-8.")
        for name in ("max_new_tokens", "top_k"):
            if (value := getattr(self, name)) is not None and not 1 <= value <= MOST:
                raise UserError(f"--{name.replace('_', '-')}={value} must be at least 1 and at most {MOST}.")
        if not (self.temperature == 0 or LEAST_FLOAT <= self.temperature <= MOST_FLOAT):
            raise UserError(
                f"--temperature={self.temperature} must be 0, for the most likely token, or a positive number "
                "that float32 can represent."
            )
        if not LEAST_FLOAT <= self.top_p <= 1:
            raise UserError(f"--top-p={self.top_p} must be above 0 as a float32, and at most 1.")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"--seed={self.seed} must be at least 0 and below 2**32.")
        for name, given in (("top-p", self.top_p != 1), ("top-k", self.top_k is not None)):
            if given and self.temperature == 0:
                raise UserError(f"--{name} is for sampling: pass --temperature, such as --temperature 0.7, as well.")


def add_generation_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments that say which model speaks, and how: one for each field of `Generation`."""
    add = command.add_argument
    add("--model", required=True, help="a run's --out, a checkpoint's or adapters' folder, or an id")
    add("--base", metavar="MODEL", help="the model that adapters belong to (default: the one that they name)")
    add("--quantize", choices=KINDS, help="quantize the weights of the layers to 4 or 8 bits")
    add("--dtype", choices=DTYPES, help="dtype of the computation (default: bfloat16, on a CPU float32)")
    add("--max-new-tokens", type=int, metavar="N", help=f"the most tokens to generate (default: {MOST_NEW_TOKENS})")
    add(
        "--temperature",
        type=float,
        help="sampling temperature, such as 0.7; 0 always takes the most likely token (default: 0)",
    )
    add(
        "--top-p", type=float, help="sample from the most likely tokens whose probabilities add up to this (default: 1)"
    )
    add("--top-k", type=int, help="sample from this many of the most likely tokens (default: all)")
    add("--seed", type=int, help="seed of sampling (default: 0)")
    add("--system", metavar="TEXT", help="the system message of the conversation")


def generation_of(args: argparse.Namespace) -> Generation:
    """Who speaks, and how."""
    fields = {field.name for field in dataclasses.fields(Generation)}
    return Generation(**{k: v for k, v in vars(args).items() if k in fields and v is not None})
