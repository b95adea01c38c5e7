"""Rows of preferences: pairs of answers, `chosen` and `rejected`, or single ones, `completion` with a `label`.

Answers are texts or lists of messages. What they answer is `prompt`, a text or messages; for a pair also the messages
`conversations`, or what both begin with.
"""

import dataclasses
from typing import Any

from liger_jax.chat.messages import REASONING, VALUES
from liger_jax.chat.strict_json import kind_of
from liger_jax.data import formats
from liger_jax.data.documents import Document
from liger_jax.data.formats import CONVERSATIONS, Row, conversation, message, parsed
from liger_jax.models.core.config_fields import short
from liger_jax.user_errors import UserError

PAIRS = "pairs"  # the name of such rows in the settings
LABELLED, LABELLED_WITH_OTHERS = "unpaired", "unpaired with others"
SIDES = ("chosen", "rejected")
_PROMPTS = ("prompt", *CONVERSATIONS)
_NOT_READ = ("question", "instruction", "input")  # other names of a prompt, which would be ignored
_BESIDE = ("system", "tools", VALUES)
_SCORES = (  # names in data sets of the scores by which an answer was chosen
    ("score_chosen", "score_rejected"), ("chosen_score", "rejected_score"), ("chosen-rating", "rejected-rating"),
    ("chosen_rating", "rejected_rating"),
)  # fmt: skip
_LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


def pair(where: str, values: Row, column: str | None = None, form: str | None = None) -> Document:
    """What a row holds.

    Returns the chosen answer after its prompt, and in `rejected` the other one after the same. Only what follows the
    prompt is trained on.
    """
    document = formats.checked(where, values, lambda values: _pair(where, values))
    return dataclasses.replace(document, is_doubted=_is_doubted(values))


def _is_doubted(values: Row) -> bool:
    """Whether the scores in the row say that the rejected answer is as good as the chosen one, or better."""
    for names in _SCORES:
        try:
            chosen, rejected = (float(values[name]) for name in names)
        except (LookupError, TypeError, ValueError, OverflowError):  # there are no scores, or they are not numbers
            continue
        if chosen <= rejected:
            return True
    return False


def _answered(where: str, values: Row, prompt: Any, answer: Any) -> Document:
    """A single answer as a conversation.

    Returns the conversation, of which the assistant's messages after the prompt are trained on; an empty text for an
    empty answer, which is left out.
    """
    answers = _messages("completion", answer)
    if not any(each["role"] == "assistant" for each in answers):
        raise UserError("completion holds no message of the assistant's, and only those are scored.")
    if _is_blank(answers):
        return Document(where, prompt="")
    beside = {name: values[name] for name in _BESIDE if name in values}
    return conversation(where, beside, _unscored([] if prompt is None else _prompt(prompt)) + answers)


def _unscored(messages: list[Row]) -> list[Row]:
    return [each | {"weight": 0} if each["role"] == "assistant" else each for each in messages]


def _pair(where: str, values: Row) -> Document:
    if "label" in values and "completion" in values:
        raise UserError(
            "the row is one completion with a label, but this loss needs pairs. Pass --loss kto, or rows that have "
            "chosen and rejected."
        )
    if missing := [name for name in SIDES if name not in values]:
        raise UserError(
            f"there is no {missing[0]!r} among {sorted(map(str, values))}. A row must have chosen and rejected, both "
            "texts or both lists of messages, and may have a prompt."
            f"{formats.near_miss(values, (*SIDES, 'prompt')) or formats.of_another_command(values)}"
        )
    prompts = [name for name in _PROMPTS if values.get(name) not in (None, "", [])]
    if len(prompts) > 1:
        raise UserError(f"the row has both {prompts[0]} and {prompts[1]}. Remove the one that is not the prompt.")
    if not prompts and (others := [name for name in _NOT_READ if values.get(name)]):
        raise UserError(f"the row has chosen, rejected and {others[0]!r}, but no prompt. Rename it to prompt.")
    prompt = parsed(values[prompts[0]]) if prompts else None
    chosen, rejected = (parsed(values[name]) for name in SIDES)
    if isinstance(chosen, str) and isinstance(rejected, str) and not isinstance(prompt, list):
        return _texts(where, values, prompt, chosen, rejected)
    return _conversations(where, values, prompt, chosen, rejected)


def _texts(where: str, values: Row, prompt: Any, chosen: str, rejected: str) -> Document:
    if prompt is not None and not isinstance(prompt, str):
        raise UserError(f"prompt holds {kind_of(prompt)}, and must hold a text or a list of messages.")
    if str(values.get("system") or "").strip():
        raise UserError("the row has a system message, but its answers are texts. Write it into the prompt.")
    if prompt is None:
        size = _same_beginning(chosen, rejected)
        prompt, chosen, rejected = chosen[:size], chosen[size:], rejected[size:]
    return Document(where, chosen, prompt=prompt, rejected=Document(where, rejected, prompt=prompt))


def _same_beginning(one: str, other: str) -> int:
    """The number of characters that both texts begin with, up to white space, so that no word is cut."""
    size, most = 0, min(len(one), len(other)) - 1
    while size < most and one[size] == other[size]:
        size += 1
    while size > 0 and not one[size].isspace():
        size -= 1
    return max(0, size)


def _conversations(where: str, values: Row, prompt: Any, chosen: Any, rejected: Any) -> Document:
    sides = [_messages(name, side) for name, side in zip(SIDES, (chosen, rejected), strict=True)]
    before = [] if prompt is None else _prompt(prompt)
    if not before or all(_first_asked(side) == _first_asked(before) for side in sides):  # the answers include it
        system = [each for each in before[:1] if each["role"] == "system" and sides[0][0]["role"] != "system"]
        size = _same_messages(*sides)
        before, sides = system + sides[0][:size], [side[size:] for side in sides]
    elif others := [name for name, side in zip(SIDES, sides, strict=True) if side[0]["role"] != "assistant"]:
        raise UserError(_not_the_prompt(others, values, before))
    before = _unscored(before)
    beside = {name: values[name] for name in _BESIDE if name in values}
    pair = []
    for name, answers in zip(SIDES, sides, strict=True):
        if not any(each["role"] == "assistant" for each in answers):
            raise UserError(f"{name} holds no message of the assistant's after the prompt, and only those are scored.")
        if _is_blank(answers):
            return Document(where, prompt="", rejected=Document(where, prompt=""))
        try:
            pair.append(conversation(where, beside, before + answers))
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
    return dataclasses.replace(pair[0], rejected=pair[1])


def _not_the_prompt(others: list[str], values: Row, before: list[Row]) -> str:
    """Why a row is refused in which the answers begin with other messages than the prompt."""
    begin = f"{others[0]} begins" if len(others) == 1 else "chosen and rejected begin"
    problem = f"{begin} with other messages than the prompt."
    texts = [name for name in SIDES if isinstance(parsed(values[name]), str)]
    if texts and before[-1]["role"] == "assistant":
        return f"{problem} prompt ends with an answer, and {texts[0]} is a text: the two seem to be swapped."
    return f"{problem} Leave out what is not meant."


def _is_blank(answers: list[Row]) -> bool:
    """Whether the assistant's messages have no content, no tool calls and no reasoning."""
    said = [each for each in answers if each["role"] == "assistant"]
    fields = ("content", "tool_calls", *REASONING)
    return not any(str(each.get(name) or "").strip() for each in said for name in fields)


def _messages(name: str, value: Any) -> list[Row]:
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    value = [value] if isinstance(value, dict) else value
    if not isinstance(value, list) or not value:
        raise UserError(f"{name} holds {kind_of(value)}, and must hold a text or a list of messages.")
    try:
        return [message(each) for each in value]
    except UserError as error:
        raise UserError(f"{name}: {error}") from error


def _prompt(prompt: Any) -> list[Row]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return _messages("prompt", prompt)


def _first_asked(messages: list[Row]) -> str | None:
    """The first message to the assistant, which identifies a conversation; `None` if there are only answers."""
    asked = (each for each in messages if each["role"] not in ("system", "assistant"))  # any name of the user's role
    return next((str(each.get("content")).strip() for each in asked), None)


def _same_messages(one: list[Row], other: list[Row]) -> int:
    """The number of messages that both begin with; at least one message is left in each."""
    most = min(len(one), len(other)) - 1
    return next((i for i in range(most) if one[i] != other[i]), most)


def labelled(where: str, values: Row, column: str | None = None, form: str | None = None) -> Document:
    """What a row holds.

    Returns the completion after its prompt, and in `desirable` its label. Only what follows the prompt is trained on.
    """
    return formats.checked(where, values, lambda values: _labelled(where, values))


def _labelled(where: str, values: Row) -> Document:
    if "chosen" in values and "rejected" in values:
        raise UserError(
            "the row is a pair of chosen and rejected, but this loss needs single answers with labels. --loss apo_zero "
            "and --loss bco_pair score each answer of a pair separately."
        )
    if missing := [name for name in ("completion", "label") if name not in values]:
        raise UserError(
            f"there is no {missing[0]!r} among {sorted(map(str, values))}. A row must have completion, a text or a "
            "list of messages, and label, true or false, and may have a prompt."
            f"{formats.near_miss(values, ('completion', 'label', 'prompt')) or formats.of_another_command(values)}"
        )
    label = _label(values["label"])
    prompt, completion = (parsed(values[name]) if name in values else None for name in ("prompt", "completion"))
    if isinstance(completion, str) and not isinstance(prompt, list):
        if str(values.get("system") or "").strip():
            raise UserError("the row has a system message, but its completion is a text. Write it into the prompt.")
        if not isinstance(prompt, str | None):
            raise UserError(f"prompt holds {kind_of(prompt)}, and must hold a text or a list of messages.")
        return Document(where, completion, prompt=prompt or "", desirable=label)
    document = _answered(where, values, prompt, completion)
    return dataclasses.replace(document, desirable=label)


def _label(value: Any) -> bool:
    """Whether an answer is good: true or 1, or one of these as a text, as in a table without types."""
    known = _LABELS.get(value.strip().lower()) if isinstance(value, str) else value
    if not isinstance(known, bool | int | float) or known not in (0, 1):
        raise UserError(f"label holds {short(value)}, and must be true for a good answer, or false.")
    return bool(known)
