"""Each step's figures, for the progress bar, a table and TensorBoard."""

import contextlib
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from liger_jax.commands._errors import UserError, needed_packages

TABLE, EVENTS = "log.csv", "tensorboard"
FIELDS = (
    "step", "loss", "token_accuracy", "learning_rate", "tokens_per_second", "memory_gib",
    "eval_loss", "eval_perplexity", "eval_token_accuracy",
)  # fmt: skip


def check_table(path: Path) -> None:
    """Looks before a run at the table that it would replace.

    Args:
        path: where its table will be.

    Raises:
        UserError: there is a file that is no run's table.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            first = file.readline()
    except OSError:  # there is none, or opening it to write says why not
        return
    if first and not first.startswith(",".join(FIELDS[:2])):
        raise UserError(f"{path} is no log of a run, which would replace it. Move it, or pass another --out.")


class Log:
    """Where each step's figures go. A context, which closes the files.

    Args:
        kinds: "csv" for log.csv, "tensorboard" for a folder of that name.
        folder: where both lie.
        earlier: figures of the steps before, as a resumed run has them; what the files hold beyond them is dropped.

    Raises:
        UserError: a file cannot be written, or TensorBoard's writer is not installed.
    """

    def __init__(self, kinds: Sequence[str], folder: Path, earlier: Sequence[dict[str, Any]]):
        self._file = self._table = self._events = None
        if "csv" in kinds:
            try:
                self._file = (folder / TABLE).open("w", newline="", encoding="utf-8")
            except OSError as error:
                raise UserError(f"{folder / TABLE} cannot be written: {error.strerror}.") from error
            self._table = csv.DictWriter(self._file, FIELDS)
            self._table.writeheader()
            self._table.writerows(earlier)
        if "tensorboard" in kinds:
            with needed_packages():
                from tensorboardX import SummaryWriter
            after = earlier[-1]["step"] + 1 if earlier else 0
            self._events = SummaryWriter(str(folder / EVENTS), purge_step=after)

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *error: Any) -> None:
        for file in (self._file, self._events):
            if file is not None:
                file.close()

    def write(self, figures: dict[str, Any]) -> None:
        """Adds a step.

        Args:
            figures: by names of `FIELDS`; those that are missing stay empty.
        """
        if self._file is not None and self._table is not None:
            try:
                self._table.writerow(figures)
                self._file.flush()
            except OSError as error:  # such as a full disk, which must not end a run between two checkpoints
                print(f"{self._file.name} cannot be written: {error.strerror}. It will be whole when the run goes on.")
                with contextlib.suppress(OSError):
                    self._file.close()
                self._file = None
        if self._events is not None:
            for name, value in figures.items():
                if name != "step":
                    self._events.add_scalar(name, value, figures["step"])
