"""The warnings of libraries during a command: each in one line, and retries to reach the hub only once."""

import contextlib
import logging
import warnings
from collections.abc import Iterator

_LOGGERS = ("huggingface_hub.utils._http", "datasets.utils.file_utils")
_TRIES = ("thrown while requesting", "Retrying", "Rate limited")  # words in the message of a retry


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


class _Once(logging.Filter):
    """A filter that passes only the first warning of retries."""

    def __init__(self):
        super().__init__()
        self._reported = False

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if not any(words in text for words in _TRIES):
            return True
        if self._reported:
            return False
        self._reported = True
        again = "It is tried again for some seconds; further tries are not reported."
        record.msg, record.args = f"{text.rstrip('. ')}. {again}", ()
        return True


@contextlib.contextmanager
def retries_reported_once() -> Iterator[None]:
    """A context in which all retries to reach the hub give one warning."""
    once = _Once()
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addFilter(once)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(once)
