"""JAX's persistent compilation cache: a program that was compiled once is read from the disk at the next start."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from liger_jax.training.user_caches import user_caches

_LEAST_SECONDS = 0.0  # to compile; a small program is read back faster than compiled, and JAX's own default is 1.0
_DIRECTORY, _LEAST, _ENABLED = (
    "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_enable_compilation_cache",
)  # fmt: skip


@contextlib.contextmanager
def compiled_programs_kept(wanted: bool = True) -> Iterator[None]:
    """A context in which JAX keeps compiled programs, and what XLA measured to choose GPU kernels, in `folder()`.

    The user's settings take precedence: with JAX_COMPILATION_CACHE_DIR or JAX_ENABLE_COMPILATION_CACHE nothing is
    changed. Where nothing can be written, every start compiles.
    """
    if not wanted:
        options = {_ENABLED: False}
    elif getattr(jax.config, _DIRECTORY) or not getattr(jax.config, _ENABLED) or not _is_writable(folder()):
        options = {}
    else:
        options = {_DIRECTORY: str(folder())}
        if _LEAST.upper() not in os.environ:
            options[_LEAST] = _LEAST_SECONDS
    before = {name: getattr(jax.config, name) for name in options}
    _set(options)
    try:
        yield
    finally:
        _set(before)


def folder(environment: Mapping[str, str] = os.environ, platform: str = sys.platform) -> Path:
    """Where compiled programs are kept, which may be deleted at any time.

    >>> folder({"XDG_CACHE_HOME": "/var/cache/me"}, "linux").as_posix()
    '/var/cache/me/liger-jax/compiled'
    """
    return user_caches(environment, platform) / "compiled"


def _is_writable(path: Path) -> bool:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)  # they are executed, so no other user may write there
        tempfile.TemporaryFile(dir=path).close()
    except OSError:
        return False
    return True


def _set(options: Mapping[str, object]) -> None:
    for name, value in options.items():
        jax.config.update(name, value)
    if options:
        compilation_cache.reset_cache()  # JAX reads these settings once per process
