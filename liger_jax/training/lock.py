"""A lock that lets one process at a time use a folder."""

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from liger_jax.training.errors import FolderError, LockedError

NAME = ".lock"


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """A context in which no other process can hold the folder. It is released when the process ends, for any reason.

    On file systems and platforms without such locks, every process gets it.

    Args:
        folder: an existing folder.

    Raises:
        FolderError: nothing can be written there.
        LockedError: another process holds it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, held(Path(folder)):
        ...     pass
    """
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        yield
        return
    path = folder / NAME
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise FolderError(f"{path} cannot be opened: {error.strerror}.") from error
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(file, 200).decode(errors="replace").strip() or "of which nothing more is known"
            raise LockedError(f"Another process writes to {folder}: {owner}.") from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS):
                raise
        with contextlib.suppress(OSError):  # the text is only informative: a full disk must not stop a run here
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(file)  # the file stays: another process may be about to lock it
