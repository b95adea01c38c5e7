"""The options of `liger-jax dpo`, beside those of every training run."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from liger_jax.data import preferences
from liger_jax.losses.unpaired import KTO_TYPES
from liger_jax.trainers.method import Method
from liger_jax.trainers.preference_losses import LossOptions, Preference, Unpaired, of_settings
from liger_jax.user_errors import UserError


@dataclasses.dataclass(frozen=True)
class PairOptions(LossOptions, Method):
    """A model is trained on pairs of answers, or on single ones with labels."""

    command = "dpo"
    group_of_options = "the loss"
    rows_stay_whole = True
    peak_rates = 1e-6, 1e-5
    changes = dict(
        data=dict(help="rows of pairs: files, globs, folders, a dataset's id; FILE=2 takes its rows twice"),
        batch=dict(help="pairs or single answers in a step, or rows with --pack (default: {default})"),
        out=dict(default="runs/dpo"),
        quantize=dict(first=False),
        pack=dict(first=False),
    )
    no_options = not_written = ("format", "column", "stream")  # the fields of pairs have one name each

    def decided(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The format of the rows."""
        if (unpaired := self.unpaired) is None:
            return {"format": preferences.PAIRS}
        return {"format": preferences.LABELLED_WITH_OTHERS if unpaired.needs_others else preferences.LABELLED}

    def check(self, settings: Any) -> None:
        """Refuses micro-batches for a loss that is computed over a whole batch."""
        super().check(settings)
        if self.takes_whole_batches and settings.recipe.num_micro_batches > 1:
            one = "whose pairs --loss {} sorts together", "of which --loss {} has one baseline"
            why = one[self.unpaired is not None].format(self.loss_type)
            raise UserError(f"--micro-batches={settings.recipe.micro_batches} splits a batch, {why}. Leave it out.")

    @property
    def preference(self) -> Preference:
        """The loss of pairs with its options."""
        return Preference(**of_settings(self))

    @property
    def takes_whole_batches(self) -> bool:
        """Whether the loss sorts the pairs of a batch, or has one baseline for all of it."""
        return (self.preference if self.unpaired is None else self.unpaired).sorts

    @property
    def unpaired(self) -> Unpaired | None:
        """The loss of single answers with its options; `None` for one of pairs."""
        return Unpaired(**of_settings(self)) if self.loss_type in KTO_TYPES else None

    @property
    def needs_reference(self) -> bool:
        """Whether the loss reads the reference's log-probabilities."""
        return self.unpaired is not None or self.preference.needs_reference

    def needs_columns(self, settings: Any) -> bool:
        """Whether the reference's log-probabilities are computed before the first step."""
        return self.needs_reference and not self.switches_adapters_off(settings)

    def switches_adapters_off(self, settings: Any) -> bool:
        """Whether the reference is the model without its adapters: new ones start without an effect."""
        return settings.adapters.lora is not None and settings.adapters.adapters is None

    def keeps(self, settings: Any) -> tuple[str, ...]:
        """What the run keeps in OUT."""
        return (*super().keeps(settings), *(("references",) if self.needs_columns(settings) else ()))
