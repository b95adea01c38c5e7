"""What a chat template leaves out of conversations beside answers: a system message, a tool's result, the tools."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from liger_jax.commands._messages import REASONING, is_trained
from liger_jax.commands._spans import Layout

_WORDS = {"tool": "tool result", "function": "tool result", "ipython": "tool result"}


class LeftOut:
    """What was left out, and in how many rows."""

    def __init__(self):
        self._rows: dict[str, int] = {}
        self._last: dict[str, str] = {}  # the row in which it was left out last: both answers of a pair are one row's

    def look(self, where: str, missing: Iterable[str]) -> None:
        """Counts what is missing of a row.

        Args:
            where: the row, in words.
            missing: what `of` has found.
        """
        for what in missing:
            if self._last.get(what) != where:
                self._rows[what] = self._rows.get(what, 0) + 1
                self._last[what] = where

    def told(self) -> dict[str, str]:
        """What is to be said of it, and forgets it.

        Returns:
            A sentence for each kind.
        """
        found, self._rows, self._last = self._rows, {}, {}
        return {what: f"the chat template {what}, in {n:,} row{'' if n == 1 else 's'}" for what, n in found.items()}


def of(
    source: str,
    layout: Layout,
    messages: Sequence[Mapping[str, Any]],
    values: Mapping[str, Any],
    without_tools: Callable[[], str],
) -> Iterator[str]:
    """What a template leaves out of a conversation, apart from the answers that are trained on.

    Args:
        source: the template.
        layout: what it printed.
        messages: the conversation.
        values: the variables that the conversation gives it, `tools` among them.
        without_tools: what it prints without tools.

    Yields:
        Words that follow "the chat template", such as "prints no system message".
    """
    printed = {run.origin.message for run in layout.runs if run.is_content and layout.text[run.begin : run.end].strip()}
    for i, message in enumerate(messages):
        content, role = message.get("content"), message["role"]
        if not isinstance(content, str) or not content.strip() or role == "assistant" and is_trained(message):
            continue
        if i not in printed and content.strip() not in layout.text:
            yield f"prints no {_WORDS.get(role, f'{role} message')}"
    last = messages[-1] if messages else {}
    thoughts = next((last[name] for name in REASONING if last.get(name)), "")  # earlier ones are left out by design
    if last.get("role") == "assistant" and is_trained(last) and thoughts.strip() and not _has(layout, "reasoning"):
        yield "prints no reasoning"
    if values.get("tools") and (not _names(source, "tools") or layout.text == without_tools()):
        yield "prints no tools"
    for name in values:
        if name != "tools" and not _names(source, name):
            yield f"reads no variable {name!r}"


def _has(layout: Layout, field: str) -> bool:
    return any(run.origin is not None and field in run.origin.field.split("+") for run in layout.runs)


def _names(source: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", source) is not None
