"""Runs the user's code: with a timeout, with the modules of the current folder, and back in the same folder."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

_PAUSE = 1.0  # seconds until code that has caught an interruption is interrupted again
_MOST = 10  # interruptions, after which the process ends
# A signal that is not sent otherwise and is ignored by default, so that one that arrives late does no harm.
_SIGNAL = getattr(signal, "SIGURG", None)


class OutOfTimeError(BaseException):
    """Is raised in the user's code once its time is over. It is no `Exception`, which such code often catches."""


@contextlib.contextmanager
def folder_kept(home: str | None, report: Callable[[str], None]) -> Iterator[None]:
    """A context in which modules of the current folder can be imported, and which restores the current folder.

    An installed command does not look for modules there by itself.
    """
    if home is None:
        yield
        return
    sys.path.insert(0, home)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the code may have changed the path
            sys.path.remove(home)
        if (now := current_folder()) != home:
            os.chdir(home)
            report(now or "a folder that was removed")


def current_folder() -> str | None:
    """The current folder, or `None` where it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return None


@contextlib.contextmanager
def limited(seconds: float, last: Callable[[], None]) -> Iterator[None]:
    """A context whose code is interrupted by an `OutOfTimeError` after so many seconds.

    A signal interrupts a wait as well as a computation. A thread sends it; SIGALRM comes too, unless the code has its
    own handler for it, because some code never lets another thread run, such as a regular expression that backtracks.

    Without effect outside of the main thread, whose handlers alone Python calls, and on Windows.

    `last`: is called if the code catches each interruption and goes on, before the process ends with code 2.
    """
    main = threading.main_thread()
    if threading.current_thread() is not main or _SIGNAL is None:
        yield
        return
    is_done, until = threading.Event(), time.monotonic() + seconds

    def interrupt(number, frame):
        if not is_done.is_set() and time.monotonic() >= until:
            raise OutOfTimeError

    def watch():
        pause = seconds
        for _ in range(_MOST):
            if is_done.wait(pause):
                return
            signal.pthread_kill(main.ident, _SIGNAL)
            pause = _PAUSE
        if not is_done.wait(pause):
            last()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(2)

    has_alarm = signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    numbers = [_SIGNAL, signal.SIGALRM] if has_alarm else [_SIGNAL]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    thread = threading.Thread(target=watch, name="reward-timeout", daemon=True)
    thread.start()
    if has_alarm:
        signal.setitimer(signal.ITIMER_REAL, seconds + _PAUSE / 10, _PAUSE)
    try:
        try:
            yield
        finally:
            is_done.set()
    finally:
        is_done.set()
        thread.join()
        if signal.getitimer(signal.ITIMER_REAL)[1] == _PAUSE:  # ours, and not the code's own
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            if signal.getsignal(number) is interrupt:
                signal.signal(number, handler)
