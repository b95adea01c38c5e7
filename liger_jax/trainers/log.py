"""Each step's figures, for a table, TensorBoard and Weights & Biases."""

import contextlib
import csv
import importlib
import importlib.util
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from liger_jax.user_errors import UserError, needed_packages

TABLE, EVENTS, WANDB = "log.csv", "tensorboard", "wandb"
PLACES = {"csv": TABLE, "tensorboard": EVENTS, "wandb": WANDB}
_ID = "run_id"  # a file in the folder `WANDB`
_FIRST = ("step", "loss")  # columns of every run's table


def check_table(path: Path) -> None:
    """Checks before a run that it can read the table that it would replace."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            first = file.readline()
    except OSError:  # there is no table; or it cannot be opened, which is reported when it is written
        return
    if first and not first.startswith(",".join(_FIRST)):
        raise UserError(f"{path} is not the log of a run, and would be overwritten. Move it, or pass another --out.")


def check_wandb() -> None:
    """Checks at the start of a run that the package of Weights & Biases is installed, which no extra does."""
    try:
        spec = importlib.util.find_spec(WANDB)
    except ValueError:  # a module that something has put in its place
        spec = None
    if spec is None:
        raise UserError("--log=wandb needs the package wandb: pip install wandb.")


class Log:
    """Where each step's figures go. A context, which closes the files.

    `earlier`: figures of the steps before, as a resumed run has them; what the files hold beyond them is dropped.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        folder: Path,
        columns: Sequence[str],
        earlier: Sequence[dict[str, Any]],
        config: Mapping[str, Any] | None = None,
    ):
        self._file = self._table = self._events = None
        self._wandb = _wandb_run(folder, bool(earlier), config or {}) if "wandb" in kinds else None
        if "csv" in kinds:
            try:
                self._file = (folder / TABLE).open("w+", newline="", encoding="utf-8")
            except OSError as error:
                raise UserError(f"{folder / TABLE} cannot be written: {error.strerror}.") from error
            self._table = self._of_columns(
                dict.fromkeys([*columns, *(name for row in earlier for name in row)]), earlier
            )
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
        if self._wandb is not None:
            self._wandb.finish()

    def write(self, figures: dict[str, Any]) -> None:
        """Adds a step. Figures that are missing stay empty, and a new name adds a column."""
        if self._file is not None and self._table is not None:
            try:
                if new := [name for name in figures if name not in self._table.fieldnames]:
                    self._file.seek(0)
                    rows = list(csv.DictReader(self._file))
                    self._table = self._of_columns([*self._table.fieldnames, *new], rows)
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
        if self._wandb is not None:
            self._wandb.log({name: value for name, value in figures.items() if name != "step"}, step=figures["step"])

    def _of_columns(self, columns: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> csv.DictWriter:
        """Rewrites the table with these columns and rows."""
        assert self._file is not None
        self._file.seek(0)
        with contextlib.suppress(OSError):  # a device, such as /dev/stdout, cannot be truncated
            self._file.truncate()
        table = csv.DictWriter(self._file, list(columns))
        table.writeheader()
        table.writerows(rows)
        return table


def _wandb_run(folder: Path, goes_on: bool, config: Mapping[str, Any]) -> Any:
    """The run at Weights & Biases, the same one if it is resumed. What was logged for later steps stays there."""
    check_wandb()
    wandb: Any = importlib.import_module(WANDB)
    path = folder / WANDB / _ID
    try:
        path.parent.mkdir(exist_ok=True)
        if not (goes_on and path.is_file()):
            path.write_text(uuid.uuid4().hex[:12])
        return wandb.init(
            project=os.environ.get("WANDB_PROJECT", "liger-jax"),  # an argument precedes wandb's own variables
            name=os.environ.get("WANDB_NAME", folder.resolve().name),
            dir=str(folder),
            id=path.read_text(),
            resume="allow",
            config=dict(config),
        )
    except Exception as error:  # whatever the package, the network and its account may raise
        raise UserError(f"--log=wandb: {error} Log in by `wandb login`, or set WANDB_MODE=offline.") from error
