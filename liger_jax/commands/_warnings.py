"""Warnings as a command prints them: one line each, without the line of code that gave it."""

import contextlib
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """A context in which a warning is printed as one sentence.

    >>> with in_one_line():
    ...     print(warnings.formatwarning("a field changes\\n nothing", UserWarning, "file.py", 1), end="")
    liger-jax: a field changes nothing
    """
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"liger-jax: {' '.join(str(message).split())}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before
