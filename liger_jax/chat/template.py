"""Conversations by a tokenizer's chat template, and which spans of the text the assistant wrote.

Some templates mark the assistant's words by `{% generation %}`, and then the marks decide. With any other template, an
answer is the text that the template prints for its message, after the prompt.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeVar

from liger_jax.chat import jinja, left_out
from liger_jax.chat.limits import OverBudget
from liger_jax.chat.messages import IS_TRAINED, REASONING, is_trained
from liger_jax.chat.prompts import Prompts
from liger_jax.chat.spans import Layout, Span
from liger_jax.chat.traced import NOBODY, Origin, traced
from liger_jax.user_errors import UserError

_Of = TypeVar("_Of")


@dataclasses.dataclass
class Notes:
    """Notes that are printed once for all conversations."""

    parsed: bool = False  # a tool call's arguments were a JSON string, and are printed as the object that it holds
    endless: bool = False  # an answer ends with no mark

    def sentences(self) -> list[str]:
        """The notes as sentences."""
        sentences = []
        if self.parsed:
            sentences.append(
                "arguments of tool calls are JSON strings, and the chat template takes objects: they are parsed"
            )
        if self.endless:
            sentences.append(
                "the chat template ends some answers with no mark, so that they are trained without a stop"
            )
        return sentences


class Rendered(NamedTuple):
    """A conversation as a template prints it."""

    text: str  # the text
    spans: list[tuple[int, int]]  # where each answer that is trained on begins and ends; none of a prompt
    behind: str  # the text that the template prints after the words of the last of these answers, up to its end
    own_words: Set[str]  # the template's own texts within these answers, as between thoughts and a content
    missing: list[str]  # the contents that the template leaves out, in the words of `left_out.of`


class ChatTemplate:
    """A chat template in Jinja's sandbox, with what Hugging Face's templates expect there."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        self._environment, self._source = jinja.Environment(), source
        try:
            self._template, self._has_marks = self._environment.template(source)
        except Exception as error:  # a template becomes Python, which has its own limits
            raise UserError(f"The tokenizer's chat template cannot be read: {error}.") from error
        self._special_tokens = dict(special_tokens)
        self.notes = Notes()

    def render(self, messages: Sequence[Any], tools: Any = None, values: Mapping[str, Any] | None = None) -> Rendered:
        """The text of a conversation, and where in it the assistant speaks.

        `messages`: objects with `role` and what the template knows. A `weight` of 0, or `train` or `training` that are
        false, leave an answer out. Returns the text, where each answer begins and ends, and what is missing. An answer
        includes the mark that ends it, and no space after the mark.
        """

        def rendered(form: Sequence[Any], given: Mapping[str, Any]) -> tuple[Rendered, bool]:
            layout, spans = self._rendered(form, given)
            places = [(span.begin, span.end) for span in spans]
            behind = layout.behind_words(spans[-1]) if spans else ""
            missing = self._missing(layout, form, given, {span.message for span in spans})
            result = Rendered(layout.text, places, behind, layout.own_words(spans), missing)
            return result, any(not span.has_end for span in spans)

        result, is_endless = self._in_some_form(messages, {"tools": tools, **(values or {})}, rendered)
        self.notes.endless |= is_endless
        return result

    def prompt(self, messages: Sequence[Any], tools: Any = None, values: Mapping[str, Any] | None = None) -> Rendered:
        """The text of a conversation up to the words that the assistant is to say."""

        def rendered(form: Sequence[Any], given: Mapping[str, Any]) -> Rendered:
            layout = Layout(self._text(form, given, prompt=True))
            return Rendered(layout.text, [], "", set(), self._missing(layout, form, given, set(), prompt=True))

        return self._in_some_form(messages, {"tools": tools, **(values or {})}, rendered)

    def _in_some_form(
        self, messages: Sequence[Any], values: Mapping[str, Any], render: Callable[[list[Any], Mapping[str, Any]], _Of]
    ) -> _Of:
        """The result of `render` for the first form of the messages that the template takes."""
        self._environment.clock.start()
        failed: UserError | None = None
        for form, is_parsed in _forms(messages):
            try:
                result = render(form, values)
            except UserError as error:
                failed = failed or error
                continue
            except OverBudget as error:
                raise UserError(f"The chat template {error} for one conversation. Pass a model with another.") from None
            self.notes.parsed |= self._environment.parsed or is_parsed
            return result
        raise failed or UserError("The conversation has no messages.")

    def _missing(
        self,
        layout: Layout,
        messages: Sequence[Any],
        values: Mapping[str, Any],
        answers: Set[int],
        prompt: bool = False,
    ) -> list[str]:
        without_tools = lambda: str.__str__(self._text(messages, {**values, "tools": None}, prompt))
        return list(left_out.of(self._source, layout, messages, answers, values, without_tools))

    def _rendered(self, messages: Sequence[Any], values: Mapping[str, Any]) -> tuple[Layout, list[Span]]:
        layout = Layout(self._text(messages, values))
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        trained = [i for i in answers if is_trained(messages[i])]
        for i in trained:
            layout.check_printed(i, messages[i])
        if self._has_marks:
            return layout, _marked(layout, len(messages), set(answers), set(trained))
        prompts = Prompts(lambda some, prompt=False: Layout(self._text(some, values, prompt)), messages)
        return layout, [layout.answer(i, i + 1 == len(messages), prompts) for i in trained]

    def _text(self, messages: Sequence[Any], values: Mapping[str, Any], prompt: bool = False) -> str:
        given = {"documents": None, **self._special_tokens, **values}
        try:
            given |= {"messages": [_seen(i, m) for i, m in enumerate(messages)], "add_generation_prompt": prompt}
            return self._template.render(given)
        except OverBudget:
            raise  # for any section of the conversation, since a shorter one proves nothing
        except Exception as error:  # the template is a program, and may fail in any way
            raise UserError(f"The chat template refuses the messages: {str(error) or type(error).__name__}.") from error


def _marked(layout: Layout, count: int, answers: set[int], trained: set[int]) -> list[Span]:
    """The spans that the template marks, without those of answers that are not trained on."""
    spans, last = [], NOBODY
    for begin, end in layout.marked:
        inside = layout.between(begin, end)
        whose = {run.origin.message for run in inside if run.origin and run.is_spoken_by(run.origin.message)} & answers
        whose = whose or {run.at for run in inside if run.at != NOBODY} or {last if last != NOBODY else count - 1}
        layout.check_alone(begin, end, whose & answers or whose)
        if len({i in trained for i in whose & answers}) > 1:
            raise UserError(
                "The chat template marks answers that are trained on together with some that are not, by their weight."
            )
        last = max(whose)
        if begin < end and whose & trained:
            own = max((run.end for run in inside if run.is_spoken_by(last)), default=begin)
            end = begin + len(layout.text[begin:end].rstrip())
            spans.append(Span(begin, end, last, end > own))
    if trained and not spans:
        raise UserError("The chat template marks no words of the assistant's by {% generation %} here.")
    return spans


def _seen(i: int, message: Mapping[str, Any]) -> jinja.Message:
    """A message as the template sees it, with strings that know their origin."""
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if reasoning is not None:  # transformers gives it by both names, too
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    seen = jinja.Message()
    seen._index = i
    for name, value in message.items():
        if name == "tool_calls" and isinstance(value, list):
            seen[name] = [_seen_call(i, number, call) for number, call in enumerate(value)]
        elif name not in IS_TRAINED:
            field = "reasoning" if name in REASONING else "content" if name == "content" else "other"
            seen[name] = traced(value, Origin(i, field))
    return seen


def _seen_call(i: int, number: int, call: Any) -> Any:
    if not isinstance(call, dict):
        return traced(call, Origin(i, "other", number))
    seen = {}
    for name, value in call.items():
        if name == "function":
            seen[name] = _seen_call(i, number, value)
        else:
            field = {"name": "name", "arguments": "arguments" if isinstance(value, str) else "argument"}.get(
                name, "other"
            )
            seen[name] = traced(value, Origin(i, field, number))
    return seen


def _forms(messages: Sequence[Any]) -> Iterator[tuple[list[Any], bool]]:
    """Forms of the same messages, of which a template may take one and not another, and whether one parses arguments.

    An answer that only calls tools has no content, an empty one or `None`. A call's arguments are an object or JSON.
    """
    calls = [call.get("function") or call for message in messages for call in message.get("tool_calls") or ()]
    is_bare = any(message.get("tool_calls") and message.get("content") is None for message in messages)
    others = {str: jinja.parsed_arguments, dict: lambda value: json.dumps(value, ensure_ascii=False)}
    kinds = [kind for kind in others if any(isinstance(call.get("arguments"), kind) for call in calls)]
    for kind in (None, *kinds):
        for content in ({}, {"content": ""}, {"content": None}) if is_bare else ({},):
            change = (
                (lambda value, kind=kind: others[kind](value) if isinstance(value, kind) else value) if kind else None
            )
            yield [_in_form(message, content, change) for message in messages], kind is str


def _in_form(message: Mapping[str, Any], content: Mapping[str, Any], change: Callable[[Any], Any] | None) -> Any:
    fields = {name: value for name, value in message.items() if name != "content" or value is not None}
    if message.get("tool_calls"):
        fields = {**content, **fields}
        if change is not None:
            fields["tool_calls"] = [_changed(call, change) for call in message["tool_calls"]]
    return fields


def _changed(call: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _changed(call["function"], change)}
    return {**call, "arguments": change(call["arguments"])} if "arguments" in call else dict(call)
