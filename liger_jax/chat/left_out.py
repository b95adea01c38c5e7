"""Contents of conversations, apart from answers, that a chat template does not print, such as a system message."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from liger_jax.chat.messages import REASONING
from liger_jax.chat.spans import Layout
from liger_jax.user_errors import UserError, counted

_WORDS = {"tool": "tool result", "function": "tool result", "ipython": "tool result"}


class LeftOut:
    """The contents that were left out, and in how many rows."""

    def __init__(self):
        self._rows: dict[str, int] = {}
        self._last: dict[str, str] = {}  # the last row without it, since both answers of a pair are in one row

    def look(self, where: str, missing: Iterable[str]) -> None:
        """Counts the contents that are missing in a row."""
        for what in missing:
            if self._last.get(what) != where:
                self._rows[what] = self._rows.get(what, 0) + 1
                self._last[what] = where

    def notices(self) -> dict[str, str]:
        """The notices about them, which are then forgotten."""
        noted, self._rows, self._last = self._rows, {}, {}
        return {what: f"the chat template {what}, in {counted(n, 'row')}" for what, n in noted.items()}


def of(
    source: str,
    layout: Layout,
    messages: Sequence[Mapping[str, Any]],
    answers: Set[int],
    values: Mapping[str, Any],
    without_tools: Callable[[], str],
) -> Iterator[str]:
    """The contents that a template leaves out of a conversation, apart from the answers that are trained on.

    Yields words that follow "the chat template", such as "prints no system message".
    """
    origins = [run.origin for run in layout.runs if run.origin and layout.text[run.begin : run.end].strip()]
    printed = {(origin.message, field) for origin in origins for field in origin.field.split("+")}
    for i, message in enumerate(messages):
        content, role = message.get("content"), message["role"]
        if i in answers:
            continue
        is_said = (i, "content") in printed or not isinstance(content, str)
        if not is_said and content.strip() not in layout.text:  # some patterns lose the origin
            yield f"prints no {_WORDS.get(role, f'{role} message')}"
        elif is_said and role != "assistant" and _is_cut(layout, i, content):
            yield f"prints only a part of a {_WORDS.get(role, f'{role} message')}"
        if message.get("tool_calls") and (i, "name") not in printed:
            yield "prints no tool call"
    last = messages[-1] if messages else {}
    thoughts = next((last[name] for name in REASONING if last.get(name)), "")  # earlier ones are left out by design
    is_scored = len(messages) - 1 in answers
    if is_scored and thoughts.strip() and not any(field == "reasoning" for _, field in printed):
        yield "prints no reasoning"
    elif is_scored and _thoughts_in(last.get("content")) not in layout.text:
        yield "prints no reasoning"
    if values.get("tools") and (not _names(source, "tools") or layout.text == _text_or_none(without_tools)):
        yield "prints no tools"
    for name in values:
        if name != "tools" and not _names(source, name):
            yield f"reads no variable {name!r}"


def _thoughts_in(content: Any) -> str:
    """What stands before the last closing tag of an answer, without its own opening tag; "" without such a tag."""
    match = re.match(r"(?s)\s*(?:<\w+>)?(.*)</\w+>", content) if isinstance(content, str) else None
    return match[1].strip() if match else ""


def _is_cut(layout: Layout, i: int, content: Any) -> bool:
    """Whether the text has only a section of a content; replaced characters count as printed."""
    runs = [run for run in layout.runs if run.origin and run.origin.message == i and "content" in run.origin.field]
    if not isinstance(content, str) or any(run.origin is None or run.origin.at is None for run in runs):
        return False
    left, end = [], 0
    for begin, size in sorted((run.origin.at or 0, run.end - run.begin) for run in runs if run.origin):
        left.append(content[end:begin])
        end = max(end, begin + size)
    return len("".join([*left, content[end:]]).split()) > 0 and content.strip() not in layout.text


def _text_or_none(render: Callable[[], str]) -> str | None:
    """The text that a template prints, or `None` if it fails, such as one that iterates over tools without a test."""
    try:
        return render()
    except UserError:
        return None


def _names(source: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", source) is not None
