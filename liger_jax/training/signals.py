"""Signals: the first one ends a run after its step, and a second one at once.

Python calls its handlers between two of its own instructions, and so not during a step or a compilation. A thread that
the signal wakes up prints the message about it, and ends the process.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

# SIGHUP comes when a terminal is closed. Windows has none.
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
SAME_SECONDS = 0.5  # signals so soon after the first are taken for the same one, sent twice by a launcher or a terminal
_ends: list[Callable[[int], None]] = []  # the function that ends the process, within `ending_now`
_writers: set[int] = set()  # file descriptors by which signals wake threads of ours


@contextlib.contextmanager
def ending_now(end: Callable[[int], None], said: str) -> Iterator[None]:
    """A context in which a signal ends the process at once, whatever it is at; within `listed` the second one does.

    It is for a process that does nothing else. `KeyboardInterrupt`, which Python raises for Ctrl-C, may be lost in a
    callback, and waits for calls in C++. Outside of the main thread, whose handlers Python calls, nothing changes.

    `end`: ends the process with an exit code. It is called in a thread.
    """

    def handle(number):
        print(said if not sys.stderr.isatty() else f"\n{said}", file=sys.stderr, flush=True)
        end(128 + number)

    with _handled(handle, lambda number, frame: None) as is_handled:
        if is_handled:
            _ends.append(end)
        try:
            yield
        finally:
            if is_handled:
                _ends.pop()


@contextlib.contextmanager
def listed() -> Iterator[list[int]]:
    """A context in which the first signal is only listed and reported, so that work in progress is completed.

    A second one raises `KeyboardInterrupt`, or within `ending_now` ends the process. A SIGHUP that is ignored, as under
    `nohup`, stays so. Outside of the main thread nothing is listed.
    """
    numbers: list[int] = []
    first: list[float] = []

    def handle(number):
        if not first:
            first.append(time.monotonic())
            name = signal.Signals(number).name
            print(f"\n{name}: ends after this step; again to end now", file=sys.stderr, flush=True)
        elif _ends and _is_another(first):
            _ends[-1](128 + number)

    def note(number, frame):
        numbers.append(number)
        if len(numbers) > 1 and not _ends and _is_another(first):
            raise KeyboardInterrupt

    with _handled(handle, note):
        yield numbers


def _is_another(first: list[float]) -> bool:
    """Whether a signal that arrives now is a second one."""
    return bool(first) and time.monotonic() - first[0] > SAME_SECONDS


@contextlib.contextmanager
def _handled(handle: Callable[[int], None], handler: Callable[[int, Any], None]) -> Iterator[bool]:
    """A context with a handler of signals, and a thread that handles them at the moment at which they arrive.

    It yields whether signals are handled, which is so in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield False
        return
    ignored = {number for number in SIGNALS if signal.getsignal(number) is signal.SIG_IGN} - {signal.SIGINT}
    handled = [number for number in SIGNALS if number not in ignored]
    with _woken(lambda number: handle(number) if number in handled else None):
        before = {number: signal.signal(number, handler) for number in handled}
        try:
            yield True
        finally:
            for number, each in before.items():
                signal.signal(number, each)


@contextlib.contextmanager
def _woken(handle: Callable[[int], None]) -> Iterator[None]:
    """A context in which a thread is woken by signals and handles them."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    _writers.add(own := writer.fileno())

    def read():
        while received := reader.recv(16):
            if before != -1 and before not in _writers:  # set by other code, such as asyncio
                with contextlib.suppress(OSError):
                    os.write(before, received)
            for number in received:
                handle(number)

    thread = threading.Thread(target=read, name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        _writers.discard(own)
        writer.close()
        thread.join()
        reader.close()
