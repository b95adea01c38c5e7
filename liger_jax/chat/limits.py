"""Limits of chat templates, which are programs that anyone may have written, and which may never end.

Time is checked wherever a template calls something, and in each iteration of a loop. A result that becomes large in one
step, such as a text times a number, is refused before it is made.
"""

import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

MOST_CHARACTERS = 50_000_000  # of a text that a template makes
MOST_SECONDS = 20.0  # of the processor's time, for one conversation
_MOST_BITS = 10_000  # of a whole number
_MOST_GROUPS = 1_000_000
# Methods and filters whose numbers are sizes.
_SIZED = {"center", "expandtabs", "indent", "ljust", "rjust", "tojson", "truncate", "wordwrap", "zfill"}
_GROUPED = {"batch", "slice"}


class OverBudget(Exception):
    """A template exceeds a limit; the message says which, as the end of a sentence."""


class Clock:
    """The time that a template may take."""

    def __init__(self):
        self._until = self._earliest = 0.0

    def start(self) -> None:
        """Begins the time of a conversation."""
        self._until, self._earliest = time.thread_time() + MOST_SECONDS, time.perf_counter() + MOST_SECONDS

    def check(self) -> None:
        """Checks the time."""
        # A thread cannot use more of the processor's time than has passed, and a clock is cheaper to read.
        if self._until and time.perf_counter() > self._earliest and time.thread_time() > self._until:
            raise OverBudget(f"runs for more than {MOST_SECONDS:g} seconds")


def check_size(size: int) -> None:
    """Checks the size of a text or a list before it is made."""
    if size > MOST_CHARACTERS:
        raise OverBudget(f"makes a text or a list of more than {MOST_CHARACTERS:,} characters or entries")


def check_operation(operator: str, left: Any, right: Any) -> None:
    """Checks the size of an operator's result before it is made."""
    if isinstance(left, int) and isinstance(right, int):
        bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * max(right, 0)}
        if bits.get(operator, 0) > _MOST_BITS:
            raise OverBudget("makes a whole number of thousands of digits")
    elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
        check_size(len(left) + len(right))
    elif operator == "*":
        text, number = (right, left) if isinstance(left, int) else (left, right)
        if isinstance(number, int) and hasattr(text, "__len__"):
            check_size(len(text) * number)
    elif operator == "%" and isinstance(left, str):
        check_pattern(left, right if isinstance(right, tuple) else (right,))


def check_pattern(pattern: str, values: Iterable[Any]) -> None:
    """Checks the widths in a pattern that `%` or `format` fills."""
    widths = sum(map(_number, re.findall(r"\d{3,}", pattern)))
    if re.search(r"\*|\{[^}]*\{", pattern):
        widths += sum(value for value in values if isinstance(value, int) and value > 0)
    check_size(widths)


def check_call(name: str, subject: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    """Checks the size of a result of a filter or a string's method before it is made."""
    values = [*args, *kwargs.values()]
    largest = max((value for value in values if isinstance(value, int)), default=0)
    if name in _GROUPED and largest > _MOST_GROUPS:
        check_size(MOST_CHARACTERS + 1)
    if not isinstance(subject, str):
        if name == "tojson":
            check_size(largest)
        return
    if name in _SIZED:
        check_size(largest * (1 + subject.count("\n") + subject.count("\t")))
    elif name in ("format", "format_map"):
        check_pattern(subject, values)
    elif name == "replace" and len(values) > 1 and isinstance(values[0], str) and isinstance(values[1], str):
        check_size(len(subject) + subject.count(values[0]) * len(values[1]))
    elif name == "translate" and values and isinstance(values[0], Mapping):
        longest = max((len(value) for value in values[0].values() if isinstance(value, str)), default=0)
        check_size(len(subject) * longest)


def _number(digits: str) -> int:
    return int(digits) if len(digits) < 20 else MOST_CHARACTERS + 1
