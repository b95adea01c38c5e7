"""Functions whose loops and closures are compiled once: eager calls of the same shapes then share a program.

JAX finds a compiled loop by the identity of its body, and outside of `jax.jit` each call defines a new body.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer


def is_part_of_a_program() -> bool:
    """Whether this computation is being traced, by `jax.jit` or another transformation."""
    return isinstance(jax.lax.full((), 0), Tracer)


def compiled_once(function: Callable[..., Any], *, static_argnums: int | tuple[int, ...] = ()) -> Callable[..., Any]:
    """The function of arrays, compiled once for each of their types if it is called outside of `jax.jit`.

    Static arguments, and what the function closes over, must be hashable and hold no array, since JAX's cache keeps
    them. Under a trace the function is called directly.
    """
    jitted = jax.jit(function, static_argnums=static_argnums)

    @functools.wraps(function)
    def call(*arguments):
        return (function if is_part_of_a_program() else jitted)(*arguments)

    return call


def made_once(make: Callable[..., Any]) -> Callable[..., Any]:
    """A cached result of a function of hashable arguments, outside of traces and for the last few arguments.

    It is for results that may hold a user's function, which no cache may keep forever.
    """
    last = functools.lru_cache(maxsize=16)(make)

    @functools.wraps(make)
    def call(*arguments):
        return (make if is_part_of_a_program() else last)(*arguments)

    return call
