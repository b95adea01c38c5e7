"""JSON of rows, in which no name may occur twice: Python's reader would take the last value and lose the others."""

import json
import reprlib
from typing import Any


class RepeatedNameError(ValueError):
    """A name occurs twice in one object."""


_NAMES = reprlib.Repr()  # long names are cut in a message
_NAMES.maxstring = 60


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RepeatedNameError(
            f"the name {_NAMES.repr(twice)} occurs twice in one object, and one value would be lost"
        )
    return result


_KINDS = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", int: "a number", float: "a number"}
DECODER = json.JSONDecoder(object_pairs_hook=_object)


def loads(text: str) -> Any:
    """The value that a text holds as JSON."""
    return json.loads(text, object_pairs_hook=_object)


def kind_of(value: Any) -> str:
    """What a value is, in the words of a message.

    >>> kind_of(3), kind_of([]), kind_of(None)
    ('a number', 'a list', 'null')
    """
    return "null" if value is None else _KINDS.get(type(value), f"a value of type {type(value).__name__}")
