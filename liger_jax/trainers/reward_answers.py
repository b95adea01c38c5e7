"""The values that reward functions return and log, as numbers and JSON values."""

import copy
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from liger_jax.user_errors import UserError

MOST = 1e15  # the largest reward: the squares of a group's differences stay finite in float32
_OF_THE_RUN = (  # the run's own figures, which no metric of a reward may replace
    "step", "loss", "grad_norm", "learning_rate", "tokens_per_second", "memory_gib", "num_tokens", "reward",
    "reward_std", "frac_reward_zero_std", "kl",
)  # fmt: skip
_KINDS_OF_THE_RUN = ("rewards/", "completions/", "clip_ratio/", "sampling/", "eval_")
_SHOWN = 200  # characters of a value in a message


class Notes:
    """The values that a function logs in a call."""

    def __init__(self):
        self._extras: list[tuple[Any, Any]] = []
        self._metrics: list[tuple[Any, Any]] = []

    def log_extra(self, column: Any, values: Any) -> None:
        """Notes a value of each completion for completions.jsonl."""
        self._extras.append((column, values))

    def log_metric(self, name: Any, value: Any) -> None:
        """Notes a figure of the step. A step's figure is the mean of a name's values."""
        self._metrics.append((name, value))

    def means(self, name: str) -> list[tuple[str, float]]:
        """The mean of each metric, of the values that are not NaN."""
        by_metric: dict[str, list[float]] = {}
        for metric, value in self._metrics:
            if not isinstance(metric, str):
                raise UserError(f"The reward {name} logs a metric {shown(metric)}, and its name must be a text.")
            if metric in _OF_THE_RUN or metric.startswith(_KINDS_OF_THE_RUN):
                raise UserError(
                    f"The reward {name} logs a metric {shown(metric)}, but the run has a figure so named. Rename it."
                )
            if (figure := number(value)) is None:
                raise UserError(f"The reward {name} logs {shown(value)} as {metric!r}, and must log a number.")
            by_metric.setdefault(metric, []).extend([] if math.isnan(figure) else [figure])
        return [(metric, sum(values) / len(values)) for metric, values in by_metric.items() if values]

    def columns(self, name: str, count: int) -> list[tuple[str, list[Any]]]:
        """The columns, as JSON's values."""
        columns = []
        for column, values in self._extras:
            of_all = read(values, count)
            if not isinstance(column, str) or not isinstance(of_all, list) or len(of_all) != count:
                raise UserError(
                    f"The reward {name} logs {shown(of_all)} as {shown(column)} for {count} completions. "
                    "log_extra takes a name, and a list with a value for each completion."
                )
            columns.append((column, [_for_json(value) for value in of_all]))
        return columns


def numbers(name: str, weight: float, answer: Any, when: str, places: Sequence[str]) -> list[float]:
    """The value that a function has returned, as numbers; NaN for `None`."""
    cure = "It must return a list that has a finite number, or None, for each."
    if not isinstance(answer, list):
        raise UserError(f"The reward {name} has returned {shown(answer)} {when} for {len(places)} completions. {cure}")
    if len(answer) != len(places):
        count = f"more than {len(places)}" if len(answer) > len(places) else f"{len(answer)}"
        raise UserError(
            f"The reward {name} has returned {count} values {when} for {len(places)} completions: {shown(answer)}. "
            f"{cure}"
        )
    numbers = [math.nan if each is None else number(each) for each in answer]
    for each, value, place in zip(answer, numbers, places, strict=True):
        if value is None or each is not None and not abs(value) * max(1.0, abs(weight)) <= MOST:
            size = f", at most {MOST:g} in size with its weight," if value and abs(value) < math.inf else ""
            raise UserError(
                f"The reward {name} has returned {shown(each)} {when} for a completion of {place}. It must return a "
                f"finite number{size} or None for each."
            )
    return [value for value in numbers if value is not None]


def read(answer: Any, count: int) -> Any:
    """The value that a function has returned, as a list with at most one value too many; unchanged if not iterable."""
    if not isinstance(answer, Iterable) or isinstance(answer, str | bytes | bytearray | Mapping | Set):
        return answer
    return list(itertools.islice(answer, count + 1))  # a generator may fail while it is read, and may be infinite


def number(value: Any) -> float | None:
    """A value as a number; `None` if it is not one, such as the text "0.5", which `float` would accept."""
    if isinstance(value, str | bytes | bytearray) or getattr(value, "ndim", 0):
        return None
    try:
        return float(value)
    except Exception:  # of whatever type it is
        return None


def _for_json(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)
    return copy.deepcopy(value)


def shown(value: Any) -> str:
    """A value as a message shows it, without its middle if it is long."""
    try:
        text = repr(value)
    except Exception:
        text = f"an object of {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 20]} … {text[-20:]}"
