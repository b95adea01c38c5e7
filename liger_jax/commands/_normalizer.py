"""How much longer a tokenizer's normalizer can make a text, before any text is given to it."""

import math
from pathlib import Path
from typing import Any

from liger_jax.commands._errors import UserError
from liger_jax.models.hugging_face import config_json

_MOST_GROWTH = 100  # times as long as a text that a normalizer may make of it by replacing


def check_growth(path: Path, content: bytes) -> None:
    """Checks that no normalizer makes a text many times as long, which would fill the memory."""
    try:
        values = config_json.loads(content, path)
    except ValueError as error:
        raise UserError(f"{path} cannot be read: {str(error).removeprefix(f'{path} ')[:500]}") from error
    if (growth := _growth(values.get("normalizer"))) > _MOST_GROWTH:
        raise UserError(
            f"{path}: its normalizer can make a text {growth:.3g} times as long, and {_MOST_GROWTH} times is the most. "
            "Pass a model with another tokenizer."
        )


def _growth(normalizer: Any) -> float:
    """How many times as long as a text a normalizer's replacements can make it."""
    if not isinstance(normalizer, dict):
        return 1.0
    parts = normalizer.get("normalizers")
    if isinstance(parts, list):
        return math.prod(map(_growth, parts))
    pattern, new = normalizer.get("pattern"), normalizer.get("content")
    if not isinstance(pattern, dict) or not isinstance(new, str):
        return 1.0
    old = pattern.get("String")
    return max(1.0, len(new) / max(1, len(old))) if isinstance(old, str) else 1.0 + len(new)
