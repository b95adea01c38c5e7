"""The messages and tools of a conversation, checked and in the form that chat templates take."""

import re
from collections.abc import Mapping
from typing import Any

from liger_jax.chat import strict_json
from liger_jax.user_errors import UserError

IS_TRAINED = ("weight", "train", "training")  # fields of a message that say whether it is trained on
REASONING = ("reasoning_content", "thinking", "reasoning")
VALUES = "chat_template_kwargs"
_OF_MESSAGE = {"role", "content", "name", "tool_calls", "tool_call_id", *REASONING, *IS_TRAINED}
_OF_ROW = {"messages", "tools", VALUES}
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt"}  # a template gets these from elsewhere
_LOOK_ALIKE = re.compile(r"weight|train|loss|mask|kwargs|function", re.IGNORECASE)
_TEXT = ("text", "input_text", "output_text")  # types of parts that are text
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")


def checked_messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a row. A null counts as absent, as tables write it; contents that are lists are joined."""
    turns = _without_nulls(row["messages"])
    if not isinstance(turns, list) or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in turns):
        raise UserError("messages must be a list of objects, each with a role and a content.")
    if not any(message["role"] == "assistant" for message in turns):
        roles = ", ".join(list(dict.fromkeys(repr(message["role"][:30]) for message in turns))[:4]) or "none"
        raise UserError(
            f"no message is the assistant's, and only the assistant's words are trained on. The roles are {roles}; "
            "chat templates know 'system', 'user', 'assistant' and 'tool'."
        )
    return [_message(f"message {i}, the {m['role']}'s,", m) for i, m in enumerate(turns, 1)]


def tools(value: Any) -> list[dict[str, Any]] | None:
    """The tools of a row."""
    functions = _without_nulls(_of_json(value, "tools"))
    if isinstance(functions, list):
        functions = [_of_json(tool, "tools") for tool in functions]
    if functions is None or functions == []:
        return None
    if not isinstance(functions, list) or not all(isinstance(tool, dict) for tool in functions):
        raise UserError("tools must be a list of objects, or that list as JSON.")
    return functions


def template_values(value: Any) -> dict[str, Any]:
    """The variables that a row gives to its chat template."""
    variables = _without_nulls(_of_json(value, VALUES))
    if variables is None:
        return {}
    if not isinstance(variables, dict):
        raise UserError(f"{VALUES} must be an object, such as {{'enable_thinking': false}}.")
    if taken := sorted(_GIVEN & set(variables)):
        raise UserError(f"{VALUES} must not have {taken[0]!r}, which the row itself has.")
    return variables


def look_alikes(row: dict[str, Any]) -> set[str]:
    """The fields that seem to choose what is trained on, but are not read."""
    row, of_messages = _without_nulls(row), set()
    for message in row["messages"]:
        unread = set(message) - (_OF_MESSAGE if message["role"] == "assistant" else _OF_MESSAGE - set(IS_TRAINED))
        # Messages of other roles are not trained on anyway, as with a weight of 0.
        of_messages |= {
            name for name in unread if _LOOK_ALIKE.search(name) and (name not in IS_TRAINED or message[name])
        }
    return {f"{name!r} in a message" for name in of_messages} | {
        f"{name!r} beside the messages" for name in set(row) - _OF_ROW if _LOOK_ALIKE.search(name)
    }


def check_media(what: str, fields: Mapping[str, Any], *, names: bool = True) -> None:
    """Raises an error if fields hold images, video or sound, of which a text would be trained on without them.

    `names`: whether a file's name or address counts, too.
    """
    if media := [name for name in _MEDIA if _is_media(fields.get(name), names)]:
        raise UserError(f"{what} has {media[0]!r}, and only text can be trained on.")


def _is_media(value: Any, names: bool) -> bool:
    if isinstance(value, list | tuple):
        return any(_is_media(each, names) for each in value)
    if isinstance(value, str):
        return names and bool(value)
    return not isinstance(value, bool | int | float | None) and not (
        isinstance(value, dict) and not any(value.values())
    )


def is_trained(message: Mapping[str, Any]) -> bool:
    """Whether a message is to be trained on, by its own fields."""
    return all(message.get(field) is None or bool(message[field]) for field in IS_TRAINED)


def _message(what: str, message: dict[str, Any]) -> dict[str, Any]:
    result = dict(message)
    check_media(what, message)
    for name in IS_TRAINED:
        if result.get(name, 1) not in (0, 1):
            raise UserError(f"{what} has {name}={result[name]!r}, and must have 0 or 1, false or true.")
    if "content" in result:
        result["content"] = _content(what, result["content"])
    for name in REASONING:
        if name in result:
            result[name] = _content(what, result[name])
    calls = _of_json(result.pop("tool_calls", None), "tool_calls")
    if calls:
        result["tool_calls"] = _tool_calls(what, calls)
    has_more = bool(calls) or any(result.get(name) for name in REASONING)
    if "content" not in result and not (result["role"] == "assistant" and has_more):
        raise UserError(f"{what} has no content.")
    if result["role"] == "assistant" and is_trained(result) and not has_more and not result["content"].strip():
        raise UserError(
            f"{what} is empty, so that only the mark that ends it would be trained on. Leave it out, or give it "
            '"weight": 0.'
        )
    return result


def _content(what: str, content: Any) -> str:
    """A content as one text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UserError(f"{what} has a content of type {type(content).__name__}, and must have a text.")
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
        text = part if isinstance(part, str) else part.get("text") if kind in _TEXT else None
        if not isinstance(text, str):
            raise UserError(f"{what} has an item of type {kind!r}, and only text can be trained on.")
        check_media(f"{what} has an item of text that", part if isinstance(part, dict) else {})
        texts.append(text)
    return "".join(texts)


def _tool_calls(what: str, calls: Any) -> list[dict[str, Any]]:
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UserError(f"{what} has tool_calls that are not a list of objects, each with a function and its name.")
        if not isinstance(function.get("arguments", {}), dict | str):
            raise UserError(
                f"{what} calls {function['name']!r} with arguments of type {type(function['arguments']).__name__}, "
                "and must do so with an object, or with JSON of it."
            )
    return calls


def _of_json(value: Any, name: str) -> Any:
    """The value, or the value that it holds as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return strict_json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is a text that is not JSON: {str(error)[:200]}.") from error


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
