"""The dataclass of results: chex's, with a constructor that type checkers see."""

import typing
from typing import Any, TypeVar

import chex

_Class = TypeVar("_Class")


@typing.dataclass_transform(kw_only_default=True, frozen_default=True)
def tree_dataclass(cls: type[_Class]) -> type[_Class]:
    """A frozen `chex.dataclass`: a JAX pytree and a mapping of its fields, which the constructor takes by name.

    chex's own decorator hides the constructor from type checkers, because its result has no annotation.
    """
    decorate: Any = chex.dataclass
    return decorate(cls, frozen=True)
