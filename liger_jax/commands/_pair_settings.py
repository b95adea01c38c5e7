"""What a run of `liger-jax dpo` is told, beside what every training run is."""

import argparse
import dataclasses
from typing import Any

from liger_jax.commands import _pair_rows
from liger_jax.commands._errors import UserError
from liger_jax.commands._preference import FREE, Preference
from liger_jax.commands._settings import Settings
from liger_jax.losses.preference import DPO_TYPES

_NO_OPTIONS = ("format", "column", "stream")  # the fields of pairs have one name each


@dataclasses.dataclass(frozen=True)
class PairSettings(Settings):
    """A run on pairs of answers. The attributes that `Settings` has not are those of `Preference`.

    Attributes:
        format: the name of such rows.
        out: folder for checkpoints, logs and the result.

    Raises:
        UserError: a value is out of its range, or does not go with another.
    """

    format: str | None = dataclasses.field(default=_pair_rows.FORM, init=False)
    out: str = "runs/dpo"
    loss_type: str = "sigmoid"
    loss_weights: tuple[float, ...] | None = None
    beta: float = 0.1
    label_smoothing: float | None = None
    f_divergence: str | None = None
    f_alpha: float | None = None
    discopop_tau: float | None = None
    cpo_alpha: float | None = None
    gamma: float | None = None
    ld_alpha: float | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.preference.sorts and self.num_parts > 1:
            raise UserError(
                f"--micro-batches={self.micro_batches} parts a batch, whose pairs --loss {self.loss_type} sorts "
                "together. Leave it out."
            )

    @property
    def preference(self) -> Preference:
        """The loss with its options."""
        return Preference(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Preference)})

    @property
    def may_be_parted(self) -> bool:
        """Whether the run may choose the number of micro-batches: not where a loss sorts the pairs of a batch."""
        return super().may_be_parted and not self.preference.sorts

    @property
    def peak_rate(self) -> float:
        """The peak of the learning rate."""
        return self.learning_rate or (1e-6 if self.lora is None else 1e-5)

    @property
    def switches_adapters_off(self) -> bool:
        """Whether the reference is the model with its adapters off: they are new, and so began without an effect."""
        return self.lora is not None and self.adapters is None

    def to_write(self) -> dict[str, Any]:
        """The settings as a file of options has them.

        Returns:
            Values by name; `None` where the default depends on others.
        """
        return {name: value for name, value in super().to_write().items() if name not in _NO_OPTIONS}


def add_loss_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of the loss: one for each field of `Preference`.

    Args:
        command: a parser.
    """
    add = command.add_argument
    names = ", ".join((*DPO_TYPES, *FREE))
    # In a file of options the name is another one than that of plan's --loss.
    add("--loss", dest="loss_type", help=f"{names}; or several of DPO's with commas (default: sigmoid)")
    add("--loss-weights", type=_numbers, metavar="NUMBERS", help="a factor for each of several losses, with commas")
    add("--beta", type=float, help="how strongly the reference binds (default: 0.1)")
    add("--label-smoothing", type=float, help="the share of pairs that may be the wrong way round (default: 0)")
    add("--f-divergence", help="reverse_kl, forward_kl, js_divergence or alpha_divergence (default: reverse_kl)")
    add("--f-alpha", type=float, help="of alpha_divergence (default: 0.5)")
    add("--discopop-tau", type=float, help="of discopop (default: 0.05)")
    add("--cpo-alpha", type=float, help="weight of the likelihood of chosen, for cpo (default: 1)")
    add("--gamma", type=float, help="the margin of simpo (default: 0.5)")
    add("--ld-alpha", type=float, help="weight of the tokens by which a response is longer than the other (default: 1)")


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))
