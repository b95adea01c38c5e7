"""The text that a chat template prints before and after an answer, found by rendering sections of the conversation.

The texts are cached by the roles of the messages around the answer, so that a long conversation is rendered a few times
only.
"""

import os.path
from collections.abc import Callable, Sequence
from typing import Any

from liger_jax.user_errors import UserError

_QUESTION, _ANSWER = {"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}


class Prompts:
    """The texts that a template prints around answers."""

    def __init__(self, layout: Callable[..., Any], messages: Sequence[Any]):
        self._layout, self._messages = layout, messages
        self._added: dict[str | None, str] = {}
        self._header: dict[str | None, str | None] = {}
        self._between: dict[str, str] = {}
        self._behind: dict[Any, list[list[str]]] = {}

    def added(self, i: int) -> str:
        """Finds what `add_generation_prompt` adds before message i."""
        role, before = self._before(i)
        if role not in self._added:
            try:
                tails = self._layout(before).tail(), self._layout(before, prompt=True).tail()
                self._added[role] = _added(*tails)[1]
            except UserError:  # the template does not take a section of the conversation
                self._added[role] = ""
        return self._added[role]

    def header(self, i: int) -> str | None:
        """Finds the text before the content of a plain answer that stands in for message i."""
        role, before = self._before(i)
        if role not in self._header:
            lead = self._lead_of([*before, _ANSWER, _QUESTION], len(before))
            size = None if lead is None else after_prompt(lead, self.added(i))
            self._header[role] = lead if lead is None or size is None else lead[:size]
        return self._header[role]

    def end(self) -> str:
        """Finds the text that ends the conversation after its last words, which a prompt replaces or follows.

        Returns the text; empty if it may be a prompt, which some templates print even if not asked to.
        """
        try:
            without, prompt = self._layout(self._messages), self._layout(self._messages, prompt=True)
        except UserError:
            return ""
        end, added = _added(without.tail(), prompt.tail())
        return "".join(without.tail()) if added.strip() else end

    def behind(self, i: int, rest: Sequence[str]) -> list[list[str]]:
        """Finds the text after message i if the conversation ends there, and if a question follows.

        `rest`: the text after it in the conversation. Answers with the same fields, after the same role and before
        the same text, have the same result. Returns the template's own words of both, as lists of texts.
        """
        until, fields = self._messages[: i + 1], {name for name, value in self._messages[i].items() if value}
        key = (self._before(i)[0], frozenset(fields), tuple(rest))
        if key not in self._behind:
            try:
                self._behind[key] = [self._layout(some).behind(i) for some in (until, [*until, _QUESTION])]
            except UserError:
                self._behind[key] = [[]]
        return self._behind[key]

    def between_turns(self, i: int, lead: str) -> str:
        """Finds the text that ends message i, but is printed at the next one.

        It is what the next message lacks if it is the first one, and what stands before a prompt, too.

        Returns the beginning of `lead`, which is empty if nothing there ends message i.
        """
        role = self._messages[i + 1]["role"]
        if role not in self._between:
            first, end = self._lead_of([self._messages[i + 1] | {"content": "question"}], 0), ""
            if first is not None and lead.endswith(first):
                end = lead.removesuffix(first)
            self._between[role] = end if end and self._prompt(i).lstrip().startswith(end.strip()) else ""
        return self._between[role] if lead.startswith(self._between[role]) else ""

    def _prompt(self, i: int) -> str:
        """The text that the template prints after message i as the assistant's prompt."""
        try:
            return "".join(self._layout(self._messages[: i + 1], prompt=True).tail())
        except UserError:
            return ""

    def _before(self, i: int) -> tuple[str | None, Sequence[Any]]:
        """The role of the message before, and the messages before; a question where the answer is the first message."""
        return (self._messages[i - 1]["role"], self._messages[:i]) if i else (None, [_QUESTION])

    def _lead_of(self, messages: Sequence[Any], i: int) -> str | None:
        try:
            return self._layout(messages).lead_of(i)
        except UserError:
            return None


def after_prompt(lead: str, prompt: str) -> int | None:
    """Where the prompt ends in the text before an answer.

    `prompt`: the text that the template prints for a new answer. It may be longer, such as by `<think>`, than what it
    prints before a finished answer. Returns the number of characters, or `None` if the prompt is not there.
    """
    if not prompt.strip():
        return None
    if (place := lead.rfind(prompt)) >= 0:
        return place + len(prompt)
    sizes = range(min(len(lead), len(prompt)), 2, -1)  # one or two characters may be the same by chance
    return len(lead) if any(lead.endswith(prompt[:size]) and prompt[:size].strip() for size in sizes) else None


def _added(without: list[str], with_prompt: list[str]) -> tuple[str, str]:
    """The remainders of two texts, given as lists of fragments, after their common fragments."""
    common = len(os.path.commonprefix([without, with_prompt]))
    return "".join(without[common:]), "".join(with_prompt[common:])
