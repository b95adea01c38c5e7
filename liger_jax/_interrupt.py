"""Ctrl-C while the command `liger-jax` imports its packages, which takes seconds: one sentence, and exit code 130."""

# These modules Python has imported already, or imports in no time.
import os
import signal
import sys
import threading

_NAME = "liger-jax"
STOPPED = f"{_NAME}: stopped before it began."


def _end(*_):
    # Whatever is being imported may catch a KeyboardInterrupt, or turn it into an error of its own.
    os.write(2, f"{STOPPED}\n".encode())
    os._exit(130)


def _begin():
    """Handles Ctrl-C until `is_over`, in the process of the command alone."""
    name = os.path.splitext(os.path.basename(sys.argv[0]))[0] if sys.argv else ""
    is_main = threading.current_thread() is threading.main_thread()
    if name == _NAME and is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def is_over():
    """Gives Ctrl-C back to Python."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_begin()
