"""The outcome of a run, for the command or call that started it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# A function that is called after each step with its figures and the model. The run ends if it returns True.
After = Callable[[Mapping[str, Any], Any], bool]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run has ended."""

    code: int  # 0, or 128 and a signal's number if one stopped the run
    steps: Sequence[Mapping[str, Any]] = ()  # the figures of each step
    step: int = 0  # the step of the returned model
    best: int | None = None  # of the checkpoints that are kept, the step with the least held-out loss
    target: Path | None = None  # where the result was written; `None` if it was not
    model: Callable[[], Any] = lambda: None  # returns the model
    chats: bool = False  # whether the data held conversations
    mesh: Any = None  # the mesh over which the model is sharded; `None` for one device
