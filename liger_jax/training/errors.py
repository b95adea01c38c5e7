"""Errors that end a training run and that the user can correct.

Each has its own type, so that a program can say the cure in its own words.
"""

import contextlib
from collections.abc import Iterator

import jax

# XLA's pool of pinned host memory for GPUs, and the environment variable that enlarges it, read when a backend starts.
PINNED_GIB, PINNED_LIMIT = 64, "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


class TrainingError(Exception):
    """A run cannot start, resume or be saved.

    Args:
        problem: what is wrong, in whole sentences.
        cure: what to do, in whole sentences; empty if the problem says it.

    Attributes:
        problem: the argument `problem`.
        cure: the argument `cure`.
    """

    def __init__(self, problem: str, cure: str = ""):
        super().__init__(f"{problem} {cure}".rstrip())
        self.problem, self.cure = problem, cure


class FolderError(TrainingError):
    """Nothing can be written to a folder."""

    def __init__(self, problem: str):
        super().__init__(problem, "Pass another folder.")


class ForeignStepError(TrainingError):
    """A folder has an entry that is named like a checkpoint, and that no run has written."""

    def __init__(self, problem: str):
        super().__init__(problem, "Move it, or pass another folder.")


class CheckpointError(TrainingError):
    """A folder holds a run that cannot be resumed: it is damaged, or it is another run."""

    def __init__(self, problem: str):
        super().__init__(problem, "Pass fresh=True to start over, or another folder.")


class DamagedError(TrainingError):
    """The newest checkpoint is damaged, and an older one is intact."""


class LockedError(TrainingError):
    """Another process writes to a folder."""

    def __init__(self, problem: str):
        super().__init__(problem, "Wait for it, end it, or pass another folder.")


class DiskError(TrainingError):
    """The disk has too little room."""

    def __init__(self, problem: str):
        super().__init__(problem, "Make room, or pass another folder.")


class NotFiniteError(TrainingError):
    """The loss is infinite or NaN."""

    def __init__(self, problem: str, cure: str = "Try a smaller learning rate."):
        super().__init__(problem, cure)


class NotFiniteAtStartError(NotFiniteError):
    """The loss is infinite or no number before the first update, so that no learning rate is the cause."""

    def __init__(self, problem: str):
        super().__init__(problem, "Look for weights, rows or options that are not finite.")


class OutOfMemoryError(TrainingError):
    """The device has too little memory."""

    def __init__(self, problem: str):
        super().__init__(problem, "Try more micro-batches, remat='offload' or shorter rows.")


class OutOfHostMemoryError(TrainingError):
    """XLA's pool of pinned host memory, which holds layers' inputs with remat='offload', has too little."""

    def __init__(self, problem: str):
        super().__init__(
            problem,
            f"XLA's pool there stops at {PINNED_GIB} GiB: start Python with {PINNED_LIMIT}, such as 128, if the host "
            "has more. Else take more micro-batches or shorter rows.",
        )


@contextlib.contextmanager
def memory_errors(where: str) -> Iterator[None]:
    """A context that raises our errors when memory runs out. `where` ends their sentence, with its full stop."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        if "host memory" in str(error):
            raise OutOfHostMemoryError(f"The host's pinned memory ran out {where}") from error
        raise OutOfMemoryError(f"The device ran out of memory {where}") from error
