"""Rows of the formats that people have: what is trained on of each, and what is refused as it could be meant twice."""

import json
import re
import shutil

import pytest
from tokenizers import Tokenizer as Plain

from liger_jax.data import formats, preferences, reading
from liger_jax.data.tokenizer import Tokenizer
from liger_jax.models.hugging_face.source import Source
from liger_jax.user_errors import UserError
from tests import _tiny

USER, ANSWER = {"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}
HUMAN, GPT = {"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}
SYSTEM = {"role": "system", "content": "ten"}


def read(row, **options):
    return formats.document("a.jsonl, line 1", row, **options)


@pytest.mark.parametrize(
    ["row", "messages"],
    [
        ({"messages": [USER, ANSWER]}, [USER, ANSWER]),
        ({"messages": json.dumps([USER, ANSWER])}, [USER, ANSWER]),  # as a table's cell holds them
        ({"messages": [USER, ANSWER], "system": "ten"}, [SYSTEM, USER, ANSWER]),
        ({"messages": [USER, ANSWER], "text": None, "prompt": "one", "id": 3}, [USER, ANSWER]),
        ({"conversations": [HUMAN, GPT]}, [USER, ANSWER]),
        ({"conversations": [HUMAN, GPT], "system": "ten"}, [SYSTEM, USER, ANSWER]),
        ({"conversations": [{"from": "system", "value": "ten"}, HUMAN, GPT]}, [SYSTEM, USER, ANSWER]),
        ({"conversations": [HUMAN, {"from": "model", "value": "two"}]}, [USER, ANSWER]),
        ({"conversations": [USER, ANSWER]}, [USER, ANSWER]),
        (
            {"conversations": [HUMAN, GPT, {"from": "tool", "value": "5"}, GPT | {"weight": 0}]},
            [USER, ANSWER, {"role": "tool", "content": "5"}, ANSWER | {"weight": 0}],
        ),
        ({"conversations": [HUMAN | {"value": [{"type": "text", "text": "one"}]}, GPT]}, [USER, ANSWER]),
        ({"instruction": "one", "output": "two"}, [USER, ANSWER]),
        ({"instruction": "one", "input": "", "output": "two", "history": []}, [USER, ANSWER]),
        (
            {"instruction": "one", "input": "three", "output": "two", "system": "ten"},
            [SYSTEM, {"role": "user", "content": "one\nthree"}, ANSWER],
        ),
        ({"prompt": [USER], "completion": [ANSWER]}, [USER, ANSWER]),
        (
            {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]},
            [USER, ANSWER | {"weight": 0}, USER, ANSWER],
        ),
    ],
    ids=str,
)
def test_formats_of_conversations_are_recognised_by_their_fields(row, messages):
    assert read(row).messages == messages


@pytest.mark.parametrize(
    ["row", "options", "found"],
    [
        ({"text": "one"}, {}, (None, "one", None)),
        ({"prompt": "one ", "completion": "two"}, {}, ("one ", "two", None)),
        ({"story": "one", "messages": [USER, ANSWER]}, {"column": "story"}, (None, "one", None)),
        ({"dialog": [HUMAN, GPT]}, {"column": "dialog"}, (None, "", [USER, ANSWER])),
        ({"messages": [USER, ANSWER]}, {"column": "story"}, (None, "", [USER, ANSWER])),
        ({"text": "one", "messages": [USER, ANSWER]}, {"form": "messages"}, (None, "", [USER, ANSWER])),
        ({"text": "one", "messages": [USER, ANSWER]}, {"form": "text"}, (None, "one", None)),
        ({"text": "", "instruction": "one", "output": "two"}, {}, (None, "", [USER, ANSWER])),
        ({"prompt": "one", "completion": "", "chosen": "a", "rejected": "b"}, {"column": "chosen"}, (None, "a", None)),
    ],
    ids=str,
)
def test_what_is_named_is_what_is_trained_on(row, options, found):
    document = read(row, **options)
    assert (document.prompt, document.text, document.messages) == found


@pytest.mark.parametrize(
    ["row", "message"],
    [
        (
            {"instruction": "one", "output": "two", "text": "one two"},
            r"more than one format: alpaca \(instruction and output\); text \(text\). Choose one: "
            "--format alpaca or --format text.",
        ),
        ({"messages": [USER, ANSWER], "conversations": [HUMAN, GPT]}, "--format messages or --format sharegpt."),
        (
            {"conversations": [{"from": "bing", "value": "one"}, GPT]},
            "from 'bing', and must be from one of human, user",
        ),
        ({"conversations": [{"from": "human", "role": "user", "value": "one"}, GPT]}, "both 'from' and a role"),
        ({"conversations": [HUMAN, {"from": "gpt"}]}, "message 2, the assistant's, has no content."),
        ({"conversations": [3]}, "messages must be a list of objects, each with a role and a content."),
        ({"conversations": [HUMAN]}, "no message is the assistant's"),
        (
            {"conversations": [SYSTEM, HUMAN, GPT], "system": "nine"},
            "a system message in the field system and another one",
        ),
        ({"conversations": [HUMAN, GPT], "system": 3}, "system holds a number, and must hold a text."),
        ({"instruction": "one", "output": "two", "history": [["a", "b"]]}, "the row has a history, and it is unclear"),
        ({"instruction": "one", "output": 2}, "output holds a number, and must hold a text."),
        ({"instruction": "one", "output": " "}, "the assistant's, is empty"),
        ({"prompt": "one", "completion": "two", "label": False}, "label says whether the completion is good"),
        ({"prompt": "one", "completion": " "}, "the completion is empty, so there is nothing to train on"),
        ({"prompt": "one", "completion": [ANSWER]}, "must both be texts, or both be lists of messages."),
        ({"prompt": [USER], "completion": [USER]}, "no message of the completion is the assistant's"),
        ({"prompt": "one", "completion": "two", "system": "ten"}, "a system message, but its prompt is a text"),
        ({"text": 3}, "text holds a number, and must hold a text."),
        (
            {"prompt": "one", "chosen": "two", "rejected": "three"},
            "It is a pair of answers: liger-jax dpo trains on such rows",
        ),
        ({"text": "one", "chosen": "two", "rejected": "three"}, "--format text, or --column 'chosen'."),
    ],
    ids=str,
)
def test_rows_that_could_be_meant_otherwise_are_refused(row, message):
    with pytest.raises(UserError, match=f"^a.jsonl, line 1: .*{message}"):
        read(row)


@pytest.mark.parametrize(
    ["row", "field"],
    [
        ({"messages": [USER, ANSWER], "images": ["a.png"]}, "the row has 'images'"),
        ({"conversations": [HUMAN, GPT], "image": "a.png"}, "the row has 'image'"),
        ({"prompt": "one", "completion": "two", "audio": {"bytes": b"x"}}, "the row has 'audio'"),
        ({"text": "one", "image": {"bytes": b"x"}}, "the row has 'image'"),
        ({"messages": [USER | {"images": ["aGk="]}, ANSWER]}, "message 1, the user's, has 'images'"),
        ({"messages": [USER | {"content": [{"text": "one", "video": "a.mp4"}]}, ANSWER]}, "an item of text that has"),
    ],
    ids=str,
)
def test_rows_with_images_video_or_sound_are_refused(row, field):
    with pytest.raises(UserError, match=f"line 1: .*{field}.*, and only text can be trained on"):
        read(row)
    without = {"images": [], "image": None, "audio": {"bytes": None}}  # as tables fill what is not there
    assert read({"messages": [USER, ANSWER]} | without).messages == [USER, ANSWER]
    assert read({"text": "one", "image": "https://example.org/a.png"}).text == "one"  # beside a text, and no part of it
    with pytest.raises(UserError, match="line 1: the row has 'image'"):
        formats.prompt("line 1", {"prompt": "one", "image": "a.png"})


def test_a_token_for_images_is_refused_by_its_name(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "whole")
    vocabulary = Tokenizer(Source(folder), 320, []).vocabulary
    token = next(token for token in vocabulary if vocabulary[token] == 40)
    config = {"model_type": "gemma3", "image_token_index": 40, "text_config": {"model_type": "gemma3_text"}}
    (tmp_path / "whole" / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(Source(tmp_path / "whole"), 320, [])
    text = tokenizer.text([40])
    with pytest.raises(UserError, match=f"line 1: the token '{re.escape(token)}' is config.json's image_token_index"):
        tokenizer.pieces([read({"text": text})], length=10)
    with pytest.raises(UserError, match="image_token_index"):
        tokenizer.prompt(formats.prompt("line 1", {"prompt": text}))
    assert Tokenizer(Source(folder), 320, []).pieces([read({"text": text})], length=10)


def test_a_row_without_the_field_that_is_named_is_not_trained_on_by_its_text():
    with pytest.raises(UserError, match="no text in 'stroy', among .*'story', 'text'"):
        read({"story": "one", "text": "two"}, column="stroy")


@pytest.mark.parametrize(
    ["row", "hint", "cure"],
    [
        ({"story": "one two", "id": 3}, "Name the text's field: --column 'story'.", {"column": "story"}),
        ({"dialog": [HUMAN, GPT], "id": "a"}, "the field with the messages: --column 'dialog'.", {"column": "dialog"}),
        (
            {"question": "one", "answer": "two"},
            "name it: --column 'question'. If 'question' is asked",
            {"column": "question"},
        ),
        (
            {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]},
            "To train on one answer alone, name it: --column 'chosen'.",
            {"column": "chosen"},
        ),
    ],
    ids=str,
)
def test_the_hint_of_a_refusal_is_right_when_it_is_followed(row, hint, cure):
    with pytest.raises(UserError) as caught:
        read(row)
    assert hint in str(caught.value)
    assert not read(row, **cure).is_empty


@pytest.mark.parametrize(
    "reader, row, command",
    [
        (preferences.pair, {"messages": [USER, ANSWER]}, "liger-jax finetune trains on rows of messages."),
        (preferences.labelled, {"text": "one"}, "liger-jax finetune trains on rows of text."),
        (formats.prompt, {"instruction": "one", "output": "two"}, "finetune trains on rows of instruction and output."),
        (formats.prompt, {"chosen": "one", "rejected": "two"}, "liger-jax dpo trains on pairs of chosen and rejected."),
        (formats.prompt, {"messages": [USER, ANSWER]}, "liger-jax finetune trains on answers."),
    ],
)
def test_rows_of_another_command_are_refused_by_its_name(reader, row, command):
    with pytest.raises(UserError, match=f"{re.escape(command)}$"):
        reader("line 1", row)


def test_a_row_without_any_field_of_a_format_is_told_the_formats():
    with pytest.raises(UserError, match=r"formats: messages \(messages\); sharegpt \(conversations\); alpaca \(instr"):
        read({"id": 3})
    with pytest.raises(
        UserError, match=r"the row is not of --format alpaca, instruction and output: it has \['text'\]"
    ):
        read({"text": "one"}, form="alpaca")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return _tiny.checkpoint(tmp_path_factory.mktemp("source") / "model")


@pytest.mark.parametrize(
    ["prompt", "completion", "scored"],
    [
        ("one two", " three four", " three four<|endoftext|>"),
        ("one two ", "three", " three<|endoftext|>"),  # one token holds the space and the word
        ("one two\n", "three\n", "three\n<|endoftext|>"),
        ("on", "e two", "one two<|endoftext|>"),  # one token holds both: without it "e" would not be learnt
        ("", "one two", "one two<|endoftext|>"),
        ("日", "本 é", "本 é<|endoftext|>"),
    ],
)
def test_of_a_prompt_and_its_completion_the_completion_is_trained_on(folder, prompt, completion, scored):
    tokenizer, plain = Tokenizer(Source(folder), 320, []), Plain.from_file(str(folder / "tokenizer.json"))
    (piece,) = tokenizer.pieces([read({"prompt": prompt, "completion": completion})], length=64)
    decode = lambda tokens: plain.decode(tokens.tolist(), skip_special_tokens=False)
    assert decode(piece.tokens) == prompt + completion + "<|endoftext|>"
    assert decode(piece.labels[piece.labels >= 0]) == scored


def test_a_completion_longer_than_a_row_is_cut_off_and_told_of(folder, capsys):
    row = {"prompt": _tiny.text(4), "completion": " " + _tiny.text(20, 4)}
    (piece,) = Tokenizer(Source(folder), 320, []).pieces([read(row)], length=10)
    assert len(piece.tokens) == 10 and piece.total > 10 and (piece.labels >= 0).sum() == 6
    cut, joined = capsys.readouterr().out.splitlines()
    assert cut == "1 of 1 completions are longer than --length=10, and cut off"
    assert joined.startswith("prompts that are texts are joined to their answers as they stand, without the tokenizer")


def test_nothing_is_said_of_a_template_that_no_prompt_would_take(folder, tmp_path):
    tokenizer = Tokenizer(Source(folder), 320, [])
    documents = read({"text": "one"}), reading.Document("here", "one", prompt=""), read({"messages": [USER, ANSWER]})
    assert list(tokenizer.encoded(documents, 64)) and tokenizer.notes(64) == []
    without = shutil.copytree(folder, tmp_path / "without")
    (without / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer(Source(without), 320, [])
    assert list(tokenizer.encoded([read({"prompt": "one", "completion": " two"})], 64)) and tokenizer.notes(64) == []


def test_each_row_of_a_file_is_of_its_own_format(tmp_path):
    rows = [{"text": "one"}, {"conversations": [HUMAN, GPT]}, {"instruction": "one", "output": "two"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = reading.read(str(tmp_path / "a.jsonl"))
    assert [(each.text, each.messages) for each in found] == [("one", None), *[("", [USER, ANSWER])] * 2]
