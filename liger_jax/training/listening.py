"""A run whose output nobody reads any more, as after `| head -1` or in a terminal that was closed, goes on."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any


class _Stream:
    """A stream that drops what it cannot write."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:  # such as a file's name that is no text
            encoding = getattr(self._stream, "encoding", None) or "ascii"
            self.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except OSError:
            self._close()
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _close(self) -> None:
        """Lets the rest go nowhere, also what Python writes at the end of the process."""
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


@contextlib.contextmanager
def listened_or_not() -> Iterator[None]:
    """A context in which printing never fails.

    Example:
        >>> with listened_or_not():
        ...     print("loss 1.0")
        loss 1.0
    """
    before = sys.stdout, sys.stderr
    ours = tuple(stream if stream is None or isinstance(stream, _Stream) else _Stream(stream) for stream in before)
    sys.stdout, sys.stderr = ours
    try:
        yield
    finally:
        for stream in ours:
            if stream is not None:
                stream.flush()
        sys.stdout, sys.stderr = before
