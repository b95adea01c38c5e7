"""The options of one method of training, and what it changes in the options that all methods share."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from liger_jax import _options
from liger_jax.user_errors import UserError


@dataclasses.dataclass(frozen=True)
class Method:
    """The options of a method. The run's other options are given to its functions as `Settings`."""

    command = ""  # the command that trains by it
    group_of_options = ""  # the title of its options in a help text
    rows_stay_whole = False  # whether devices of a sequence axis cannot share its rows
    takes_whole_batches: ClassVar[Any] = False  # whether the loss takes a batch in one micro-batch
    peak_rates = 1e-5, 2e-4  # the learning rates without adapters and with them
    # Other defaults or help texts of shared options, by their names.
    changes: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    no_options = ()  # names of options that the command has not
    not_written = ()  # names of options that the command's file has not

    def __post_init__(self):
        _options.check(self)

    def decided(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values of shared options that the method decides, by name."""
        return {}

    def check(self, settings: Any) -> None:
        """Refuses values of shared options that the method cannot have."""
        for name, value in (("samples", settings.folder.samples), ("patience", settings.recipe.patience)):
            if value and not settings.rows.are_scored:
                raise UserError(f"--{name} is for data that is held out, and --eval-share=0 holds out none.")

    def shorter(self, length: int) -> str:
        """The options by which rows have a length."""
        return f"--length {length}"

    def keeps(self, settings: Any) -> tuple[str, ...]:
        """What a run stores in OUT beside checkpoints, logs and the result, by the names of `result.BESIDE`."""
        return ("tokens",)

    def of_the_run(self) -> dict[str, Any]:
        """Values that identify a run in its checkpoints, where they are not the options' own, by name."""
        return {}
