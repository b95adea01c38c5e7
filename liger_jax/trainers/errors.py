"""The errors of a training run in the words of the command line, each with its cure."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from liger_jax.training.errors import (
    CheckpointError,
    DiskError,
    FolderError,
    ForeignStepError,
    LockedError,
    NotFiniteError,
    OutOfMemoryError,
    TrainingError,
)
from liger_jax.training.files import check_writable
from liger_jax.user_errors import UserError

_CURES = {  # in the command line's words
    CheckpointError: "Pass --fresh to start over, or another --out.",
    DiskError: "Make room, or pass another --out.",
    FolderError: "Pass another --out.",
    ForeignStepError: "Move it, or pass another --out.",
    LockedError: "Wait for it, end it, or pass another --out.",
    NotFiniteError: "Try a smaller --learning-rate with --fresh, or with another --out.",
    OutOfMemoryError: "Try more --micro-batches, --remat offload or a smaller --length.",
}


@contextlib.contextmanager
def training_errors() -> Iterator[None]:
    """A context for a training run, whose errors get the cure in the words of the command line."""
    try:
        yield
    except TrainingError as error:
        raise UserError(f"{error.problem} {_CURES.get(type(error), error.cure)}".rstrip()) from error


@training_errors()
def writable_folder(folder: Path) -> None:
    """Makes a folder, if there is none."""
    check_writable(folder)
