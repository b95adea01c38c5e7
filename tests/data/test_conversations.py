"""The messages and tools of a conversation: what is read of them, and one sentence for whatever is none."""

import json
import re
import shutil

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Plain

from liger_jax.data import reading
from liger_jax.data.documents import Document
from liger_jax.data.tokenizer import Tokenizer
from liger_jax.models.hugging_face.source import Source
from liger_jax.user_errors import UserError
from tests.chat import _templates

USER, ANSWER = {"role": "user", "content": "red?"}, {"role": "assistant", "content": "Yes."}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
TURNS = "{% for m in messages %}[{{ m.role }}] {{ m.content }}<e>{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a tokenizer of bytes, and the chat template of each test."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Plain(models.BPE({each: i for i, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in ("<e>", "<|end|>", "</s>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def documents(tmp_path, *rows):
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return reading.read(str(tmp_path / "rows.jsonl"))


def trained(folder, template, found):
    """The tokenizer, the texts of pieces, and the tokens in them that are trained on."""
    config = {"chat_template": template, "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer, plain = Tokenizer(Source(folder), 300, []), Plain.from_file(str(folder / "tokenizer.json"))
    pieces = tokenizer.pieces(found, length=500)
    decode = lambda tokens: plain.decode(tokens.tolist(), skip_special_tokens=False)
    return tokenizer, [decode(p.tokens) for p in pieces], [decode(p.labels[p.labels >= 0]) for p in pieces]


@pytest.mark.parametrize(
    ["message", "reason"],
    [
        ({"role": "user"}, "message 1, the user's, has no content."),
        ({"role": "user", "content": None}, "message 1, the user's, has no content."),
        ({"role": "user", "content": 3}, "message 1, the user's, has a content of type int, and must have a text."),
        ({"role": "user", "content": {"text": "hi"}}, "has a content of type dict"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "has an item of type 'image_url'"),
        ({"role": "assistant", "content": None}, "message 1, the assistant's, has no content."),
        ({"role": "assistant", "content": None, "tool_calls": []}, "message 1, the assistant's, has no content."),
        ({"role": "assistant", "content": " \n"}, "message 1, the assistant's, is empty, so that only the mark"),
        ({**ANSWER, "weight": 0.5}, "message 1, the assistant's, has weight=0.5, and must have 0 or 1"),
        ({**ANSWER, "train": "false"}, "has train='false', and must have 0 or 1, false or true."),
        ({**ANSWER, "tool_calls": [{"type": "function"}]}, "has tool_calls that are not a list of objects"),
        ({**ANSWER, "tool_calls": [{"name": "f", "arguments": [1]}]}, "calls 'f' with arguments of type list"),
    ],
    ids=str,
)
def test_a_message_that_no_template_should_see_is_named_with_its_line(tmp_path, message, reason):
    with pytest.raises(UserError, match="line 2: .*" + re.escape(reason)):
        documents(tmp_path, {"messages": [USER, ANSWER]}, {"messages": [message, ANSWER]})


@pytest.mark.parametrize(
    ["row", "reason"],
    [
        ({"tools": "[{"}, "line 1: tools is a text that is not JSON"),
        ({"tools": ["weather"]}, "line 1: tools is a text that is not JSON"),
        ({"tools": {"name": "weather"}}, "line 1: tools must be a list of objects"),
        ({"chat_template_kwargs": [1]}, "line 1: chat_template_kwargs must be an object"),
        ({"chat_template_kwargs": {"tools": []}}, "line 1: chat_template_kwargs must not have 'tools'"),
    ],
    ids=str,
)
def test_a_row_with_other_tools_or_values_is_named(tmp_path, row, reason):
    with pytest.raises(UserError, match=re.escape(reason)):
        documents(tmp_path, {"messages": [USER, ANSWER], **row})


def test_a_role_that_the_template_itself_names_is_known(folder, tmp_path, capsys):
    row = {"messages": [{"role": "ipython", "content": "2"}, {"role": "Assistent", "content": "?"}, USER, ANSWER]}
    trained(folder, TURNS + "{% if 'ipython' %}{% endif %}", documents(tmp_path, row))
    (told,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("role ")]
    assert told.startswith("role 'Assistent' in 1 row (") and told.endswith("did you mean assistant?")


def test_nulls_are_absent_and_parts_of_text_are_joined(tmp_path):
    parts = [{"type": "text", "text": "re", "image": None}, "d", {"text": "?"}]
    row = {
        "messages": [
            {"role": "user", "content": parts, "tool_calls": None, "name": None},
            {"role": "assistant", "content": "Yes.", "tool_calls": [], "weight": None},
            {"role": "assistant", "content": None, "tool_calls": [{"id": None, **CALL}]},
        ],
        "tools": None,
        "chat_template_kwargs": {"style": None},
    }
    (found,) = documents(tmp_path, row)
    assert found.messages == [USER, ANSWER, {"role": "assistant", "tool_calls": [CALL]}]
    assert found.tools is None and found.values == {}


@pytest.mark.parametrize(
    "tools", [TOOLS, json.dumps(TOOLS), [json.dumps(TOOLS[0])]], ids=["list", "JSON", "list of JSON"]
)
def test_tools_go_to_the_template_for_tools(folder, tmp_path, tools):
    default, tool_use = TURNS, "{% for t in tools or ['none'] %}{{ t | tojson }}{% endfor %}" + TURNS
    several = [{"name": "default", "template": default}, {"name": "tool_use", "template": tool_use}]
    row = {"messages": [USER, ANSWER]}
    found = documents(tmp_path, row | {"tools": tools}, row, row | {"tools": "[]"})
    _, texts, spoken = trained(folder, several, found)
    plain = "[user] red?<e>[assistant] Yes.<e>"
    assert texts == [json.dumps(TOOLS[0]) + plain, plain, plain] and spoken == ["Yes.<e>"] * 3


def test_chat_templates_in_files_are_taken_as_transformers_does(folder, tmp_path):
    found = documents(tmp_path, {"messages": [USER, ANSWER], "tools": TOOLS}, {"messages": [USER, ANSWER]})
    additional = folder / "additional_chat_templates"
    additional.mkdir()
    try:
        (additional / "tool_use.jinja").write_text("tools " + TURNS)
        with pytest.raises(UserError, match="line 2: .* has the chat templates tool_use, and none is the default"):
            trained(folder, "unread", found)
        (folder / "chat_template.jinja").write_text("file " + TURNS)
        texts = trained(folder, "unread", found)[1]
    finally:
        (additional / "tool_use.jinja").unlink(missing_ok=True)
        additional.rmdir()
        (folder / "chat_template.jinja").unlink(missing_ok=True)
    assert [text.partition(" ")[0] for text in texts] == ["tools", "file"]


def test_weights_are_obeyed_and_rows_without_a_token_to_train_on_are_left_out(folder, tmp_path):
    bad = ANSWER | {"content": "BAD", "weight": 0}
    empty = ANSWER | {"content": "", "train": False}  # which would be refused if it were trained on
    found = documents(tmp_path, {"messages": [USER, bad, USER, empty, USER, ANSWER]}, {"messages": [USER, bad]})
    assert trained(folder, TURNS, found)[2] == ["Yes.<e>"]


def test_fields_that_look_like_weights_are_named_once(tmp_path, capsys):
    messages = [USER | {"train": True}, ANSWER | {"loss_mask": 1, "function_call": {}, "weight": 1, "name": "x"}]
    documents(tmp_path, *[{"messages": messages, "sample_weight": 2, "id": 7}] * 3)
    told = capsys.readouterr().out
    assert told.count("\n") == 1 and told.startswith(
        "data: 'function_call' in a message, 'loss_mask' in a message, 'sample_weight' beside the messages, "
        "'train' in a message: not read."
    )
    documents(tmp_path, {"messages": [USER | {"weight": 0}, ANSWER]})
    assert capsys.readouterr().out == ""


def test_values_of_a_row_reach_its_template(folder, tmp_path):
    row = {"messages": [USER, ANSWER], "chat_template_kwargs": {"style": "short"}}
    assert trained(folder, "{{ style }}" + TURNS, documents(tmp_path, row))[1] == [
        "short[user] red?<e>[assistant] Yes.<e>"
    ]


def test_what_is_to_be_known_of_conversations_is_said_once(folder, tmp_path, capsys):
    call = {"role": "assistant", "tool_calls": [{"function": CALL["function"] | {"arguments": '{"city": "Rome"}'}}]}
    found = documents(tmp_path, *[{"messages": [USER, call]}] * 2)
    capsys.readouterr()
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content or (m.tool_calls | tojson) }}{% endfor %}"
    assert trained(folder, template, found)[2] == [json.dumps([CALL])] * 2
    told = capsys.readouterr().out
    assert told.count("they are parsed") == told.count("trained without a stop") == 1


def test_an_end_of_answers_that_is_no_token_is_named(folder, tmp_path, capsys):
    """As where a template of ChatML stands beside the tokenizer of a base model."""
    found = documents(tmp_path, *[{"messages": [USER, ANSWER]}] * 2)
    for end, number in (("<|im_end|>\n", 1), ("<e>\n", 0), ("", 0)):
        tokenizer, _, spoken = trained(folder, TURNS.replace("<e>", end), found)
        assert spoken == ["Yes." + end.strip()] * 2 and tokenizer.chats
        assert capsys.readouterr().out.count("ends an answer with '<|im_end|>', which is no token") == number


def test_texts_beside_a_chat_template_are_no_chats(folder, tmp_path):
    tokenizer, *_ = trained(folder, TURNS, documents(tmp_path, {"prompt": "red?", "completion": "Yes."}))
    assert not tokenizer.chats
    tokenizer.add_marks({}, chats=True)
    assert tokenizer.chats


def test_a_stop_is_each_mark_that_ends_a_last_answer(folder, tmp_path):
    """Thoughts may end with the mark that ends earlier answers, as gpt-oss' do: a model must not stop there."""
    plain = Plain.from_file(str(folder / "tokenizer.json"))
    named = lambda tokenizer: {plain.id_to_token(stop) for stop in tokenizer.stops}
    turns = documents(tmp_path, {"messages": [USER, ANSWER, USER, ANSWER]})
    tokenizer, _, spoken = trained(folder, _templates.END_WITHOUT_PROMPT, turns)
    assert spoken == ["Yes.<|end|>Yes.<|end|>\n</s>"] and named(tokenizer) == {"<|end|>", "</s>"}
    other = "{% for m in messages %}[{{ m.role }}] {% if m.thinking %}{{ m.thinking }}<|end|>{% endif %}{{ m.content }}"
    other += "{{ '<e>' if loop.last else '<|end|>' }}{% endfor %}"
    thoughts = documents(tmp_path, {"messages": [USER, ANSWER, USER, ANSWER | {"thinking": "hm"}]})
    for rows, last in ((turns, "Yes.<e>"), (thoughts, "hm<|end|>Yes.<e>")):
        tokenizer, _, spoken = trained(folder, other, rows)
        assert spoken == ["Yes.<|end|>" + last] and named(tokenizer) == {"<e>", "</s>"}
    again = Tokenizer(Source(folder), 300, [])  # as a start that finds its tokens in files
    again.add_marks(tokenizer.marks)
    assert again.stops == tokenizer.stops


def test_whoever_samples_stops_at_what_ends_an_answer(folder):
    plain = Plain.from_file(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TURNS, "eos_token": "</s>"}))
    tokenizer = Tokenizer(Source(folder), 300, [])
    tokenizer.prompt(Document("here", "red?"))
    assert tokenizer.stops == [plain.token_to_id("</s>")]
    tokenizer.prompt(Document("here", messages=[USER]))
    assert set(tokenizer.stops) == {plain.token_to_id(each) for each in ("<e>", "</s>")}


def test_what_a_template_leaves_out_is_said_once_with_its_rows(folder, tmp_path, capsys):
    users = "{% for m in messages %}{% if m.role in ('user', 'assistant') %}"
    users += "[{{ m.role }}] {{ m.content }}<e>{% endif %}"
    system, result = {"role": "system", "content": "Be brief."}, {"role": "tool", "content": "sunny"}
    rows = [{"messages": [system, USER, ANSWER]}, {"messages": [USER, ANSWER], "system": "Be brief."}]
    rows += [{"messages": [USER, ANSWER, result, ANSWER], "tools": TOOLS}]
    rows += [{"messages": [USER, ANSWER | {"reasoning_content": "hm"}], "chat_template_kwargs": {"think": True}}]
    found = documents(tmp_path, *rows)
    expected = [
        "prints no system message, in 2 rows", "prints no tool result, in 1 row", "prints no tools, in 1 row",
        "prints no reasoning, in 1 row", "reads no variable 'think', in 1 row",
    ]  # fmt: skip
    capsys.readouterr()
    tokenizer, *_ = trained(folder, users + "{% endfor %}", found)
    assert capsys.readouterr().out.splitlines() == [f"the chat template {each}" for each in expected]
    assert tokenizer.notices() == {}
    tokenizer.prompt(Document("here", messages=[system, USER], tools=TOOLS))
    assert {*tokenizer.notices()} == {"prints no system message", "prints no tools"}
    tokenizer, *_ = trained(folder, "{% for t in tools %}{{ t.function.name }}{% endfor %}" + TURNS, found[2:3])
    assert capsys.readouterr().out == "" and tokenizer.notices() == {}  # it fails without tools
    short = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content[:4] if m.role == 'system' else m.content }}<e>{% endfor %}"
    )
    trained(folder, short, found[:1])
    assert "prints only a part of a system message, in 1 row" in capsys.readouterr().out
    thoughtful = documents(tmp_path, {"messages": [USER, ANSWER | {"content": "<think>\nhm\n</think>\n\nblue"}]})
    trained(folder, users.replace("m.content", "m.content.split('</think>')[-1].strip()") + "{% endfor %}", thoughtful)
    assert "prints no reasoning, in 1 row" in capsys.readouterr().out
    trained(folder, users + "{% endfor %}", thoughtful)
    assert capsys.readouterr().out == ""
    everything = "{{ think }}{{ (tools or [{}])[0] | tojson }}{% for m in messages %}{{ m.reasoning_content }}"
    trained(folder, everything + "[{{ m.role }}] {{ m.content | upper }}<e>{% endfor %}", found)
    assert capsys.readouterr().out == ""


def test_what_a_tokenizer_adds_is_there_once(folder, tmp_path):
    """Texts that hold the beginning already, as a rendered conversation does, in every format; long ones as well."""
    own, plain = tmp_path / "own", Plain.from_file(str(folder / "tokenizer.json"))
    own.mkdir()
    begin, end = (plain.token_to_id(each) for each in ("<e>", "</s>"))
    special = [("<e>", begin), ("</s>", end)]
    plain.post_processor = processors.TemplateProcessing(single="<e> $A </s>", special_tokens=special)
    plain.save(str(own / "tokenizer.json"))
    (own / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    tokenizer = Tokenizer(Source(own), 300, [])
    (tmp_path / "long.txt").write_text("<e>ab</s>")
    rows = [{"text": "<e>ab</s>"}, {"text": "ab"}, {"prompt": "<e>a", "completion": "b</s>"}]
    pieces = tokenizer.encoded([*documents(tmp_path, *rows), Document("long", path=tmp_path / "long.txt")], 50)
    for piece, is_scored in zip(pieces, ([1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1], [1, 1, 1, 1]), strict=True):
        assert piece.tokens.tolist() == [begin, *plain.encode("ab", add_special_tokens=False).ids, end]
        assert (piece.labels >= 0).tolist() == list(map(bool, is_scored))
    for text in ("<e>ab", "ab"):
        own = plain.encode("ab", add_special_tokens=False).ids
        assert tokenizer.prompt(Document("here", text)).tolist() == [begin, *own]
    assert list(tokenizer.notices().values()) == [
        "4 texts begin with '<e>', which the tokenizer adds as well: it is there once",
        "3 texts end with '</s>', which the tokenizer adds as well: it is there once",
    ]


NUMBERS = {"<|b|>": 260, "<|a|>": 259}
DECODER = {"259": {"content": "<|a|>", "special": True}, "260": {"content": "<|b|>", "special": False}}


@pytest.mark.parametrize(
    ["files", "ids"],
    [
        ({"tokenizer_config.json": {"added_tokens_decoder": DECODER}}, [259, 260]),
        (
            {"added_tokens.json": NUMBERS, "special_tokens_map.json": {"eos_token": "<|b|>"}},
            [259, 260],
        ),
        ({"tokenizer_config.json": {"eos_token": "<|b|>", "additional_special_tokens": ["<|a|>"]}}, [260, 259]),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"258": {"content": "<|a|>"}}}}, None),
        ({"added_tokens.json": {"<|a|>": "259"}}, None),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"259": "<|a|>"}}}, None),
    ],
    ids=["listed", "an older file", "special alone", "another number", "no number", "no token"],
)
def test_tokens_of_the_files_beside_are_added(folder, tmp_path, files, ids):
    shutil.copy(folder / "tokenizer.json", tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    if ids is None:
        with pytest.raises(UserError, match=r"<\|a\|>"):
            Tokenizer(Source(tmp_path), 300, [])
        return
    tokenizer = Tokenizer(Source(tmp_path), 300, [])
    assert [tokenizer.vocabulary[each] for each in ("<|a|>", "<|b|>")] == ids
    assert tokenizer.prompt(Document("here", "<|a|><|b|>")).tolist() == ids
    has_eos = "eos_token" in str(files)
    assert tokenizer.stops == ([tokenizer.vocabulary["<|b|>"]] if has_eos else [])


def test_white_space_that_a_token_shares_with_an_answer_is_trained_on(folder, tmp_path):
    merged = tmp_path / "merged"
    merged.mkdir()
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"] |= {"vocab": vocab | {"ĠY": len(vocab)}, "merges": [["Ġ", "Y"]]}
    for i, token in enumerate(tokenizer["added_tokens"], 1):
        token["id"] = len(vocab) + i
    (merged / "tokenizer.json").write_text(json.dumps(tokenizer))
    found = documents(tmp_path, {"messages": [USER, ANSWER]})
    assert trained(merged, TURNS, found)[2] == [" Yes.<e>"]


# --- strange tokenizers -----------------------------------------------------------------------------------------------

CHAT = {"messages": [USER, ANSWER]}
GROWING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aaaa"}
WORDS = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}}
SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
STRANGE = {
    "no_unknown_word": (
        {"tokenizer.json": WORDS | {"model": {"type": "WordLevel", "vocab": {"hello": 0}, "unk_token": "[UNK]"}}},
        {"text": "hello unknown"},
        "line 1: the tokenizer fails: ",
    ),
    "no_unknown_piece": (
        {"tokenizer.json": WORDS | {"model": {"type": "Unigram", "vocab": [["hello", -1.0]], "unk_id": None}}},
        {"text": "hello unknown"},
        "line 1: the tokenizer fails: ",
    ),
    "backtracking": (
        {"tokenizer.json": WORDS | {"pre_tokenizer": SPLIT, "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}},
        {"text": "a" * 40 + "b"},
        "line 1: ",
    ),
    "growing": (
        {"tokenizer.json": WORDS | {"normalizer": {"type": "Sequence", "normalizers": [GROWING] * 40}}},
        {"text": "a"},
        r"tokenizer.json: its normalizer can make a text 1.21e\+24 times as long, and 100 times is the most",
    ),
    "growing_by_a_pattern": (
        {"tokenizer.json": WORDS | {"normalizer": GROWING | {"pattern": {"Regex": ""}, "content": "a" * 1_000}}},
        {"text": "a"},
        "its normalizer can make a text 1e.03 times as long",
    ),
    "deep": (
        {"tokenizer.json": b'{"a":' * 100_000},
        {"text": "a"},
        "tokenizer.json cannot be read: is nested too deep",
    ),
    "deep_config": ({"tokenizer_config.json": b'{"a":' * 100_000}, {"text": "a"}, "tokenizer_config.json cannot be re"),
    "bytes": ({"tokenizer.json": b"\xff"}, {"text": "a"}, "tokenizer.json cannot be read: .*'utf-8' codec"),
    "template_bytes": ({"chat_template.jinja": b"\xff\xfe"}, CHAT, "chat_template.jinja cannot be read: 'utf-8'"),
    "template_strings": (
        {"tokenizer_config.json": {"chat_template": ["a"]}},
        CHAT,
        "is a list, and must then be of ob",
    ),
    "template_surrogate": ({"tokenizer_config.json": {"chat_template": TURNS + "\ud800"}}, CHAT, "line 1: "),
    "template_loops": (
        {"chat_template.jinja": b"{% for a in [1] %}" * 25 + b"{% endfor %}" * 25},
        CHAT,
        "line 1: The tokenizer's chat template cannot be read: too many statically nested",
    ),
}


@pytest.mark.parametrize("case", STRANGE)
def test_a_strange_tokenizer_is_one_sentence(case, folder, tmp_path):
    files, row, message = STRANGE[case]
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    found = documents(tmp_path, row)
    with pytest.raises(UserError, match=message) as caught:
        Tokenizer(Source(tmp_path), 2048, (256,)).pieces(found, 64)
    assert len(str(caught.value)) < 1_500


@pytest.mark.parametrize("stop", [-1, -100, 10**30])
def test_a_stop_that_is_no_token_is_refused(stop, folder):
    with pytest.raises(UserError, match=f"eos_token_id names .*{str(stop)[:9]}.*, which is not a token. Correct it."):
        Tokenizer(Source(folder), 2048, (3, stop))
