"""Work that takes seconds: announced while it lasts, and done beside other work where possible."""

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax


@contextlib.contextmanager
def telling(what: str) -> Iterator[None]:
    """A context that prints the name of its work, and then the seconds that it took."""
    start = time.perf_counter()
    print(what, "…", end="", flush=True)
    try:
        yield
        print(f" {time.perf_counter() - start:.1f} s", end="", flush=True)
    finally:  # the next output, such as an error, begins a new line
        print(flush=True)


def beside(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
    """Starts a call in a separate thread."""
    return _noted(ThreadPoolExecutor(1, function.__name__).submit(function, *args, **kwargs))


def is_busy() -> bool:
    """Whether a call of `beside` or a compilation is still running, for which Python would wait at its end."""
    return any(not each.done() for each in _futures)


_futures: weakref.WeakSet[Future[Any]] = weakref.WeakSet()


def _noted(future: Future[Any]) -> Future[Any]:
    _futures.add(future)
    return future


class Compiling:
    """Threads that compile programs; a single one on a GPU.

    There XLA measures several kernels for each product, and remembers the best one. An evaluation has the forward of
    the step, so that two programs compiled at the same time would measure the same products twice. Programs without
    common products may have threads of their own.
    """

    def __init__(self):
        self._threads = ThreadPoolExecutor(1 if jax.default_backend() == "gpu" else 2, "compiling")

    def start(self, program: Any, *types: Any) -> Future[Any]:
        """Traces a program, and begins to compile it.

        Tracing is Python, which other threads would only slow down; so it is done here, and the most urgent one first.

        Returns the compiled program's future. The program takes arguments of these very types.
        """
        return self.lowered(program.lower(*types))

    def lowered(self, program: Any) -> Future[Any]:
        """Begins to compile a program that is lowered already."""
        return _noted(self._threads.submit(program.compile))
