"""What a run of `liger-jax dpo` is told, beside what every training run is."""

import argparse
import dataclasses
from typing import Any

from liger_jax.commands import _pair_rows, _unpaired_rows
from liger_jax.commands._errors import UserError
from liger_jax.commands._preference import FREE, Preference
from liger_jax.commands._settings import Settings
from liger_jax.commands._unpaired import Unpaired
from liger_jax.losses.preference import DPO_TYPES
from liger_jax.losses.unpaired import KTO_TYPES

_NO_OPTIONS = ("format", "column", "stream")  # the fields of pairs have one name each


@dataclasses.dataclass(frozen=True)
class PairSettings(Settings):
    """A run on pairs of answers, or on single ones with labels. More attributes are those of
    `Preference`, `Unpaired`.
    """

    format: str | None = dataclasses.field(default=_pair_rows.FORM, init=False)  # the name of such rows
    out: str = "runs/dpo"  # folder for checkpoints, logs and the result
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
    desirable_weight: float | None = None
    undesirable_weight: float | None = None

    command = "dpo"
    is_alone = True

    def __post_init__(self):
        super().__post_init__()
        unpaired = self.unpaired
        if unpaired is not None:
            form = _unpaired_rows.FORM_WITH_OTHERS if unpaired.needs_others else _unpaired_rows.FORM
            object.__setattr__(self, "format", form)
        self._check_readers()
        if self.takes_whole_batches and self.num_parts > 1:
            why = "whose pairs --loss {} sorts together" if unpaired is None else "of which --loss {} has one baseline"
            raise UserError(
                f"--micro-batches={self.micro_batches} parts a batch, {why.format(self.loss_type)}. Leave it out."
            )

    def _check_readers(self) -> None:
        """Refuses options that the loss does not read, where they are not those of `Preference` itself."""
        names = {field.name for field in dataclasses.fields(Unpaired)}
        if self.unpaired is None:
            given = [name for name in ("desirable_weight", "undesirable_weight") if getattr(self, name) is not None]
            rule = f"goes with --loss {' and '.join(KTO_TYPES)}"
        else:
            others = {field.name for field in dataclasses.fields(Preference)} - names
            given = [name for name in sorted(others) if getattr(self, name) is not None]
            rule = f"does not go with --loss {self.loss_type}"
        if given:
            raise UserError(f"--{given[0].replace('_', '-')} {rule}. Leave it out.")

    @property
    def preference(self) -> Preference:
        """The loss of pairs with its options."""
        return Preference(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Preference)})

    @property
    def takes_whole_batches(self) -> bool:
        """Whether the loss sorts the pairs of a batch, or has one baseline of it."""
        return (self.preference if self.unpaired is None else self.unpaired).sorts

    @property
    def unpaired(self) -> Unpaired | None:
        """The loss of single answers with its options; `None` for one of pairs."""
        if self.loss_type not in KTO_TYPES:
            return None
        return Unpaired(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Unpaired)})

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads the reference's log-probabilities."""
        return self.unpaired is not None or self.preference.needs_reference

    @property
    def peak_rate(self) -> float:
        """The peak of the learning rate."""
        return self.learning_rate or (1e-6 if self.lora is None else 1e-5)

    @property
    def switches_adapters_off(self) -> bool:
        """Whether the reference is the model with its adapters off: they are new, and so began without an effect."""
        return self.lora is not None and self.adapters is None

    @property
    def keeps(self) -> tuple[str, ...]:
        """What the run keeps in OUT."""
        is_computed = self.needs_reference and not self.switches_adapters_off
        return (*super().keeps, "references") if is_computed else super().keeps

    def to_write(self) -> dict[str, Any]:
        """The settings as a file of options has them."""
        return {name: value for name, value in super().to_write().items() if name not in _NO_OPTIONS}


def add_loss_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of the loss: one for each field of `Preference`."""
    add = command.add_argument
    names = ", ".join((*DPO_TYPES, *FREE, *KTO_TYPES))
    # In a file of options the name is another one than that of plan's --loss.
    add("--loss", dest="loss_type", help=f"{names}; or several of DPO's with commas (default: sigmoid)")
    add("--loss-weights", type=_numbers, metavar="NUMBERS", help="a factor for each of several losses, with commas")
    add(
        "--beta",
        type=float,
        help="how strongly the reference binds; without one a scale, for simpo 2 to 10 (default: 0.1)",
    )
    add("--label-smoothing", type=float, help="the share of pairs that may be the wrong way round (default: 0)")
    add("--f-divergence", help="reverse_kl, forward_kl, js_divergence or alpha_divergence (default: reverse_kl)")
    add("--f-alpha", type=float, help="of alpha_divergence (default: 0.5)")
    add("--discopop-tau", type=float, help="of discopop (default: 0.05)")
    add("--cpo-alpha", type=float, help="weight of the likelihood of chosen, for cpo (default: 1)")
    add("--gamma", type=float, help="the margin of simpo (default: 0.5)")
    add("--desirable-weight", type=float, help="weight of good answers, for kto (default: 1)")
    add("--undesirable-weight", type=float, help="weight of bad answers, for kto (default: 1)")
    add("--ld-alpha", type=float, help="weight of the tokens by which a response is longer than the other (default: 1)")


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers with commas between them, as in 1,0.5.") from error
