"""A run that goes on for more steps than it was begun with: what it says of its learning rate and its rows."""

import math
from collections.abc import Callable, Mapping
from typing import Any

GROWING = ("steps", "epochs")  # settings that may be larger when a run goes on


def lines(
    before: Mapping[str, Any], done: int, last_rate: float | None, steps: int, rate: Callable[[int], Any], rows: int
) -> list[str]:
    """What a run says that goes on for longer than it was to.

    >>> (line,) = lines({"steps": 10, "epochs": None, "batch": 2}, 10, 0.1, 20, lambda step: 0.5, 100)
    >>> print(line[:93])
    goes on from step 10 to 20, where it was to end at 10: the learning rate follows the schedule
    """
    if not done or before.get("steps", steps) >= steps:
        return []
    after = "" if last_rate is None else f" after {last_rate:.1e}"
    lines = [
        f"goes on from step {done} to {steps}, where it was to end at {before['steps']}: the learning rate follows the "
        f"schedule of {steps} steps from here on, with {float(rate(done)):.1e}{after}"
    ]
    if skipped := _skipped(before, done, rows):
        lines.append(f"{skipped} rows of the epoch that was cut off within a batch are left out, once")
    return lines


def _skipped(before: Mapping[str, Any], done: int, rows: int) -> int:
    """Rows that the last step left out, since the run was to end in the middle of an epoch; the next step is full."""
    epochs, batch = before.get("epochs"), before.get("batch", 1)
    if epochs is None or done < before["steps"]:
        return 0
    rest = max(1, round(epochs * rows)) % rows
    return min(math.ceil(rest / batch) * batch, rows) - rest
