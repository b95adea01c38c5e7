"""A row that is one answer with a label, good or bad, as datasets for KTO write it: `prompt`, `completion`, `label`."""

import dataclasses
from typing import Any

from liger_jax.chat.strict_json import kind_of
from liger_jax.data import formats, pairs
from liger_jax.data.documents import Document
from liger_jax.data.formats import Row, parsed
from liger_jax.models.core.config_fields import short
from liger_jax.user_errors import UserError

_LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
FORM, FORM_WITH_OTHERS = "unpaired", "unpaired with others"  # what the settings call such rows


def document(where: str, values: Row, column: str | None = None, form: str | None = None) -> Document:
    """What a row holds.

    Returns the completion after its prompt, and in `desirable` its label. Only what follows the prompt is trained on.
    """
    return formats.checked(where, values, lambda values: _labelled(where, values))


def _labelled(where: str, values: Row) -> Document:
    if "chosen" in values and "rejected" in values:
        raise UserError(
            "the row is a pair of chosen and rejected, and single answers with labels are trained on. --loss apo_zero "
            "and --loss bco_pair score each answer of a pair by itself."
        )
    if missing := [name for name in ("completion", "label") if name not in values]:
        raise UserError(
            f"there is no {missing[0]!r} among {sorted(map(str, values))}. A row must have completion, a text or a "
            "list of messages, and label, true or false, and may have a prompt."
        )
    label = _label(values["label"])
    prompt, completion = (parsed(values[name]) if name in values else None for name in ("prompt", "completion"))
    if isinstance(completion, str) and not isinstance(prompt, list):
        if str(values.get("system") or "").strip():
            raise UserError("the row has a system message beside a completion that is text. Write it into the prompt.")
        if not isinstance(prompt, str | None):
            raise UserError(f"prompt holds {kind_of(prompt)}, and must hold a text or a list of messages.")
        return Document(where, completion, prompt=prompt or "", desirable=label)
    document = pairs.answered(where, values, prompt, completion)
    return dataclasses.replace(document, desirable=label)


def _label(value: Any) -> bool:
    """Whether an answer is good: true or 1, or such a word, as a table without types writes it."""
    known = _LABELS.get(value.strip().lower()) if isinstance(value, str) else value
    if not isinstance(known, bool | int | float) or known not in (0, 1):
        raise UserError(f"label holds {short(value)}, and must be true for a good answer, or false.")
    return bool(known)
