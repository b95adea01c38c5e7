"""TRL's chat templates: those that models came with tell the same answers as TRL's copies, which mark them.

`make parity` installs TRL.
"""

import importlib
import importlib.util
import itertools
import json
import re
from pathlib import Path

import pytest
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Plain

from liger_jax.chat.template import ChatTemplate
from liger_jax.data.documents import Document
from liger_jax.data.tokenizer import Tokenizer
from liger_jax.models.hugging_face.source import Source
from liger_jax.user_errors import UserError

FOUND = importlib.util.find_spec("trl")
FOLDER = Path(str(FOUND and FOUND.origin)).parent / "chat_templates"
MARKED = "_training"
pytestmark = [pytest.mark.parity, pytest.mark.skipif(FOUND is None, reason="TRL is absent")]

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CALL = {
    "type": "function",
    "id": "call00001",
    "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}},
}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "description": "c"}}, "required": []}}}]  # fmt: skip


def chat(*contents, **last):
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return [*messages[:-1], messages[-1] | last]


CHATS = {
    "one turn": chat("red?", "Yes."),
    "turns": chat("red?", "Yes.", "SECRET question", " No.\n", "and?", "Maybe."),
    "a question at the end": chat("red?", "Yes.", "blue?"),
    "system": [{"role": "system", "content": "Be brief."}, *chat("red?", "Yes.", "blue?", "No.")],
    "assistant first": [{"role": "assistant", "content": "Welcome!"}, *chat("red?", "Yes.")],
    "reasoning": chat("red?", "Yes.", reasoning_content="It is."),
    "two thoughts": [
        *chat("red?", "Yes.", reasoning_content="It is."),
        *chat("blue?", "No.", reasoning_content="It is not."),
    ],
    "thoughts": chat("red?", "<think>\nIt is.\n</think>\n\nYes."),
    "tools": [
        *chat("warm?", "", tool_calls=[CALL]),
        {"role": "tool", "name": "weather", "content": "sunny", "tool_call_id": "call00001"},
        {"role": "assistant", "content": "It is."},
        *chat("thanks", "Bye."),
    ],
}
# Some marks take the end of the prompt in. Those of DeepSeek's copies hold the header, which is no answer.
OF_THE_PROMPT = ("", "<think>", "<think></think>", "<｜Assistant｜>", "<｜tool▁outputs▁end｜>", "<|start|>assistant")
PARTS_ONLY = ("idefics3", "llava_next", "smolvlm")  # take contents as lists of parts
MARKS_MORE = ("glm4moe",)  # takes the next header for the end of an answer
IN_THE_ANSWER = ("diffusion_gemma",)  # prints what tools say within the answer


# The tokens that end a text, of templates whose answers end with a mark; those of a family are alike.
STOPS = {
    "cohere": "<|END_OF_TURN_TOKEN|>", "cohere2": "<|END_OF_TURN_TOKEN|>",
    "deepseek_r1_distill": "<｜end▁of▁sentence｜>", "deepseekv3": "<｜end▁of▁sentence｜>",
    "diffusion_gemma": "<turn|>", "gemma": "<end_of_turn>", "gemma3": "<end_of_turn>",
    "gptoss": "<|return|>", "lfm2": "<|im_end|>", "lfm2_v2": "<|im_end|>", "llama3": "<|eot_id|>",
    "muse_glimmer": "<|eot|>", "nemotron_3_5_lightning": "<|im_end|>", "nemotron_3_nano": "<|im_end|>",
    "nemotron_3_super": "<|im_end|>", "nemotron_3_ultra": "<|im_end|>",
    "phi3": "<|end|> </s>", "phi3_5": "<|end|> </s>",
    "qwen2_5": "<|im_end|>", "qwen2_5_vl": "<|im_end|>", "qwen3": "<|im_end|>", "qwen3_5_nothink": "<|im_end|>",
    "qwen3_5_think": "<|im_end|>", "qwen3_6": "<|im_end|>", "qwen3_8": "<|im_end|>",
    "qwen3_instruct_2507": "<|im_end|>", "qwen3_vl": "<|im_end|>",
    "glm4moe": "",  # the next message's header ends its answers
}  # fmt: skip
MARK = r"</?[|｜]?[^<>\s{}%]+?[|｜]?>|\[/?[A-Z_]+\]"  # what templates print that may be a token


def names():
    paths = sorted(FOLDER.glob(f"*{MARKED}.jinja")) if FOUND else []
    return [path.stem.removesuffix(MARKED) for path in paths]


def answers(name, messages):
    """The text, and the answers' characters other than white space, one after the other without gaps."""
    template = ChatTemplate((FOLDER / f"{name}.jinja").read_text(), SPECIAL)
    text, spans, *_ = template.render(messages, TOOLS if any("tool_calls" in m for m in messages) else None)
    places = {at for begin, end in spans for at in range(begin, end)}
    inside = [at in places for at in range(len(text))]
    groups = itertools.groupby(zip(text, inside, strict=True), key=lambda pair: pair[1] or pair[0].isspace())
    stretches = [
        "".join(c for c, is_in in group if is_in and not c.isspace()) for in_or_space, group in groups if in_or_space
    ]
    return text, [stretch for stretch in stretches if stretch]


@pytest.mark.parametrize("name", [name for name in names() if name not in PARTS_ONLY])
def test_a_template_and_its_marked_copy_tell_the_same_answers(name):
    compared = 0
    for what, messages in CHATS.items():
        try:
            text, ours = answers(name, messages)
        except UserError as error:
            is_their_own = "The chat template refuses the messages" in str(error) or "does not print" in str(error)
            assert is_their_own or (name in IN_THE_ANSWER and what == "tools"), (what, error)
            continue
        marked, theirs = answers(name + MARKED, messages)
        if text != marked or name in MARKS_MORE:
            continue  # some copies print thoughts that the first one drops
        compared += 1
        assert len(ours) == len(theirs), (what, ours, theirs)
        for our, their in zip(ours, theirs, strict=True):
            assert their.endswith(our) and their.removesuffix(our) in OF_THE_PROMPT, what
    assert compared or name in MARKS_MORE


@pytest.mark.parametrize("name", names())
def test_texts_are_those_of_transformers(name):
    render_jinja_template = importlib.import_module("transformers.utils.chat_template_utils").render_jinja_template

    source = (FOLDER / f"{name}.jinja").read_text()
    for messages in CHATS.values():
        tools = TOOLS if any("tool_calls" in m for m in messages) else None
        try:
            text, _, *_ = ChatTemplate(source, SPECIAL).render(messages, tools)
        except UserError:
            continue
        copy = json.loads(json.dumps(messages))
        try:
            theirs = render_jinja_template([copy], tools, chat_template=source, **SPECIAL)[0][0]
        except Exception:  # where arguments must be a text, as in DeepSeek's
            continue
        assert text == theirs


@pytest.mark.parametrize("name", [name for name in names() if name not in PARTS_ONLY])
@pytest.mark.parametrize("copy", ["", MARKED])
def test_a_text_ends_with_what_ends_last_answers(name, copy, tmp_path):
    """With every mark of a template as a special token, thoughts and two turns in the data, and without any data."""
    source = (FOLDER / f"{name}{copy}.jinja").read_text()
    plain = Plain(models.BPE({each: i for i, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.add_special_tokens([AddedToken(each, special=True) for each in {"<s>", "</s>", *re.findall(MARK, source)}])
    plain.save(str(tmp_path / "tokenizer.json"))
    config = SPECIAL | {"chat_template": source}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    expected = "<|user|>" if name == "glm4moe" and copy else STOPS[name]  # the copy marks the next header, too
    for whats in ([], ["turns", "reasoning", "two thoughts", "one turn"]):
        tokenizer = Tokenizer(Source(tmp_path), 10_000, [])
        tokenizer.prompt(Document("prompt", messages=CHATS["one turn"][:1]))
        rows = [Document(what, messages=CHATS[what]) for what in whats]
        list(tokenizer.encoded(rows, 10_000, refused := {}))
        assert not refused
        assert {plain.id_to_token(stop) for stop in tokenizer.stops} == {"</s>", *expected.split()}
