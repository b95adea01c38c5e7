"""Output that cannot be written, as after `| head -1`, in a closed terminal or on a full disk.

A training run continues without it. For a command whose only result is its output, it is an error.
"""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any


class OutputError(Exception):
    """The standard output cannot be written. It is not an `OSError`, which would be taken for one of the files at work.

    Attributes:
        is_unread: whether its reader has closed it; else the disk is full.
    """

    def __init__(self, error: OSError):
        super().__init__(f"The standard output cannot be written: {error.strerror or error}.")
        self.is_unread = error.errno == errno.EPIPE


class _Stream:
    """A stream that drops text that it cannot write; if it is `needed`, the first such text raises `OutputError`."""

    def __init__(self, stream: Any, needed: bool = False):
        self._stream, self._needed = stream, needed

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:  # such as a file's name that is not text
            encoding = getattr(self._stream, "encoding", None) or "ascii"
            self.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except OSError as error:
            self._lost(error)
        except OutputError:
            pass
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lost(error)
        except OutputError:
            pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lost(self, error: OSError) -> None:
        """Discards all further output, also what Python writes at the end of the process."""
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        if self._needed:
            raise OutputError(error) from error


@contextlib.contextmanager
def listened_or_not() -> Iterator[None]:
    """A context in which printing never fails."""
    with _streams(needed=False):
        yield


@contextlib.contextmanager
def output_needed() -> Iterator[None]:
    """A context in which printing to the standard output fails with `OutputError`, and to the standard error never.

    Raises:
        OutputError: something that was printed cannot be written.

    Example:
        >>> with output_needed():
        ...     print("loss 1.0")
        loss 1.0
    """
    with _streams(needed=True):
        yield


@contextlib.contextmanager
def _streams(needed: bool) -> Iterator[None]:
    """A context that replaces the standard streams, and flushes them at its end. A closed one becomes a null device."""
    before = sys.stdout, sys.stderr
    out, err = (open(os.devnull, "w") if stream is None else stream for stream in before)  # noqa: SIM115  as long as the process
    sys.stdout, sys.stderr = _Stream(out, needed), _Stream(err)
    ours = sys.stderr, sys.stdout
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in ours:
            stream.flush()
