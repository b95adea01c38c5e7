"""What differs between the options of commands that train: a method's own, and what it changes in those of all."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from liger_jax import _options
from liger_jax.user_errors import UserError


@dataclasses.dataclass(frozen=True)
class Method:
    """A method's own options. What it is given of a run's others are `Settings`."""

    command = ""  # the command that trains by it
    is_alone = False  # whether the command trains in one process
    takes_whole_batches: ClassVar[Any] = False  # whether the loss takes a batch in one micro-batch
    peak_rates = 1e-5, 2e-4  # the learning rates without adapters and with them
    # Another default or other words for options of all, by their names.
    changes: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    no_options = ()  # names of options that the command has not
    not_written = ()  # names of options that the command's file has not

    def __post_init__(self):
        _options.check(self)

    def decided(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values of options of all that the method decides about, by name."""
        return {}

    def check(self, settings: Any) -> None:
        """Refuses options of all that do not go with the method."""
        for name, value in (("samples", settings.folder.samples), ("patience", settings.recipe.patience)):
            if value and not settings.rows.are_scored:
                raise UserError(f"--{name} is for data that is held out, and --eval-share=0 holds out none.")

    def keeps(self, settings: Any) -> tuple[str, ...]:
        """What a run keeps in OUT beside checkpoints, logs and the result, by the names of `result.BESIDE`."""
        return ("tokens",)

    def of_the_run(self) -> dict[str, Any]:
        """What a run is known by in another form than its option's value."""
        return {}
