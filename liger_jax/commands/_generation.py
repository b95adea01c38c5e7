"""The options that `liger-jax generate` and `liger-jax chat` share: which model runs, and how tokens are chosen."""

import argparse
import dataclasses

from liger_jax import _options
from liger_jax._options import of_float32, option, up_to_1, within
from liger_jax.ops.block_quantized import KINDS
from liger_jax.trainers.placement import DTYPES
from liger_jax.user_errors import UserError, is_text

MOST_NEW_TOKENS = 512


def _temperature(value: float) -> str:
    holds = value == 0 or not of_float32(value)
    return "" if holds else "must be 0, for the most likely token, or a positive number that float32 can represent."


@dataclasses.dataclass(frozen=True)
class Generation:
    """The model, and how it samples."""

    model: str = option(help="a run's --out, a checkpoint's or adapters' folder, or an id")
    base: str | None = option(
        None, "the model that adapters belong to (default: the one that they name)", metavar="MODEL"
    )
    quantize: str | None = option(None, "quantize the weights of the layers to 4 or 8 bits", choices=KINDS)
    dtype: str | None = option(None, "dtype of the computation (default: bfloat16, on a CPU float32)", choices=DTYPES)
    # `None` for `MOST_NEW_TOKENS`, or for the positions that the model has left, if these are fewer.
    max_new_tokens: int | None = option(
        None, f"the most tokens to generate (default: {MOST_NEW_TOKENS})", check=within(1), metavar="N"
    )
    temperature: float = option(
        0.0, "sampling temperature, such as 0.7; 0 always takes the most likely token (default: {default:g})",
        check=_temperature,
    )  # fmt: skip
    top_p: float = option(
        1.0, "sample from the most likely tokens whose probabilities add up to this (default: {default:g})",
        check=up_to_1,
    )  # fmt: skip
    top_k: int | None = option(None, "sample from this many of the most likely tokens (default: all)", check=within(1))
    seed: int = option(0, "seed of sampling (default: {default})", check=within(0, 2**32 - 1))
    system: str | None = option(None, "the system message of the conversation", metavar="TEXT")

    def __post_init__(self):
        _options.check(self)
        if self.system is not None and not is_text(self.system):
            raise UserError(f"--system={ascii(self.system)} is not valid UTF-8.")
        for name, given in (("top-p", self.top_p != 1), ("top-k", self.top_k is not None)):
            if given and self.temperature == 0:
                raise UserError(f"--{name} is for sampling: pass --temperature, such as --temperature 0.7, as well.")


def add_generation_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of the model and its sampling."""
    for field in _options.options_of(Generation):
        command.add_argument(_options.flag(field), **_options.argument(field))


def generation_of(args: argparse.Namespace) -> Generation:
    """The model and its sampling, from the arguments."""
    fields = {field.name for field in dataclasses.fields(Generation)}
    return Generation(**{k: v for k, v in vars(args).items() if k in fields and v is not None})
