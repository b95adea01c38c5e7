"""The package's annotations are checked in tests, where beartype is there to do it."""

import functools
import importlib.util
import inspect
import typing

import jaxtyping
from jaxtyping import _decorator

MOST = 5  # calls of one function that each test has checked
_of_test = object()
CHECKED = importlib.util.find_spec("beartype") is not None


def check() -> None:
    """Before liger_jax is imported."""
    if CHECKED:
        # The hook's code calls the first, which calls the second for methods and fields.
        jaxtyping.jaxtyped = _decorator.jaxtyped = _when_called(_decorator.jaxtyped)
        jaxtyping.install_import_hook("liger_jax", "beartype.beartype")


def begin_test() -> None:
    """Every function is checked again."""
    global _of_test
    _of_test = object()


def _when_called(jaxtyped):
    """The decorator, whose work waits for a function's first call, and is less for functions of no arrays.

    For each function it compiles three others, in some milliseconds, while one process calls few of them. Each call
    then takes some 50 µs for the letters of shapes; beartype alone takes 1. After a function's first calls in a test,
    the planner would spend most of its time on them.
    """
    import beartype

    beartyped = beartype.beartype(conf=beartype.BeartypeConf(violation_type=TypeError))

    def decorate(function=None, *, typechecker=None):
        if function is None:
            return functools.partial(decorate, typechecker=typechecker)
        if not inspect.isfunction(function):
            return jaxtyped(function, typechecker=typechecker)
        if not function.__annotations__:
            return function
        checked, test, calls = None, None, 0

        @functools.wraps(function)
        def checks(*args, **kwargs):
            nonlocal checked, test, calls
            if test is not _of_test:
                test, calls = _of_test, 0
            calls += 1
            if calls > MOST or jaxtyping.config.jaxtyping_disable:
                return function(*args, **kwargs)
            if checked is None:
                has_shapes = _has_shapes(function)
                checked = jaxtyped(function, typechecker=typechecker) if has_shapes else beartyped(function)
            return checked(*args, **kwargs)

        return checks

    return decorate


def _has_shapes(function) -> bool:
    """Whether its annotations speak of arrays' shapes; so they may where they cannot be read."""
    try:
        return "jaxtyping." in repr(typing.get_type_hints(function))
    except (NameError, TypeError):
        return True
