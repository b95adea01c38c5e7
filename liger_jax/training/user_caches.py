"""The user's folder for caches, in which commands keep what can be made again."""

import contextlib
import contextvars
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

_are_used: contextvars.ContextVar[bool] = contextvars.ContextVar("are_used", default=False)


@contextlib.contextmanager
def used(wanted: bool) -> Iterator[None]:
    """A context in which data may be kept there. Outside of it, as in a user's own program, none is."""
    token = _are_used.set(wanted)
    try:
        yield
    finally:
        _are_used.reset(token)


def are_used() -> bool:
    """Whether data may be kept there."""
    return _are_used.get()


def user_caches(environment: Mapping[str, str] = os.environ, platform: str = sys.platform) -> Path:
    """Where this package keeps what can be made again.

    >>> user_caches({"XDG_CACHE_HOME": "/var/cache/me"}, "linux").as_posix()
    '/var/cache/me/liger-jax'
    """
    if own := environment.get("XDG_CACHE_HOME"):
        caches = Path(own)
    elif platform == "win32":
        caches = Path(environment.get("LOCALAPPDATA", "~/AppData/Local"))
    else:
        caches = Path("~/Library/Caches" if platform == "darwin" else "~/.cache")
    return Path(os.path.expanduser(caches)) / "liger-jax"
