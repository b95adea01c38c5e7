"""The options of the losses of preferences, each in one place: its default, its type and its help."""

import argparse
import dataclasses
from typing import Any

from liger_jax.losses.preference import DPO_TYPES
from liger_jax.losses.unpaired import KTO_TYPES

CPO = {"cpo": "sigmoid", "cpo_hinge": "hinge", "cpo_ipo": "ipo"}  # as `cpo_loss` calls them
FREE = ("orpo", *CPO, "simpo")  # they need no reference


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers with commas between them, as in 1,0.5.") from error


def _option(help: str, default: Any = None, **argument: Any) -> Any:
    return dataclasses.field(default=default, metadata=dict(type=float, help=help) | argument)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossOptions:
    """The options of a loss, which are those of its function in `losses`; `None` for the function's own default."""

    # In a file of options the name is another one than that of plan's --loss.
    loss_type: str = _option(
        f"{', '.join((*DPO_TYPES, *FREE, *KTO_TYPES))}; or several of DPO's with commas (default: sigmoid)",
        "sigmoid", type=str,
    )  # fmt: skip
    loss_weights: tuple[float, ...] | None = _option(
        "a factor for each of several losses, with commas", type=_numbers, metavar="NUMBERS"
    )
    beta: float = _option(
        "how strongly the reference binds; without one a scale, for simpo 2 to 10 (default: 0.1)", 0.1
    )
    label_smoothing: float | None = _option("the share of pairs that may be the wrong way round (default: 0)")
    f_divergence: str | None = _option(
        "reverse_kl, forward_kl, js_divergence or alpha_divergence (default: reverse_kl)", type=str
    )
    f_alpha: float | None = _option("of alpha_divergence (default: 0.5)")
    discopop_tau: float | None = _option("of discopop (default: 0.05)")
    cpo_alpha: float | None = _option("weight of the likelihood of chosen, for cpo (default: 1)")
    gamma: float | None = _option("the margin of simpo (default: 0.5)")
    ld_alpha: float | None = _option("weight of the tokens by which a response is longer than the other (default: 1)")
    desirable_weight: float | None = _option("weight of good answers, for kto (default: 1)")
    undesirable_weight: float | None = _option("weight of bad answers, for kto (default: 1)")


def flag(name: str) -> str:
    """An option's flag."""
    return "--loss" if name == "loss_type" else f"--{name.replace('_', '-')}"


def add_loss_arguments(command: argparse.ArgumentParser) -> None:
    """Adds an argument for each of the options."""
    for field in dataclasses.fields(LossOptions):
        command.add_argument(flag(field.name), dest=field.name, **field.metadata)


def of_settings(settings: Any) -> dict[str, Any]:
    """The options of a run by name."""
    return {field.name: getattr(settings, field.name) for field in dataclasses.fields(LossOptions)}
