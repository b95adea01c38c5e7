"""JSON of rows, in which no name may occur twice: Python's reader would take the last value and lose the others."""

import json
from typing import Any

from liger_jax.models.core.config_fields import short


class RepeatedNameError(ValueError):
    """A name occurs twice in one object."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RepeatedNameError(f"the name {short(twice)} occurs twice in one object, and one value would be lost")
    return result


DECODER = json.JSONDecoder(object_pairs_hook=_object)


def loads(text: str) -> Any:
    """The value that a text holds as JSON."""
    return json.loads(text, object_pairs_hook=_object)
