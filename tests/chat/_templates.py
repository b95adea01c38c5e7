"""Chat templates in the manner of well-known models, each with a function that says what it prints and which part of
it is the assistant's: spans that are known by construction."""

import json
from collections.abc import Callable, Iterator
from typing import Any

Pieces = Iterator[tuple[str, bool]]  # texts in their order, and whether they are trained on

CHATML = """{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# The default system prompt is printed at the first message, whosever it is.
CHATML_IN_LOOP = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}
{{- '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

THOUGHTS = """{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.last < 0 and message.role == 'user' %}{% set ns.last = index %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {%- set thoughts = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thoughts = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thoughts) %}
            {{- '<|im_start|>assistant\n<think>\n' + thoughts.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

HEADERS = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + strftime_now('%d %b')[:0] + '26 Jul\n\n' }}
{{- system + '<|eot_id|>' }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls|length != 1 %}{{ raise_exception('one call at once') }}{% endif %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + message.tool_calls[0].function.name }}
        {{- '", "parameters": ' + message.tool_calls[0].function.arguments | tojson + '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + message.content + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

MODEL_ROLE = """{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

INST = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}
{{- '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}
{{- ' ' + message['content'].strip() + eos_token }}{% else %}{{ raise_exception('no such role') }}{% endif %}
{%- endfor %}"""

END_WITHOUT_PROMPT = """{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] }}
{{- '<|end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""

PROMPT_IN_LOOP = """{% for message in messages %}
{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token }}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

PROMPT_THINKS = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}
{%- set content = message['content'] %}
{%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{- '<｜Assistant｜>' + content + eos_token }}{% else %}{{ '<｜User｜>' + message['content'] }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"""

MARKS_BETWEEN = """{% for message in messages %}{% if not loop.first %}{{ '<|end|>\n' }}{% endif %}
{{- '<|' ~ message['role'] ~ '|>' ~ message['content'] }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|end|>\n<|assistant|>' }}{% endif %}"""

END_AT_LAST = """{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant:' }}{% else %}{{ eos_token }}{% endif %}"""

NO_PROMPT = "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<e>{% endfor %}"

PROMPT_ALWAYS = NO_PROMPT + "<|assistant|>"

BY_INDEX = """{% for i in range(messages | length) %}<|{{ messages[i].role }}|>{{ messages[i].content }}<e>
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""

MACROS = """{% macro turn(message) %}{% set text %}{{ message.content | trim }}<e>{% endset %}
[{{ message.role }}] {{ text }}
{% endmacro %}{% for message in messages %}{{ turn(message) }}{% endfor %}
{%- if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"""

CUT_AND_JOINED = """{% for message in messages %}{{ ['[', message.role, '] '] | join }}
{%- for line in message.content.split('\n') %}{{ line.replace('#', '') }}{% if not loop.last %}{{ '\n' }}{% endif %}
{%- endfor %}{{ '<e>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"""


def turns(begin: str, end: str, after: str = "", *, first: str = "", role: Any = str, content: Any = str) -> Any:
    """What a template prints that writes all messages in one form, between `begin` with the role in it and `end`."""

    def pieces(messages: list[dict[str, Any]]) -> Pieces:
        yield first if messages[0]["role"] != "system" else "", False
        for message in messages:
            yield begin.format(role(message["role"])), False
            yield content(message["content"]) + end, message["role"] == "assistant"
            yield after, False

    return pieces


def thoughts(messages: list[dict[str, Any]]) -> Pieces:
    last_question = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    for i, message in enumerate(messages):
        yield f"<|im_start|>{message['role']}\n", False
        content, thoughts = message["content"], message.get("reasoning_content")
        if message["role"] == "assistant":
            if thoughts is None and "</think>" in content:
                thoughts = content.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
                content = content.split("</think>")[-1].lstrip("\n")
            if i > last_question and (i + 1 == len(messages) or thoughts):
                content = f"<think>\n{(thoughts or '').strip(chr(10))}\n</think>\n\n" + content.lstrip("\n")
        yield content + "<|im_end|>", message["role"] == "assistant"
        yield "\n", False


def headers(messages: list[dict[str, Any]]) -> Pieces:
    is_first = messages[0]["role"] == "system"
    system = messages[0]["content"].strip() if is_first else ""
    yield f"<s><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul\n\n{system}<|eot_id|>", False
    for message in messages[is_first:]:
        role = {"tool": "ipython"}.get(message["role"], message["role"])
        yield f"<|start_header_id|>{role}<|end_header_id|>\n\n", False
        content = message.get("content") or ""
        for call in message.get("tool_calls", ()):
            arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            content = f'{{"name": "{call["function"]["name"]}", "parameters": {arguments}}}'
        yield (content if role == "ipython" else content.strip()) + "<|eot_id|>", role == "assistant"


def inst(messages: list[dict[str, Any]]) -> Pieces:
    yield "<s>", False
    for message in messages:
        is_answer = message["role"] == "assistant"
        yield f" {message['content'].strip()}</s>" if is_answer else f"[INST] {message['content']} [/INST]", is_answer


def ended(pieces: Pieces, end: str, messages: list[dict[str, Any]]) -> Pieces:
    """Pieces with what ends the text. It is the last answer's, with the white space before it."""
    *others, (last, _), (space, _) = pieces
    is_answer = messages[-1]["role"] == "assistant"
    yield from others
    yield from [(last + space + end, True)] if is_answer else [(last, False), (space, False), (end, False)]


def end_without_prompt(messages: list[dict[str, Any]]) -> Pieces:
    return ended(turns("<|{}|>\n", "<|end|>", "\n")(messages), "</s>", messages)


def prompt_thinks(messages: list[dict[str, Any]]) -> Pieces:
    yield "<s>", False
    for message in messages:
        is_answer = message["role"] == "assistant"
        yield "<｜Assistant｜>" if is_answer else "<｜User｜>", False
        yield message["content"].split("</think>")[-1] + "</s>" if is_answer else message["content"], is_answer


def marks_between(messages: list[dict[str, Any]]) -> Pieces:
    for i, message in enumerate(messages):
        is_last, is_answer = i + 1 == len(messages), message["role"] == "assistant"
        yield f"<|{message['role']}|>", False
        yield message["content"] + ("" if is_last else "<|end|>"), is_answer
        yield "" if is_last else "\n", False


def end_at_last(messages: list[dict[str, Any]]) -> Pieces:
    # The prompt has no space.
    return ended(turns("{}:", "", "\n", content=lambda text: f" {text}")(messages), "</s>", messages)


def prompt_always(messages: list[dict[str, Any]]) -> Pieces:
    yield from turns("<|{}|>", "<e>")(messages)
    yield "<|assistant|>", False


DEFAULT = "<|im_start|>system\nYou help.<|im_end|>\n"
TEMPLATES: dict[str, tuple[str, Callable[[list[dict[str, Any]]], Pieces]]] = {
    "ChatML with a default system prompt": (CHATML, turns("<|im_start|>{}\n", "<|im_end|>", "\n", first=DEFAULT)),
    "the default in the loop": (CHATML_IN_LOOP, turns("<|im_start|>{}\n", "<|im_end|>", "\n", first=DEFAULT)),
    "thoughts dropped from earlier turns": (THOUGHTS, thoughts),
    "header ids, a date, trimmed": (HEADERS, headers),
    "the role model": (
        MODEL_ROLE,
        lambda messages: turns(
            "<start_of_turn>{}\n", "<end_of_turn>", "\n", first="<s>",
            role=lambda role: {"assistant": "model"}.get(role, role), content=str.strip,
        )(messages),
    ),
    "INST": (INST, inst),
    "end of text without a prompt": (END_WITHOUT_PROMPT, end_without_prompt),
    "the prompt in the loop": (PROMPT_IN_LOOP, turns("<|{}|>\n", "</s>", "\n")),
    "a prompt that thinks": (PROMPT_THINKS, prompt_thinks),
    "marks between turns": (MARKS_BETWEEN, marks_between),
    "end of text after the last answer": (END_AT_LAST, end_at_last),
    "no prompt": (NO_PROMPT, turns("<|{}|>", "<e>")),
    "a prompt at any rate": (PROMPT_ALWAYS, prompt_always),
    "by index": (BY_INDEX, turns("<|{}|>", "<e>", "\n")),
    "macros and set blocks": (MACROS, turns("[{}] ", "<e>", "\n", content=str.strip)),
    "cut and joined": (CUT_AND_JOINED, turns("[{}] ", "<e>", "\n", content=lambda text: text.replace("#", ""))),
}  # fmt: skip
