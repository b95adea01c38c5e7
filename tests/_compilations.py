"""How many programs are compiled."""

import contextlib

import jax.monitoring

_COMPILED = "/jax/core/compile/backend_compile_duration"  # also where a program is read from a cache


@contextlib.contextmanager
def compilations():
    """A context that notes each program that is compiled in it, in the list that it gives."""
    noted = []

    def listen(event, duration, **_):
        if event == _COMPILED:
            noted.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield noted
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
