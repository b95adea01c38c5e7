"""Functions whose loops and closures are compiled once: eager calls of the same shapes then share a program.

JAX finds a compiled loop by the identity of its body, and outside of `jax.jit` each call defines a new body.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer


def is_part_of_a_program() -> bool:
    """Whether what is computed now becomes part of a program, by `jax.jit` or another transformation that traces."""
    return isinstance(jax.lax.full((), 0), Tracer)


def compiled_once(function: Callable[..., Any], *, static_argnums: int | tuple[int, ...] = ()) -> Callable[..., Any]:
    """The function of arrays, by one program for each of their types where it is called outside of `jax.jit`.

    Static arguments, and what the function closes over, must be hashable and hold no array, since JAX's cache keeps
    them. Inside of a program the function is called as it is.
    """
    jitted = jax.jit(function, static_argnums=static_argnums)

    @functools.wraps(function)
    def call(*arguments):
        return (function if is_part_of_a_program() else jitted)(*arguments)

    return call


def made_once(make: Callable[..., Any]) -> Callable[..., Any]:
    """What is made of hashable arguments: outside of a program the same again, for the last few of them.

    It is for what may hold a user's function, which no cache may keep for good.
    """
    last = functools.lru_cache(maxsize=16)(make)

    @functools.wraps(make)
    def call(*arguments):
        return (make if is_part_of_a_program() else last)(*arguments)

    return call
