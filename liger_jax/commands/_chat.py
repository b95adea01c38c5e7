"""Conversations by a tokenizer's chat template, and which part of the text the assistant wrote.

Some templates mark the assistant's words by `{% generation %}`, and the marks decide. With any other template, an
answer begins where its prompt ends. The prompt is the conversation before it, rendered with `add_generation_prompt`.
"""

import datetime
import json
import os.path
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import ext, nodes, sandbox

from liger_jax.commands._errors import UserError

# Two of Unicode's noncharacters, which are in no text: a mark before and after the assistant's words.
_BEGIN, _END = "\ufdd0", "\ufdd1"
Span = tuple[int, int]


class ChatTemplate:
    """A chat template in Jinja's sandbox, with what Hugging Face's templates expect there.

    Args:
        source: the template.
        special_tokens: special tokens by name, such as `{"bos_token": "<s>"}`.

    Raises:
        UserError: the template is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": datetime.datetime.now().strftime}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise UserError(f"The tokenizer's chat template cannot be read: {error}.") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Any], tools: Any = None) -> tuple[str, list[Span]]:
        """The text of a conversation, and where in it the assistant speaks.

        Args:
            messages: objects with `role` and what the template knows.
            tools: functions that the assistant may call, as the template takes them.

        Returns:
            The text, and where each answer begins and ends. An answer includes the mark that ends it, and no space
            after the mark.

        Raises:
            UserError: the template refuses the messages, or does not tell where an answer begins.
        """
        marked = self._text(messages, tools)
        text, spans = _unmarked(marked)
        if not spans:
            spans = [self._span(text, messages, i, tools) for i, m in enumerate(messages) if m["role"] == "assistant"]
        return text, [(begin, begin + len(text[begin:end].rstrip())) for begin, end in spans]

    def _text(self, messages: Sequence[Any], tools: Any, prompt: bool = False) -> str:
        try:
            return self._template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **self._special_tokens
            )
        except Exception as error:  # the template is a program, and may fail in any way
            raise UserError(f"The chat template refuses the messages: {str(error) or type(error).__name__}.") from error

    def _span(self, text: str, messages: Sequence[Any], i: int, tools: Any) -> Span:
        """The begin and the end of message i, which is an answer, in the text."""
        before = self._text(messages[:i], tools) if i else ""
        prompt = self._text(messages[:i], tools, prompt=True) if i else ""
        begin = len(os.path.commonprefix([text, prompt]))  # a prompt may go on, as by "<think>"
        if begin < len(before):
            raise UserError(
                f"The chat template changes what stands before message {i + 1}, so that nobody knows which words are "
                "the assistant's. Mark them in the template: {% generation %} … {% endgeneration %}."
            )
        until = self._text(messages[: i + 1], tools)
        if text.startswith(until):
            return begin, len(until)
        mark = self._end_of_answer()  # the template drops something of earlier answers, such as their thoughts
        end = text.find(mark, begin)
        return begin, end + len(mark) if mark and end >= 0 else len(text)

    def _end_of_answer(self) -> str:
        messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
        return self._text(messages, None).rpartition("answer")[2].strip()


class _Generation(ext.Extension):
    """The block `{% generation %}`, which holds the assistant's words."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def _unmarked(marked: str) -> tuple[str, list[Span]]:
    """The text without its marks, and where they stood."""
    text, *answers = marked.split(_BEGIN)
    spans = []
    for answer in answers:
        words, _, others = answer.partition(_END)
        spans.append((len(text), len(text) + len(words)))
        text += words + others
    return text, spans


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
