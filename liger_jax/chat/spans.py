"""Where in a rendered conversation the assistant speaks.

Each fragment of the text knows which message it is from, and at which message the template's loop was at that time.
An answer is what the loop printed at its message, from the end of the prompt on. The prompt is what the template adds
by `add_generation_prompt`. White space after the mark that ends an answer does not belong to it.
"""

import bisect
import os.path
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from liger_jax.chat.prompts import Prompts, after_prompt
from liger_jax.chat.traced import NOBODY, Origin, fragments_of
from liger_jax.user_errors import UserError

MARK_IT = "Mark the assistant's words in the template: {% generation %} … {% endgeneration %}."
_SPOKEN = {"content", "reasoning", "name", "arguments", "argument"}  # fields that are an answer's own words
_MARK = r"<[^<>\s]*>|\[[^\[\]\s]*\]"  # such as </s>, <|im_end|> and [/INST]
_TAG = r"[<\[](?=[^\w]*[A-Za-z])[^<>\[\]\s]*[>\]]"  # such as <think>, </think> and [THINK]


class Span(NamedTuple):
    """A stretch of the text."""

    begin: int  # its first character
    end: int  # the character after its last
    message: int  # index of the message
    has_end: bool  # whether it ends with something that is not the message's own words


class Run(NamedTuple):
    """Characters of one origin, printed at one message."""

    begin: int  # the first of them
    end: int  # the character after the last
    origin: Origin | None  # where they are from; `None` for the template's own words
    at: int  # the message at which the template's loop was; `NOBODY` outside of loops

    def is_spoken_by(self, message: int) -> bool:
        """Whether they are a message's own words, and not its role or another small field."""
        return self.origin is not None and self.origin.message == message and bool(_fields(self.origin) & _SPOKEN)


class Layout:
    """The runs of a rendered conversation, from the text that the template printed."""

    def __init__(self, text: str):
        self.text, self.runs, self.marked = str.__str__(text), [], []
        loops: list[tuple[int, int]] = []
        begins: list[int] = []
        place = 0
        for fragment in fragments_of(text):
            event = fragment.event
            if event is None and fragment.text:
                at = loops[-1][1] if loops else NOBODY
                self.runs.append(Run(place, place + len(fragment.text), fragment.origin, at))
                place += len(fragment.text)
            elif event is not None and event.kind in ("at", "left"):
                inside = [loop for loop, _ in loops]
                if event.loop in inside:
                    del loops[inside.index(event.loop) :]
                if event.kind == "at":
                    loops.append((event.loop, event.message))
            elif event is not None and event.kind == "begin":
                begins.append(place)
            elif event is not None and begins:
                self.marked.append((begins.pop(), place))
        self._spoken: dict[int, list[int]] = {}  # indices of runs by the message whose words they are
        for n, run in enumerate(self.runs):
            if run.origin is not None and run.is_spoken_by(run.origin.message):
                self._spoken.setdefault(run.origin.message, []).append(n)

    def tail(self) -> list[str]:
        """The texts that the template printed after the last message's own words."""
        last = max((runs[-1] + 1 for runs in self._spoken.values()), default=0)
        return [self.text[run.begin : run.end] for run in self.runs[last:]]

    def between(self, begin: int, end: int) -> list[Run]:
        """The runs that have characters of a span."""
        first = bisect.bisect_right(self.runs, begin, key=lambda run: run.end)
        return self.runs[first : bisect.bisect_left(self.runs, end, key=lambda run: run.begin)]

    def check_printed(self, i: int, message: Mapping[str, Any]) -> None:
        """Checks that the text has a message's content and its tool calls, each once.

        Content that the template cuts off at a tag, such as thoughts up to `</think>`, may be missing.
        """
        origins = [self.runs[n].origin for n in self._spoken.get(i, ())]
        content = message.get("content")
        if isinstance(content, str) and content.strip():
            runs = [self.runs[n] for n in self._spoken.get(i, ()) if "content" in _fields(self.runs[n].origin)]
            if all(run.origin and run.origin.at is not None for run in runs):
                _check_content(i, content, [(run.origin.at, run.end - run.begin) for run in runs])
            else:
                _check_changed(i, content, "".join(self.text[run.begin : run.end] for run in runs))
        for number, call in enumerate(message.get("tool_calls") or ()):
            call = call.get("function") or call
            printed = {name for each in origins if each and each.call in (number, -1) for name in _fields(each)}
            arguments = call.get("arguments")
            if "name" not in printed or arguments and arguments != "{}" and not printed & {"argument", "arguments"}:
                raise UserError(
                    f"The chat template does not print the tool call {str(call.get('name'))!r} of message {i + 1}, "
                    "which would not be trained on."
                )

    def check_alone(self, begin: int, end: int, messages: set[int]) -> None:
        """Checks that a span has words of the given messages only."""
        for run in self.between(begin, end):
            if run.origin is not None and run.origin.message not in messages:
                others = run.origin.message
                which = "a filled pattern" if others == NOBODY else f"words of message {others + 1}"
                raise UserError(
                    f"The chat template prints {which} within the answer of message {min(messages) + 1}, so "
                    f"that the assistant's words cannot be told apart. {MARK_IT}"
                )

    def answer(self, i: int, is_last: bool, prompts: Prompts) -> Span:
        """Where message i, which is an answer, stands; `is_last` says whether no message follows.

        If a mark ends the text only after the last answer, the white space before that mark belongs to the answer,
        since only the model can write it. An error is raised where it is ambiguous which words are the answer.
        """
        first, last = self._printed_at(i)
        own = [n for n in self._spoken[i] if first <= n < last]
        others = [n for n in range(first, own[0]) if _is_of_another(self.runs[n], i)]
        first = others[-1] + 1 if others else first
        begin = self.runs[first].begin + self._prompt_size(i, first, own[0], prompts)
        if self.runs[own[0]].at == i:
            limit = self.runs[last - 1].end
            if not is_last and not self.text[self.runs[own[-1]].end : limit].strip():
                limit += len(prompts.between_turns(i, self._lead(last)))
        else:
            rest = [self.text[run.begin : run.end] for run in self.runs[own[-1] + 1 : last]]
            same = os.path.commonprefix([rest, *prompts.behind(i, rest)])
            limit = self.runs[own[-1] + len(same)].end
        self.check_alone(begin, limit, {i})
        own_end = self.runs[own[-1]].end
        end = max(begin + len(self.text[begin:limit].rstrip()), own_end)
        rest = self.text[limit:] if is_last else ""
        if rest.strip() and not _is_prose(rest) and prompts.end().rstrip().endswith(rest.strip()):
            return Span(begin, len(self.text.rstrip()), i, True)
        return Span(begin, end, i, end > own_end)

    def _lead(self, first: int) -> str:
        """The text that the template printed at a message before its own words; `first` is the first run there."""
        last, at = first, self.runs[first].at if first < len(self.runs) else NOBODY
        while last < len(self.runs) and self.runs[last].at == at != NOBODY and not self.runs[last].is_spoken_by(at):
            last += 1
        return "".join(self.text[run.begin : run.end] for run in self.runs[first:last])

    def own_words(self, spans: Sequence[Span]) -> set[str]:
        """The template's own words within answers, such as between thoughts and a content; not those at the end."""
        words = set()
        for span in spans:
            own = (run.end for run in self.between(span.begin, span.end) if run.is_spoken_by(span.message))
            last = min(span.end, max(own, default=span.begin))
            words |= {
                self.text[max(span.begin, run.begin) : min(last, run.end)]
                for run in self.between(span.begin, last)
                if run.origin is None
            }
        return words

    def behind_words(self, span: Span) -> str:
        """The text from the end of a message's own words to the end of a span, which may begin there."""
        own = (self.runs[n].end for n in self._spoken.get(span.message, ()))
        return self.text[max((end for end in own if end <= span.end), default=span.begin) : span.end]

    def lead_of(self, i: int) -> str | None:
        """The text that the template printed at message i before its own words; `None` if no loop printed any."""
        first = next((n for n, run in enumerate(self.runs) if run.at == i), None)
        return None if first is None or i not in self._spoken else self._lead(first)

    def behind(self, i: int) -> list[str]:
        """The template's own words between message i and the next one, as a list of texts."""
        texts = []
        for run in self.runs[self._spoken.get(i, [len(self.runs)])[-1] + 1 :]:
            if _is_of_another(run, i):
                break
            texts.append(self.text[run.begin : run.end])
        return texts

    def _printed_at(self, i: int) -> tuple[int, int]:
        """The first run, and the run after the last, of the text that the template printed at message i.

        If no loop was at the message, all runs from the previous message to the next one.
        """
        spoken = self._spoken.get(i, [])
        if not spoken:
            raise UserError(f"The chat template prints no word of message {i + 1}, which would not be trained on.")
        there = [n for n in spoken if self.runs[n].at == i]
        is_there = (lambda run: run.at == i) if there else (lambda run: not _is_of_another(run, i))
        first, last = (there or spoken)[0], (there or spoken)[0] + 1
        while first and is_there(self.runs[first - 1]):
            first -= 1
        while last < len(self.runs) and is_there(self.runs[last]):
            last += 1
        # A tool's answer may repeat the name of the call; all else is printed once.
        for n in spoken:
            if not first <= n < last and (not there or _fields(self.runs[n].origin) & {"content", "reasoning"}):
                raise UserError(
                    f"The chat template prints words of message {i + 1} in more than one place, so it is unclear "
                    f"which are the answer. {MARK_IT}"
                )
        return first, last

    def _prompt_size(self, i: int, first: int, own: int, prompts: Prompts) -> int:
        """How many characters from a run on belong to the prompt; `own` is the first run of the answer's own words."""
        lead = self.text[self.runs[first].begin : self.runs[own].begin]
        if not lead.strip():
            return 0 if self.runs[own].at == i else len(lead)
        if (size := after_prompt(lead, prompts.added(i))) is not None:
            return size
        header = prompts.header(i) if self.runs[own].at == i else None
        if header is not None and not header.strip():
            return 0  # a plain answer has no text before it, so all text here belongs to the answer
        if header is not None and (place := lead.rfind(header)) >= 0:
            return place + len(header)
        if "content" in _fields(self.runs[own].origin):
            return len(lead)
        raise UserError(
            f"The chat template does not tell where the answer of message {i + 1} begins: it prints {lead[:60]!r} "
            f"before it, and the prompt is {prompts.added(i)[:60]!r}. {MARK_IT}"
        )


def _is_prose(text: str) -> bool:
    """Whether a text has words and not only marks, such as an instruction that follows all messages."""
    return re.search(r"\w\W*\s\W*\w", re.sub(_MARK, " ", text)) is not None


def _fields(origin: Origin | None) -> set[str]:
    return set(origin.field.split("+")) if origin else set()


def _is_of_another(run: Run, i: int) -> bool:
    return run.origin is not None and run.origin.message != i


def _check_content(i: int, content: str, ranges: list[tuple[int, int]]) -> None:
    """Checks that the printed fragments, given by places and sizes, are a whole content, and none of it twice."""
    end = 0
    for at, size in sorted(ranges):
        if at < end:
            raise _printed_twice(i)
        _check_missing(i, content[end:at], is_first=end == 0)
        end = at + size
    _check_missing(i, content[end:], is_first=end == 0)


def _check_changed(i: int, content: str, printed: str) -> None:
    """Checks that a content is printed once, in letters of another case or with other characters between them."""
    content, printed = (re.sub(r"\W", "", text).casefold() for text in (content, printed))
    left = iter(printed)
    if not all(letter in left for letter in content):
        _check_missing(i, content, is_first=False)
    if content and printed.count(content) > 1:
        raise _printed_twice(i)


def _printed_twice(i: int) -> UserError:
    return UserError(
        f"The chat template prints the content of message {i + 1} twice, so that nobody knows which is the answer. "
        f"{MARK_IT}"
    )


def _check_missing(i: int, missing: str, *, is_first: bool) -> None:
    """Checks that what a template leaves out is white space, or thoughts with their tags."""
    thoughts = f"(?s:.*{_TAG})" if is_first else f"(?s:{_TAG}.*{_TAG}|{_TAG})"
    if missing.strip() and not re.fullmatch(thoughts, missing.strip()):
        raise UserError(
            f"The chat template does not print {missing.strip()[:40]!r} of message {i + 1}, or not as it stands, so "
            "that it would not be trained on."
        )
