"""Fields of config.json that transformers reads and that change nothing here: each is passed over with one line."""

import warnings
from collections.abc import Mapping
from typing import Any

from liger_jax.models.core.config_fields import short

# transformers cut each product into so many parts once, and does not read the field any more.
_UNREAD = ("pretraining_tp",)


def say(values: Mapping[str, Any], never: tuple[str, ...]) -> None:
    """Warns of fields that ask for something which transformers does not compute, either."""
    asked = [name for name in _UNREAD if values.get(name) not in (None, 1)] + [
        name for name in never if values.get(name)
    ]
    if asked:
        shown = ", ".join(f"{name}={short(values[name])}" for name in asked)
        warnings.warn(f"config.json: {shown} changes nothing, here as in transformers.", stacklevel=2)


def dropout(values: Mapping[str, Any]) -> str | None:
    """What a command says before it trains a model whose config.json asks for dropout, which is none here.

    >>> dropout({"attention_dropout": 0.1})
    'attention_dropout=0.1 of config.json is not applied: training here drops nothing of the attention'
    """
    share = values.get("attention_dropout")
    if not share:
        return None
    return (
        f"attention_dropout={short(share)} of config.json is not applied: training here drops nothing of the attention"
    )
