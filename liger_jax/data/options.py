"""The options of a run that decide about its rows, whichever run it is."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class RowOptions(Protocol):
    """What rows are made of, and how they are laid and drawn. A run's own options have these among others."""

    @property
    def data(self) -> Sequence[str]:
        """Files, globs, folders and datasets of the hub, each perhaps with a weight."""
        ...

    @property
    def eval_data(self) -> Sequence[str]:
        """The same, of what is scored and not trained on."""
        ...

    @property
    def share_held_out(self) -> float:
        """The share of the data that is held out."""
        ...

    @property
    def subset(self) -> str | None:
        """The dataset's configuration."""
        ...

    @property
    def column(self) -> str | None:
        """The field of a row that is trained on."""
        ...

    @property
    def format(self) -> str | None:
        """The format of rows that have the fields of several."""
        ...

    @property
    def stream(self) -> bool:
        """Whether a dataset is read while the run goes on."""
        ...

    @property
    def pack(self) -> bool:
        """Whether documents share rows."""
        ...

    @property
    def length(self) -> int:
        """Tokens in a row."""
        ...

    @property
    def batch(self) -> int:
        """Rows in a step."""
        ...

    @property
    def seed(self) -> int:
        """Seed of what is held out, and of the order of the rows."""
        ...

    @property
    def epochs_to_train(self) -> float | None:
        """How often each row is trained on; `None` where the number of steps is given."""
        ...
