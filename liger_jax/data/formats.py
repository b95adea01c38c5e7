"""The formats of a row of data: the fields that identify each, and what is trained on or is the prompt.

A row that could be read in two ways is refused, since nobody would notice training on the wrong one.
"""

import dataclasses
import difflib
import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from liger_jax.chat import strict_json
from liger_jax.chat.messages import VALUES, check_media, checked_messages, look_alikes, template_values, tools
from liger_jax.chat.strict_json import kind_of
from liger_jax.data.documents import Document
from liger_jax.data.pieces import errors_at
from liger_jax.user_errors import UserError

MOST_LEVELS = 100  # the deepest nesting of lists and objects, which are read recursively later
CONVERSATIONS = ("conversations", "conversation")
ROLES = {  # ShareGPT's roles, and those that chat templates know
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant",
    "system": "system", "tool": "tool",
}  # fmt: skip
_PAIRS = ("chosen", "rejected")
_ENCODER = json.JSONEncoder(default=str, ensure_ascii=False)
_TEXTS = ("text", "instruction", "output", "prompt", "completion")  # fields of `FORMATS` that may hold texts
_ANSWER = {"role": "assistant", "content": "."}  # follows the messages of a prompt while they are checked
Row = dict[str, Any]


def document(where: str, values: Row, column: str | None = None, form: str | None = None) -> Document:
    """What a row holds.

    `column`: the field that is trained on, a text or a list of messages; `None` for what the fields' names say. A row
    that does not have it is read by its names. `form`: one of `FORMATS`, where the fields' names are those of several;
    `None` for the only one.
    """
    nulls = [name for name, value in values.items() if value is None]
    return checked(where, values, lambda values: _document(where, values, column, form, nulls))


def checked(where: str, values: Row, read: Callable[[Row], Document]) -> Document:
    """What a row holds, after checks that are those of all rows."""
    if _is_deeper(values, MOST_LEVELS):
        raise UserError(f"{where}: lists and objects are nested to more than {MOST_LEVELS} levels.")
    values = {name: value for name, value in values.items() if value is not None}
    try:
        document = read(values)
        check_media("the row", values, names=document.messages is not None or document.prompt is not None)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    try:
        _ENCODER.encode(document.content).encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can write and UTF-8 cannot
        raise UserError(f"{where}: {error.object[error.start]!r} is not a valid character.") from error
    return document


def prompt(where: str, values: Any) -> Document:
    """What a line asks of a model: a prompt, or messages."""
    fields = values if isinstance(values, dict) else {}
    with errors_at(where):
        check_media("the row", fields)
    text, messages = fields.get("prompt"), fields.get("messages")
    if isinstance(text, str):
        return Document(where, text)
    asked = text if isinstance(text, list) else messages
    if not isinstance(asked, list):
        raise UserError(
            f"{where}, must hold an object with a prompt, which is a text, or with messages."
            f"{f' It has {_names(fields)}.' if fields else ''}{_in_words([k for k, x in fields.items() if x is None])}"
            f"{near_miss(fields, ('prompt', 'messages')) or of_another_command(fields)}"
        )
    try:
        turns = checked_messages({"messages": [*asked, _ANSWER]})[:-1]
        functions, more = tools(fields.get("tools")), template_values(fields.get(VALUES))
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    if not turns or turns[-1]["role"] == "assistant":
        raise UserError(
            f"{where}: the last message must be one that the assistant answers. liger-jax finetune trains on answers."
        )
    return Document(where, messages=turns, tools=functions, values=more)


def _document(where: str, values: Row, column: str | None, form: str | None, nulls: list[str]) -> Document:
    if form is None and column is not None and column in values:
        return dataclasses.replace(_of_column(where, values, column), is_named=True)
    full = {name: each for name, each in values.items() if not _is_missing(each)}
    forms = _forms(full) or _forms(values)
    if form is not None:
        if form not in FORMATS:
            raise UserError(f"--format={form} must be one of {', '.join(FORMATS)}.")
        if form not in forms:
            raise UserError(f"the row is not of --format {form}, {FORMATS[form].fields}: it has {_names(values)}.")
        forms = [form]
    if not forms or forms == ["text"] and form is None and column is not None:  # a text other than the named one
        raise UserError(_unknown(values, column or "text", nulls))
    if len(forms) > 1:
        cures = " or ".join(f"--format {name}" for name in forms)
        problem = "; ".join(f"{name} ({FORMATS[name].fields})" for name in forms)
        raise UserError(f"the row has the fields of more than one format: {problem}. Choose one: {cures}.")
    if form is None and all(name in values for name in _PAIRS):
        raise UserError(
            "the row is a pair of answers, chosen and rejected, and it is unclear what finetune should train on; "
            f"liger-jax dpo trains on both. Choose one: --format {forms[0]}, or --column 'chosen'."
        )
    return FORMATS[forms[0]].read(where, values)


def _forms(values: Row) -> list[str]:
    return [name for name, form in FORMATS.items() if form.has(values)]


def of_another_command(values: Row) -> str:
    """A sentence about the command that trains on a row's fields; "" if there is none.

    >>> of_another_command({"messages": []}), of_another_command({"chosen": "a", "rejected": "b"})
    (' liger-jax finetune trains on rows of messages.', ' liger-jax dpo trains on pairs of chosen and rejected.')
    """
    if all(name in values for name in _PAIRS):
        return " liger-jax dpo trains on pairs of chosen and rejected."
    forms = _forms(values)
    return f" liger-jax finetune trains on rows of {FORMATS[forms[0]].fields}." if forms else ""


def near_miss(values: Row, names: Iterable[str]) -> str:
    """A sentence about the first field whose name is nearly one that is read and not there; "" if there is none.

    >>> near_miss({"promt": "a", "id": 3}, ["text", "prompt"]), near_miss({"question": "a"}, ["prompt"])
    (" Did you mean 'prompt' by 'promt'? Rename it.", '')
    """
    missing = [name for name in names if name not in values]
    for field in map(str, values):
        if near := difflib.get_close_matches(field.strip().lower(), missing, n=1, cutoff=0.8):
            return f" Did you mean {near[0]!r} by {field!r}? Rename it."
    return ""


def _of_column(where: str, values: Row, column: str) -> Document:
    value = values[column]
    if isinstance(value, str):
        return Document(where, value)
    if _are_messages(value):
        return conversation(where, {name: each for name, each in values.items() if name != column}, value)
    raise UserError(f"{column!r} holds {kind_of(value)}, and must hold a text or a list of messages.")


def _of_text(where: str, values: Row) -> Document:
    if not isinstance(values["text"], str):
        raise UserError(f"text holds {kind_of(values['text'])}, and must hold a text.")
    return Document(where, values["text"])


def _of_sharegpt(where: str, values: Row) -> Document:
    names = [name for name in CONVERSATIONS if name in values]
    if len(names) > 1:
        raise UserError(f"the row has both {names[0]} and {names[1]}. Choose one, as in --column {names[0]!r}.")
    return conversation(where, {name: each for name, each in values.items() if name not in names}, values[names[0]])


def _of_alpaca(where: str, values: Row) -> Document:
    asked = [_text_in(values, name) for name in ("instruction", "input") if name in values]
    answer = _text_in(values, "output")
    if values.get("history"):
        raise UserError(
            "the row has a history, and it is unclear whether to train on it. Write the row as messages; "
            '"weight": 0 leaves an answer out.'
        )
    question = "\n".join(text for text in asked if text.strip())
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return conversation(where, {name: values[name] for name in ("system", "tools", VALUES) if name in values}, messages)


def _of_completion(where: str, values: Row) -> Document:
    prompt, completion = (parsed(values[name]) for name in ("prompt", "completion"))
    if str(values.get("label")).strip().lower() in ("true", "false", "1", "0", "1.0", "0.0"):  # as tables store them
        raise UserError(
            "label says whether the completion is good, but finetune would train on bad ones too. Remove their rows "
            "and then the field, or train on both with liger-jax dpo --loss kto."
        )
    if isinstance(prompt, str) and isinstance(completion, str):
        if str(values.get("system") or "").strip():
            raise UserError("the row has a system message, but its prompt is a text. Write it into the prompt.")
        if not completion.strip():
            raise UserError("the completion is empty, so there is nothing to train on. Leave the row out.")
        return Document(where, completion, prompt=prompt)
    if not isinstance(prompt, list) or not isinstance(completion, list):
        raise UserError("prompt and completion must both be texts, or both be lists of messages.")
    before = [m | {"weight": 0} if m["role"] == "assistant" else m for m in map(message, prompt)]
    rest = {name: each for name, each in values.items() if name not in ("prompt", "completion")}
    answers = [message(each) for each in completion]
    if not any(message["role"] == "assistant" for message in answers):
        raise UserError("no message of the completion is the assistant's, and only its words are trained on.")
    return conversation(where, rest, before + answers)


def conversation(where: str, beside: Row, messages: Any) -> Document:
    """The conversation of messages, in the form of chat templates or ShareGPT; `beside` are the row's other fields."""
    messages = parsed(messages)
    if isinstance(messages, list):
        messages = [message(each) for each in messages]
        messages = _with_system(beside.get("system"), messages)
    row = {**beside, "messages": messages}
    return Document(
        where,
        messages=checked_messages(row),
        tools=tools(row.get("tools")),
        values=template_values(row.get(VALUES)),
        unread=frozenset(look_alikes(row)),
    )


def message(value: Any) -> Any:
    """A message with a role and a content, from either form."""
    if not isinstance(value, dict):
        raise UserError("messages must be a list of objects, each with a role and a content.")
    value = {name: each for name, each in value.items() if each is not None}
    if "from" not in value:
        if not isinstance(value.get("role"), str):
            raise UserError("messages must be a list of objects, each with a role and a content.")
        return value
    if "role" in value or "content" in value:
        raise UserError("a message has both 'from' and a role or a content. Remove the fields that are not meant.")
    role = value["from"]
    if not isinstance(role, str) or role not in ROLES:
        raise UserError(f"a message is from {role!r}, and must be from one of {', '.join(ROLES)}.")
    rest = {name: each for name, each in value.items() if name not in ("from", "value")}
    return {"role": ROLES[role], **({"content": value["value"]} if "value" in value else {}), **rest}


def _with_system(system: Any, messages: list[Row]) -> list[Row]:
    """The messages, after the system message of a separate field if there is one."""
    if system is None or isinstance(system, str) and not system.strip():
        return messages
    if not isinstance(system, str):
        raise UserError(f"system holds {kind_of(system)}, and must hold a text.")
    if messages and messages[0].get("role") == "system":
        if messages[0].get("content") == system:
            return messages
        raise UserError(
            "there is a system message in the field system and another one among the messages. Leave out one."
        )
    return [{"role": "system", "content": system}, *messages]


def parsed(value: Any) -> Any:
    """A value, or what a table's cell holds as JSON: an array of objects."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        messages = strict_json.loads(value)
    except strict_json.RepeatedNameError as error:
        raise UserError(f"a cell with JSON cannot be read: {error}.") from error
    except (ValueError, RecursionError):
        return value
    return (
        messages
        if messages and isinstance(messages, list) and all(isinstance(each, dict) for each in messages)
        else value
    )


def _text_in(values: Row, name: str) -> str:
    if not isinstance(values[name], str):
        raise UserError(f"{name} holds {kind_of(values[name])}, and must hold a text.")
    return values[name]


def _are_messages(value: Any) -> bool:
    value = parsed(value)
    is_one = lambda each: isinstance(each, dict) and isinstance(each.get("role", each.get("from")), str)
    return isinstance(value, list) and bool(value) and all(map(is_one, value))


def _is_missing(value: Any) -> bool:
    """Whether a value is what tables have where there is none."""
    return isinstance(value, str | list) and len(value) == 0


def _in_words(nulls: list[str]) -> str:
    """A sentence about fields that are null."""
    if not nulls:
        return ""
    return f" {', '.join(map(repr, nulls))} {'is' if len(nulls) == 1 else 'are'} null, which counts as absent."


def _unknown(values: Row, column: str, nulls: list[str]) -> str:
    """Why a row is of no format, and the cure."""
    problem = f"there are no messages, and no text in {column!r}, among {_names(values)}."
    problem += _in_words(nulls)
    if all(name in values for name in _PAIRS):
        return (
            f"{problem} It is a pair of answers: liger-jax dpo trains on such rows, and liger-jax data --loss sigmoid "
            "shows them. To train on one answer alone, name it: --column 'chosen'."
        )
    if "input_ids" in values:
        return f"{problem} input_ids are tokens, and a run makes them of texts itself: train on tokens by make_step."
    conversations = [name for name, value in values.items() if _are_messages(value)]
    texts = [name for name, value in values.items() if isinstance(value, str) and value.strip()]
    if len(conversations) == 1:
        return f"{problem} Name the field with the messages: --column {conversations[0]!r}."
    if len(texts) == 1:
        return f"{problem} Name the text's field: --column {texts[0]!r}."
    if near := near_miss(dict.fromkeys([*texts, *filter(values.get, _TEXTS)]), _TEXTS):
        return f"{problem}{near}"
    if texts:
        return (
            f"{problem} If all of one field is the text, name it: --column {texts[0]!r}. If {texts[0]!r} is asked and "
            f"{texts[1]!r} is answered, rename them to instruction and output for a model with a chat template, or to "
            "prompt and completion, which are joined as they stand."
        )
    formats = "; ".join(f"{name} ({each.fields})" for name, each in FORMATS.items())
    return f"{problem} A row has the fields of one of these formats: {formats}."


def _names(values: Row) -> str:
    return str(sorted(map(str, values)))


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested to more levels than these."""
    inside = [value]
    for _ in range(levels + 1):
        inside = [each for each in inside if isinstance(each, dict | list)]
        if not inside:
            return False
        inside = [part for each in inside for part in (each.values() if isinstance(each, dict) else each)]
    return True


class Format(NamedTuple):
    """A format of rows that `finetune` and `distill` train on."""

    fields: str  # its fields in words
    has: Callable[[Row], bool]  # whether a row has them
    read: Callable[[str, Row], Document]  # what a row holds, by its place in the data


FORMATS = {
    "messages": Format(
        "messages", lambda row: "messages" in row, lambda where, row: conversation(where, row, row["messages"])
    ),
    "sharegpt": Format(
        "conversations",
        lambda row: any(not isinstance(parsed(row.get(name, "")), str) for name in CONVERSATIONS),
        _of_sharegpt,
    ),
    "alpaca": Format("instruction and output", lambda row: "instruction" in row and "output" in row, _of_alpaca),
    "prompt-completion": Format(
        "prompt and completion", lambda row: "prompt" in row and "completion" in row, _of_completion
    ),
    "text": Format("text", lambda row: "text" in row, _of_text),
}
