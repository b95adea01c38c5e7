"""A tokenizer's conversations: which chat template prints each, which tokens end answers, and notes about both."""

import contextlib
import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from liger_jax.chat import template_sources
from liger_jax.chat.left_out import LeftOut
from liger_jax.chat.messages import is_trained
from liger_jax.data.documents import Document
from liger_jax.data.formats import ROLES
from liger_jax.data.pieces import failures
from liger_jax.user_errors import UserError, counted, needed_packages

_PLAIN = 2 * [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
_MOST_SEEN = 10_000  # texts, since a template may print different ones, such as a tool's numbers, after each answer


_KNOWN = ("system", "user", "assistant", "tool")


class Conversations:
    """The conversations of a run, or of a chat.

    `marks`: added tokens of four kinds: those that end the "last" answers of conversations, those that end "earlier"
    answers, those that a template prints "behind" last answers, and those "inside" answers, such as after thoughts.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        templates: Callable[[], dict[str, str]],
        special_tokens: Mapping[str, str],
        folder: Path,
    ):
        self._tokenizer, self._sources = tokenizer, templates
        self._special_tokens, self._folder = special_tokens, folder
        self._templates: dict[str, Any] = {}  # the templates that were used, by their text
        self._seen: dict[str, set[str]] = {"behind": set(), "inside": set()}  # texts whose tokens are among the marks
        self._roles, self._left_out = UnknownRoles(), LeftOut()
        self.spelled: dict[int, str] = {}  # by the last token of answers that end with no added token: their ends
        self.marks: dict[str, set[int]] = {name: set() for name in ("last", "earlier", "behind", "inside")}

    @property
    def are_there(self) -> bool:
        """Whether there was a conversation."""
        return bool(self._templates)

    @property
    def stops(self) -> list[int]:
        """The tokens that end a text after an answer.

        Each ends a last answer, alone or before another mark: a token that ends only earlier answers may mean something
        else. None occurs within answers, where a model would stop too early.
        """
        marks = self.marks
        return sorted((marks["last"] | marks["earlier"] & marks["behind"]) - marks["inside"])

    def rendered(self, document: Document) -> Any:
        """The text of a conversation, and where the assistant speaks."""
        source = template_sources.chosen(self._sources(), document.tools, self._folder)
        result = self._template(source).render(document.messages or [], document.tools, document.values)
        self._look(document, source, result.missing)
        return result

    def prompt(self, document: Document) -> str:
        """The text of a conversation up to the assistant's next words."""
        source = template_sources.chosen(self._sources(), document.tools, self._folder)
        result = self._template(source).prompt(document.messages or [], document.tools, document.values)
        self._look(document, source, result.missing)
        return result.text

    def look_at_ends(self, messages: Sequence[Any], rendered: Any, ends: Sequence[int]) -> None:
        """Records the tokens that end answers."""
        is_last = messages[-1]["role"] == "assistant" and is_trained(messages[-1])
        earlier, last = (ends[:-1], ends[-1:]) if is_last else (ends, [])
        # An added token that is not special may end a tool call, after which another call may follow. Where nothing
        # follows an answer, its last token is an end only if it is special.
        has_calls = any(message.get("tool_calls") for message in messages)
        self.marks["earlier"] |= (self._special if has_calls else self._added) & {*earlier}
        self.marks["last"] |= (self._special if has_calls or not rendered.behind.strip() else self._added) & {*last}
        if rendered.behind.strip():
            self.spelled |= {token: rendered.behind.strip() for token in last if token not in self._added}
        for name, texts in (("behind", {rendered.behind} if is_last else set()), ("inside", rendered.own_words)):
            for text in texts - self._seen[name]:
                if len(self._seen[name]) < _MOST_SEEN:
                    self._seen[name].add(text)
                with failures():
                    ids = self._tokenizer.encode(text, add_special_tokens=False).ids
                self.marks[name] |= self._added & {*ids}

    def notes(self) -> list[str]:
        """Notes about templates and the ends of answers."""
        return [note for template in self._templates.values() for note in template.notes.sentences()]

    def notices(self) -> dict[str, str]:
        """The notices of messages since the last call: sentences by topic."""
        return self._roles.notices() | self._left_out.notices()

    @functools.cached_property
    def _added(self) -> set[int]:
        """The ids of added tokens: special ones, and others beside the vocabulary."""
        return {*self._tokenizer.get_added_tokens_decoder()}

    @functools.cached_property
    def _special(self) -> set[int]:
        return {number for number, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}

    def _look(self, document: Document, source: str, missing: list[str]) -> None:
        self._roles.look(document, source)
        self._left_out.look(document.where, missing)

    def _template(self, source: str) -> Any:
        """The template of this text. The tokens that end a plain answer are found at its first use."""
        if source not in self._templates:
            with needed_packages():
                from liger_jax.chat.template import ChatTemplate
            self._templates[source] = ChatTemplate(source, self._special_tokens)
            with contextlib.suppress(UserError):  # it refuses this conversation, or the end is ambiguous
                plain = ChatTemplate(source, self._special_tokens).render(_PLAIN)
                with failures():
                    encode = lambda end: self._tokenizer.encode(plain.text[:end], add_special_tokens=False).ids
                    ends = [encode(end)[-1] for _, end in plain.spans]
                self.look_at_ends(_PLAIN, plain, ends)
        return self._templates[source]


class UnknownRoles:
    """Roles that neither the chat template that prints them nor chat templates in general know, and their rows."""

    def __init__(self):
        self._places: dict[str, dict[str, None]] = {}  # of rows, by role, in the order of the data

    def look(self, document: Document, template: str) -> None:
        """Looks for such roles.

        `template`: the text of the chat template that prints it. A role that it has in quotes is known.
        """
        for role in {message["role"] for message in document.messages or ()}.difference(_KNOWN):
            if f"'{role}'" not in template and f'"{role}"' not in template:
                self._places.setdefault(role, {})[document.where] = None

    def notices(self) -> dict[str, str]:
        """The notices of such roles, which are then forgotten."""
        noted, self._places = self._places, {}
        return {f"role {role}": _sentence(role, list(places)) for role, places in noted.items()}


def _sentence(role: str, places: list[str]) -> str:
    rows = f"{counted(len(places), 'row')} (first: {places[0]})"
    known = f"{', '.join(_KNOWN[:-1])} and {_KNOWN[-1]}"
    meant = ROLES.get(role.lower()) or next(iter(difflib.get_close_matches(role.lower(), _KNOWN, 1)), None)
    notice = f"role {role[:30]!r} in {rows} is printed as it is: chat templates know {known}"
    return notice + (f"; did you mean {meant}?" if meant else "")
