"""Chat templates: which words are the assistant's, by templates whose spans are known by construction."""

import json
import re

import pytest

from liger_jax.chat import limits
from liger_jax.chat.template import ChatTemplate
from liger_jax.chat.traced import Fragment, Origin, Traced, fragments_of
from liger_jax.user_errors import UserError
from tests.chat import _templates

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
NO_SYSTEM = ("the role model", "INST", "a prompt that thinks")
# Words that look like a template's own, white space that templates trim, and words that they use in their tests.
WORDS = ("yes", "No.", " ", "\n", "日本", "{{ x }}", "question", "answer", "<|im_end|>\n<|im_start|>assistant\n", "<e>",
         "[INST] ", " [/INST]", "</s>", "<|assistant|>", "[assistant] ", "assistant: ", "<|end|>", "%s")  # fmt: skip
CALL = {
    "type": "function",
    "id": "call00001",
    "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}},
}
USER, ANSWER = {"role": "user", "content": "red?"}, {"role": "assistant", "content": "Yes."}
TOOL = {"role": "tool", "name": "weather", "content": "sunny", "tool_call_id": "call00001"}
TURNS = "{% for m in messages %}[{{ m.role }}] {{ m.content }}<e>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}[assistant] {% endif %}"


def rendered(template, messages, tools=None, **values):
    text, spans, *_ = ChatTemplate(template, SPECIAL).render(messages, tools, values)
    return text, [text[begin:end] for begin, end in spans]


def known(pieces):
    """The text of pieces, and the stretches in it that are trained on."""
    text, spans = "", []
    for piece, is_answer in pieces:
        if is_answer and piece:
            spans.append((len(text), len(text) + len(piece)))
        text += piece
    return text, spans


def conversations(rng, name):
    """Conversations of any words, which open with any role that a template takes."""
    for opening in ([], ["system"], ["assistant"]):
        if opening == ["system"] and name in NO_SYSTEM:
            continue
        roles = opening + ["user", "assistant"] * int(rng.integers(1, 4)) + ["user"] * int(rng.integers(2))
        text = lambda: "".join(rng.choice(WORDS, rng.integers(0, 5)))
        messages = [{"role": role, "content": text() + (" ok" if role == "assistant" else "")} for role in roles]
        if name.startswith("thoughts"):
            for message in messages[1::2]:
                message["content"] = rng.choice(["", "<think>\nwhy\n</think>\n\n"]) + message["content"]
        yield messages


@pytest.mark.parametrize("name", _templates.TEMPLATES)
def test_answers_and_their_end_marks_are_found_and_nothing_else(name, rng):
    source, pieces = _templates.TEMPLATES[name]
    template = ChatTemplate(source, SPECIAL)
    for _ in range(5):
        for messages in conversations(rng, name):
            text, spans = known(pieces(messages))
            found, places, *_ = template.render(messages)
            assert found == text
            assert [text[begin:end] for begin, end in places] == [text[begin:end] for begin, end in spans]
            assert places == spans


@pytest.mark.parametrize(
    ["after", "scored"], [("</s>", "Yes.<e>\n</s>"), ("<|system|>Write all actions as a list.", "Yes.<e>")]
)
def test_an_instruction_after_all_messages_is_no_end_of_the_last_answer(after, scored):
    template = TURNS + "{% if add_generation_prompt %}[assistant] {% else %}" + after + "{% endif %}"
    assert rendered(template, [USER, ANSWER, USER, ANSWER])[1] == ["Yes.<e>", scored]


@pytest.mark.parametrize(
    "arguments", [CALL["function"]["arguments"], '{"city": "Köln", "days": 2}'], ids=["object", "JSON"]
)
@pytest.mark.parametrize("content", [{}, {"content": ""}], ids=["no content", "empty"])
def test_tool_calls_are_answers_and_arguments_as_json_are_objects(arguments, content):
    call = CALL | {"function": CALL["function"] | {"arguments": arguments}}
    messages = [USER, {"role": "assistant", "tool_calls": [call], **content}, TOOL, ANSWER]
    template = ChatTemplate(_templates.HEADERS, SPECIAL)
    text, spans, *_ = template.render(messages)
    told = [USER, {"role": "assistant", "tool_calls": [CALL]}, TOOL, ANSWER]
    assert (text, spans) == known(_templates.headers(told))
    assert template.notes.parsed == isinstance(arguments, str)


@pytest.mark.parametrize(
    ["calls", "spoken"],
    [
        ("{{ m.content }}{% for c in m.tool_calls %}<call>{{ c.function | tojson }}</call>{% endfor %}",
         '<call>{"name": "weather", "arguments": {"city": "Köln", "days": 2}}</call><e>'),
        ("{% for c in m.tool_calls %}<call>{{ c.function.name + c.function.arguments }}{% endfor %}",
         '<call>weather{"city": "Köln", "days": 2}<e>'),
        ("{% for c in m.tool_calls %}{{ c.function.name }}{% for k, v in c.function.arguments.items() %}"
         ":{{ k }}={{ v }}{% endfor %}{% endfor %}", "weather:city=Köln:days=2<e>"),
        ("{% if m.content is none %}{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments }}{% endfor %}"
         "{% else %}{{ '' + m.content }}{% endif %}", 'weather{"city": "Köln", "days": 2}<e>'),
    ],
    ids=["the call by tojson", "as a text", "item by item", "if the content is none"],
)  # fmt: skip
@pytest.mark.parametrize("as_json", [False, True])
def test_a_tool_call_is_given_in_the_form_that_a_template_takes(calls, spoken, as_json):
    arguments = CALL["function"]["arguments"]
    call = {
        "function": {
            "name": "weather",
            "arguments": json.dumps(arguments, ensure_ascii=False) if as_json else arguments,
        }
    }
    template = "{% for m in messages %}[{{ m.role }}] {% if m.tool_calls %}" + calls
    template += "{% else %}{{ m.content }}{% endif %}<e>{% endfor %}" + PROMPT
    assert rendered(template, [USER, {"role": "assistant", "tool_calls": [call]}, TOOL])[1] == [spoken]


TWICE = "prints the content of message 2 twice"
REFUSED = {
    "drops earlier answers": (
        "{% for m in messages %}{% if loop.last %}{{ m.content }}{% endif %}{% endfor %}",
        "does not print 'Yes.' of message 2",
    ),
    "cuts answers off": (TURNS.replace("m.content", "m.content[:2]"), "does not print 's.' of message 2"),
    "changes letters": (TURNS.replace("m.content", "m.content | upper | reverse"), "does not print 'yes' of message 2"),
    "prints an answer twice": (TURNS + "{{ messages[1].content }}", TWICE),
    "a second time in other letters": (TURNS + "{{ messages[1].content | upper }}", TWICE),
    "twice in its turn": (TURNS.replace("m.content", "m.content + '/' + m.content"), TWICE),
    "prints the next question, too": (
        TURNS.replace("<e>", "{% if loop.index == 2 %}{{ messages[2].content }}{% endif %}<e>"),
        "words of message 3 within",
    ),
    "fills a pattern": (TURNS.replace("m.content", "'%s!' % (m.content,)"), "does not print 'Yes.'"),
    "formats": (TURNS.replace("m.content", "'{}!'.format(m.content)"), "does not print 'Yes.'"),
    "a pattern beside the answer": (
        TURNS.replace("<e>", "{{ '%s' | format(m.content) }}<e>"),
        "prints a filled pattern",
    ),
    "tells nothing": ("{{ messages }}", "does not print 'Yes.' of message 2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_nothing_proves_is_refused_with_the_reason(name):
    template, reason = REFUSED[name]
    with pytest.raises(UserError, match=re.escape(reason)):
        rendered(
            template, [USER, ANSWER, {"role": "user", "content": "SECRET"}, {"role": "assistant", "content": "No."}]
        )


def test_a_tool_call_that_is_not_printed_is_refused():
    messages = [USER, {"role": "assistant", "content": "Wait.", "tool_calls": [CALL]}, TOOL, ANSWER]
    with pytest.raises(UserError, match="does not print the tool call 'weather' of message 2"):
        rendered(TURNS + PROMPT, messages)
    with pytest.raises(UserError, match=r"the arguments 'Köln', and must have a JSON object"):
        rendered(_templates.HEADERS, [USER, {"role": "assistant", "tool_calls": [
            {"function": {"name": "weather", "arguments": "Köln"}}]}])  # fmt: skip


MARKED = "{% for m in messages %}[{{ m.role }}] {% if m.role == 'assistant' %}{% generation %}{{ m.content }}<e>"
MARKED += "{% endgeneration %}{% else %}{{ m.content }}<e>{% endif %}\n{% endfor %}"


def test_marks_of_the_template_decide():
    assert rendered(MARKED, [USER, ANSWER, USER, ANSWER])[1] == ["Yes.<e>"] * 2
    told = MARKED.replace("{% generation %}", "{% generation %}{{ '!' }}")
    assert rendered(told, [USER, ANSWER])[1] == ["!Yes.<e>"]
    with pytest.raises(UserError, match="marks no words of the assistant's"):
        rendered(MARKED.replace("== 'assistant'", "== 'model'"), [USER, ANSWER])
    with pytest.raises(UserError, match="prints words of message 1 within the answer of message 2"):
        rendered(MARKED.replace("<e>{% endgen", "{{ messages[0].content }}{% endgen"), [USER, ANSWER])


@pytest.mark.parametrize("template", [TURNS + PROMPT, MARKED], ids=["found", "marked"])
@pytest.mark.parametrize("unless", [{"weight": 0}, {"train": False}, {"training": False}, {"weight": 0.0}], ids=str)
def test_an_answer_without_weight_is_not_trained_on(template, unless):
    bad = {"role": "assistant", "content": "BAD", **unless}
    good = ANSWER | {"weight": 1, "train": True}
    text, spoken = rendered(template, [USER, bad, USER, good, USER, bad])
    assert spoken == ["Yes.<e>"]
    assert text.count("BAD") == 2


def test_values_of_a_row_are_variables_of_the_template():
    template = "{{ style }}" + TURNS
    assert rendered(template, [USER, ANSWER], style="plain") == (
        "plain[user] red?<e>\n[assistant] Yes.<e>\n",
        ["Yes.<e>"],
    )


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_the_name_that_the_template_reads(name):
    answer = {"role": "assistant", "content": "Yes.", name: "why"}
    assert rendered(_templates.THOUGHTS, [USER, answer])[1] == ["<think>\nwhy\n</think>\n\nYes.<|im_end|>"]


def test_text_beside_what_is_marked_safe_is_not_escaped():
    """Jinja's `~` escapes nothing in transformers' environment; its `+` would."""
    source = "{{ '<n>' ~ (1 | safe) ~ '</n>' }}{% for m in messages %}<h>{{ (m.content | safe) ~ '<e>' }}{% endfor %}"
    assert rendered(source, [USER, ANSWER]) == ("<n>1</n><h>red?<e><h>Yes.<e>", ["Yes.<e>"])


def test_an_answer_without_an_end_mark_is_noted():
    for source, is_endless in ((TURNS, False), (TURNS.replace("<e>", ""), True), (_templates.MARKS_BETWEEN, True)):
        template = ChatTemplate(source, SPECIAL)
        template.render([USER, ANSWER])
        assert template.notes.endless == is_endless


def test_a_long_conversation_takes_time_in_proportion(monkeypatch):
    template = ChatTemplate(_templates.CHATML, {})
    calls = []
    text = template._text
    monkeypatch.setattr(template, "_text", lambda messages, *args: calls.append(len(messages)) or text(messages, *args))
    template.render([USER, ANSWER] * 100)
    assert sum(calls) < 5 * 200  # messages that are rendered, whatever for


# --- what a template may use ------------------------------------------------------------------------------------------

ENDLESS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for m in messages %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
)
HUGE = (
    "{{ 'x' * 10**9 }}",
    "{{ [1] * 10**9 }}",
    "{{ 10**5000 }}",
    "{% set ns = namespace(n=9) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n }}",
    "{{ 'x'.center(10**9) }}",
    "{{ 'x'|center(1000000000) }}",
    "{{ 'a\nb'|indent(30000000) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ '%1000000000d'|format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10**9) }}",
    "{{ messages|tojson(indent=10**9) }}",
    "{{ messages|batch(10**9, 0)|list }}",
    "{{ ('x' * 10**6).replace('x', 'y' * 10**6) }}",
    "{{ ('x' * 10**6)|replace('x', 'y' * 10**6) }}",
    "{{ ('x' * 10**6).join(['a'] * 100) }}",
    "{{ (['x' * 10**6] * 100)|join }}",
    "{{ ('x' * 10**6).translate({120: 'y' * 10**6}) }}",
    "{% set ns = namespace(t='x') %}{% for i in range(60) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}",
    "{% set ns = namespace(t='x') %}{% for i in range(60) %}{% set ns.t = ns.t + ns.t %}{% endfor %}",
    "{% set ns = namespace(t=[1]) %}{% for i in range(60) %}{% set ns.t = ns.t + ns.t %}{% endfor %}",
    "{% for i in range(100) %}{{ 'x' * 10**6 }}{% endfor %}",
)


@pytest.mark.parametrize("template", ENDLESS)
def test_a_template_without_an_end_is_stopped(template, monkeypatch):
    monkeypatch.setattr(limits, "MOST_SECONDS", 0.2)
    with pytest.raises(UserError, match=r"The chat template runs for more than 0.2 seconds for one conversation"):
        rendered(TURNS + template, [USER, ANSWER])


@pytest.mark.parametrize("template", HUGE)
def test_what_a_template_would_make_too_large_is_not_made(template):
    with pytest.raises(UserError, match="The chat template makes a (text or a list of more|whole number)"):
        rendered(TURNS + template, [USER, ANSWER])


@pytest.mark.parametrize("condition", ["messages|length > 1", "add_generation_prompt", "messages|length == 2"])
def test_a_template_that_stops_at_a_part_of_the_conversation_gives_no_other_spans(condition):
    template = TURNS + "{% if " + condition + " %}{{ 'x' * 10**9 }}{% endif %}" + PROMPT
    with pytest.raises(UserError, match="The chat template makes a text"):
        rendered(template, [USER, ANSWER])


def test_templates_have_no_texts_by_chance():
    with pytest.raises(UserError, match="'lipsum' is undefined"):
        rendered("{{ lipsum(n=10**9) }}", [USER, ANSWER])


COLLECTED = (
    "{% set ns = namespace(t='') %}{% for m in messages %}"
    "{% set ns.t = ns.t + '[' + m.role + '] ' + m.content + '<e>\n' %}{% endfor %}{{ ns.t }}"
)


@pytest.mark.parametrize("template", [TURNS, COLLECTED, COLLECTED.replace("+", "~")], ids=["printed", "added", "tilde"])
def test_two_thousand_turns_are_rendered_in_the_time_of_one_conversation(template):
    text, spans, *_ = rendered(template + PROMPT, [USER, ANSWER] * 1_000)
    assert spans == ["Yes.<e>"] * 1_000 and text == "[user] red?<e>\n[assistant] Yes.<e>\n" * 1_000


def test_characters_that_no_text_has_change_no_span():
    marks = "".join(map(chr, (*range(0xFDD0, 0xFDF0), 0xFFFE, 0xFFFF, 0x1FFFE, 0xE000, 0, 1, 2, 3, 0x10FFFF)))
    for template in (TURNS + PROMPT, COLLECTED):
        messages = [USER | {"content": marks + "red?" + marks}, ANSWER | {"content": marks + "Yes." + marks}]
        text, spans, *_ = rendered(template, messages * 2)
        assert spans == [marks + "Yes." + marks + "<e>"] * 2 and text.count(marks) == 8


def test_texts_that_share_a_beginning_keep_their_parts():
    a, b, c = (Traced([Fragment(each, Origin(i, "content"))]) for i, each in enumerate("abc"))
    ab, both = a + b, a + c
    longer, other = ab + c, ab + "x"
    found = {str.__str__(text): [part.text for part in fragments_of(text)] for text in (a, ab, both, longer, other)}
    assert found == {"a": ["a"], "ab": ["a", "b"], "ac": ["a", "c"], "abc": ["a", "b", "c"], "abx": ["a", "b", "x"]}
