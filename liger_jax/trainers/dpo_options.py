"""The options of `liger-jax dpo`, beside those of every training run."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from liger_jax._options import again
from liger_jax.data import preferences
from liger_jax.losses.unpaired import KTO_TYPES
from liger_jax.trainers.options import Settings
from liger_jax.trainers.preference_losses import LossOptions, Preference, Unpaired, of_settings
from liger_jax.user_errors import UserError


@dataclasses.dataclass(frozen=True)
class PairSettings(LossOptions, Settings):
    """A run on pairs of answers, or on single ones with labels."""

    format: str | None = dataclasses.field(default=preferences.PAIRS, init=False)  # the name of such rows
    data: str | Sequence[str] = again(
        Settings, "data", help="rows of pairs: files, globs, folders, a dataset's id; FILE=2 takes its rows twice"
    )
    out: str = again(Settings, "out", "runs/dpo")

    command = "dpo"
    no_options = ("format", "column", "stream")  # the fields of pairs have one name each
    is_alone = True
    peak_rates = 1e-6, 1e-5

    def __post_init__(self):
        super().__post_init__()
        unpaired = self.unpaired
        if unpaired is not None:
            form = preferences.LABELLED_WITH_OTHERS if unpaired.needs_others else preferences.LABELLED
            object.__setattr__(self, "format", form)
        if self.takes_whole_batches and self.num_micro_batches > 1:
            why = "whose pairs --loss {} sorts together" if unpaired is None else "of which --loss {} has one baseline"
            raise UserError(
                f"--micro-batches={self.micro_batches} splits a batch, {why.format(self.loss_type)}. Leave it out."
            )

    @property
    def preference(self) -> Preference:
        """The loss of pairs with its options."""
        return Preference(**of_settings(self))

    @property
    def takes_whole_batches(self) -> bool:
        """Whether the loss sorts the pairs of a batch, or has one baseline of it."""
        return (self.preference if self.unpaired is None else self.unpaired).sorts

    @property
    def unpaired(self) -> Unpaired | None:
        """The loss of single answers with its options; `None` for one of pairs."""
        return Unpaired(**of_settings(self)) if self.loss_type in KTO_TYPES else None

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads the reference's log-probabilities."""
        return self.unpaired is not None or self.preference.needs_reference

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
        return {name: value for name, value in super().to_write().items() if name not in self.no_options}
