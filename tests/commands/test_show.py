"""`liger-jax data`: the rows of a run with the tokens that the loss counts, and all lines that would be refused."""

import json
import re
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax.commands import _show, main
from liger_jax.data.reading import Document
from liger_jax.data.step_rows import StepRows
from liger_jax.data.tokenizer import Tokenizer
from liger_jax.models.hugging_face.source import Source
from liger_jax.training import rows as training_rows
from liger_jax.training import scored_tokens
from liger_jax.user_errors import UserError
from tests import _tiny


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint's folder, with conversations and texts beside it."""
    folder = _tiny.checkpoint(tmp_path_factory.mktemp("source") / "model")
    (folder.parent / "chats.jsonl").write_text(_tiny.chats(12))
    (folder.parent / "text.txt").write_text(_tiny.text(70))
    texts = [json.dumps({"text": _tiny.text(size, size)}) for size in (5, 200, 9, 70, 1, 40)]
    (folder.parent / "texts.jsonl").write_text("\n".join(texts))
    return folder


def shown(capsys, source, file, *options):
    """What the command prints, which must end well."""
    assert main(["data", f"--model={source}", str(source.parent / file), *options]) == 0
    return capsys.readouterr().out


def test_a_conversation_is_shown_with_its_answers_underlined(source, capsys):
    printed = shown(capsys, source, "chats.jsonl", "--rows=1", "--length=64", "--eval-share=0")
    row = printed[printed.index("row 1 of 12") :]
    assert row == (
        "row 1 of 12: 58 tokens, 12 of them scored\n"
        f"── {source.parent / 'chats.jsonl'}, line 1: user, assistant, user, assistant\n"
        "<|im_start|>user↵\none two<|im_end|>↵\n"
        "<|im_start|>assistant↵\nthree four five<|im_end|>↵\n~~~~~~~~~~~~~~~~~~~~~~~~~\n"
        "<|im_start|>user↵\nand?<|im_end|>↵\n"
        "<|im_start|>assistant↵\nthree four five<|im_end|>↵\n~~~~~~~~~~~~~~~~~~~~~~~~~\n"
    )
    assert "data: 12 documents in 12 pieces; 12 pieces with 693 tokens to train on; 0 pieces held out" in printed


def test_a_terminal_shows_scored_tokens_in_green_unless_colours_are_off(source, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    options = "chats.jsonl", "--rows=1", "--length=64", "--eval-share=0"
    assert "assistant↵\n\033[32mthree four five<|im_end|>\033[0m↵\n<|im_start|>user↵\n" in shown(
        capsys, source, *options
    )
    monkeypatch.setenv("NO_COLOR", "1")
    printed = shown(capsys, source, *options)
    assert "\033" not in printed and "\nthree four five<|im_end|>↵\n~~~~~" in printed


def scored_tokens_of(rows):
    return int(scored_tokens({name: jnp.asarray(x) for name, x in rows.items()}))  # the loss's own denominator


@pytest.mark.parametrize("options", [[], ["--pack"], ["--pack", "--eval-share=0.3", "--seed=7"]], ids=" ".join)
@pytest.mark.parametrize("file", ["chats.jsonl", "texts.jsonl"])
def test_what_is_shown_is_what_is_trained_on(source, capsys, monkeypatch, tmp_path, file, options):
    options = ["--length=130", *options]
    printed = shown(capsys, source, file, "--rows=1000", *options)
    trained = []

    def begun(in_steps, rows, *others):
        trained.append(rows)
        raise UserError("That is enough.")

    monkeypatch.setattr(StepRows, "__init__", begun)
    data = f"--data={source.parent / file}"
    assert main(["finetune", f"--model={source}", data, f"--out={tmp_path}", *options]) == 2
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("data:")][0] in printed
    (rows,), tokenizer = trained, Tokenizer(Source(source), 320, [])
    parts = printed.partition("held-out row")[0].split("\nrow ")[1:]
    assert len(parts) == training_rows.num_rows(rows)
    assert f"\nscored: {scored_tokens_of(rows)} of the tokens to train on\n" in printed
    for i, part in enumerate(parts):
        number = scored_tokens_of({name: x[i : i + 1] for name, x in rows.items()})
        assert f", {number} of them scored\n" in part
        lines = [line for line in part.splitlines()[1:] if not line.startswith("── ") and line.strip(" ~")]
        padding = int(part.rpartition("── ")[2].split()[0]) if "places of padding" in part else 0
        assert padding == (130 - rows.sizes[i] if "--pack" in options else 0)
        text = tokenizer.text(rows["input_ids"][i, : rows.sizes[i]].tolist())
        assert not rows["input_ids"][i, rows.sizes[i] :].any()  # no text here has the token 0
        assert "".join(lines).replace("↵", "\n").rstrip("\n") == text.rstrip("\n")


def test_cuts_are_shown(source, capsys):
    printed = shown(capsys, source, "chats.jsonl", "--rows=1", "--length=40", "--eval-share=0")
    assert "── cut here: 18 more tokens, which are dropped\n" in printed
    assert "12 of 12 conversations are longer than --length=40, and cut off" in printed
    printed = shown(capsys, source, "text.txt", "--length=32", "--eval-share=0")
    assert "text.txt, tokens 33 to 64 of 71\n" in printed and "── cut here: 7 more tokens in other pieces\n" in printed
    assert "row 3 of 3: 7 tokens, 6 of them scored\n" in printed


def test_what_a_run_must_be_told_is_said(source, capsys, tmp_path):
    (source.parent / "one.jsonl").write_text(_tiny.chats(1))
    printed = shown(capsys, source, "one.jsonl")
    assert re.search(r"length: rows of 512 tokens, the most that \S+ takes, and not of 2,048\n", printed)
    assert "nothing can be held out. finetune needs --eval-share 0.\n" in printed and "row 1 of 1" in printed
    assert main(["data", f"--model={source}", "none.txt", "--length=513"]) == 2
    assert "liger-jax data: --length=513 is more than the 512 positions of" in capsys.readouterr().err
    assert main(["data", f"--model={source}", "none.txt", "--rows=0"]) == 2
    assert capsys.readouterr().err == "liger-jax data: --rows=0 must be at least 1.\n"


def test_check_names_every_line_that_would_be_refused(source, capsys, tmp_path):
    file, good = tmp_path / "bad.jsonl", _tiny.chats(9)
    only_user = json.dumps({"messages": [{"role": "user", "content": "?"}]})
    file.write_text("\n".join(["[1]", good, only_user, '{"text":', json.dumps({"text": "one two"})]))
    assert main(["data", f"--model={source}", str(file), "--length=64", "--check"]) == 1
    printed, error = capsys.readouterr()
    assert not error and [line.split(",")[1] for line in printed.splitlines() if line.startswith(str(file))] == [
        " line 1", " line 11: no message is the assistant's", " line 12"
    ]  # fmt: skip
    assert "data: 10 documents in " in printed and printed.endswith("\n3 of 13 documents would be refused\n")
    assert main(["data", f"--model={source}", str(file), "--length=64"]) == 2  # as a run, which ends with the first
    assert capsys.readouterr().err.startswith(f"liger-jax data: {file}, line 1, holds a list")
    file.write_text(good)
    assert main(["data", f"--model={source}", str(file), "--length=64", "--check"]) == 0
    assert capsys.readouterr().out.endswith("\n0 of 9 documents would be refused\n")
    (other := tmp_path / "other.jsonl").write_text(good)
    assert main(["data", f"--model={source}", str(file), "--length=64", "--check", f"--data={other}"]) == 0
    assert capsys.readouterr().out.endswith("\n0 of 18 documents would be refused\n")


def test_a_pair_is_shown_with_both_answers_underlined(source, capsys):
    rows = [
        {"prompt": [{"role": "user", "content": "one two"}], "chosen": "three", "rejected": "six seven"},
        {"prompt": "one two", "chosen": " three", "rejected": " six seven"},
    ]
    (source.parent / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    printed = shown(capsys, source, "pairs.jsonl", "--loss=sigmoid", "--length=80", "--eval-share=0")
    begin = "<|im_start|>user↵\none two<|im_end|>↵\n<|im_start|>assistant↵\n"
    where = f"── {source.parent / 'pairs.jsonl'}, line"
    assert (
        f"{where} 1, chosen: user, assistant\n{begin}three<|im_end|>↵\n~~~~~~~~~~~~~~~\n{where} 1, rejected: "
        in printed
    )
    assert f"rejected: user, assistant\n{begin}six seven<|im_end|>↵\n~~~~~~~~~~~~~~~~~~~\n" in printed
    text = (
        f"{where} 2, chosen\none two three<|endoftext|>\n       ~~~~~~~~~~~~~~~~~~~\n{where} 2, rejected\none two six"
    )
    assert text in printed and "data: 2 documents in 2 pairs; " in printed and "cut here" not in printed
    assert main(["data", f"--model={source}", "x", "--loss=ipo", "--column=chosen"]) == 2
    assert "--column does not go with --loss" in capsys.readouterr().err


def test_data_says_where_another_chat_template_goes(source, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["data", f"--model={source}", "x", "--chat-template=chatml.jinja"])
    assert "put another one into chat_template.jinja in the model's folder" in capsys.readouterr().err


def test_single_answers_are_shown_with_their_labels(source, capsys):
    (source.parent / "answers.jsonl").write_text(_tiny.answers(3))
    options = ["answers.jsonl", "--length=80", "--eval-share=0", "--rows=9"]
    printed = shown(capsys, source, *options, "--loss=kto")
    assert re.findall(r"line 1, ([^:]*)", printed) == ["bad", "with the answer to another prompt, for the baseline"]
    assert "data: 3 documents in 3 answers; 3 answers with" in printed and "cut here" not in printed
    printed = shown(capsys, source, *options, "--loss=apo_zero_unpaired")
    assert re.findall(r"line \d, ([^:]*)", printed) == ["bad", "good", "good"]


def test_check_names_every_pair_that_would_be_refused(source, capsys, tmp_path):
    file, good = tmp_path / "bad.jsonl", _tiny.pairs(3)
    only_user = json.dumps({"chosen": [{"role": "user", "content": "?"}], "rejected": "one"})
    file.write_text("\n".join([json.dumps({"chosen": "one"}), good, only_user, json.dumps({"text": "one"})]))
    command = ["data", f"--model={source}", str(file), "--length=64", "--check"]
    assert main([*command, "--loss=sigmoid"]) == 1
    lines = capsys.readouterr().out.splitlines()
    refused = [line.removeprefix(f"{file}, ").split(":")[0] for line in lines if line.startswith(str(file))]
    assert refused == ["line 1", "line 5", "line 6"] and lines[-1] == "3 of 6 documents would be refused"
    file.write_text("{}\n" + _tiny.answers(1))  # nothing but one answer is left for the baseline
    assert main([*command, "--loss=kto"]) == 1
    assert capsys.readouterr().out.endswith("\n2 of 2 documents would be refused\n")


def test_several_files_and_weights_are_shown_with_what_is_scored_of_other_data(source, capsys):
    (source.parent / "more.jsonl").write_text("\n".join(_tiny.chats(20).split("\n")[12:]))
    others = f"{source.parent / 'texts.jsonl'}=2", "--eval-data", str(source.parent / "more.jsonl"), "--rows=30"
    printed = shown(capsys, source, "chats.jsonl", *others, "--length=64")
    assert "data: 18 documents in " in printed and "; 8 pieces scored\n" in printed
    assert re.search(
        r"an epoch has 32 rows: 12 of .*chats.jsonl, which has 12; 20 of .*texts.jsonl=2, which has 10\n", printed
    )
    assert "\nheld-out row 8 of 8: " in printed and f"── {source.parent / 'more.jsonl'}, line 8: user" in printed


def test_messages_are_bounded(source, capsys, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({f"field {i}" * 100: i for i in range(1000)}))
    assert main(["data", f"--model={source}", str(tmp_path / "a.jsonl"), "--length=64"]) == 2
    assert len(capsys.readouterr().err) < 3000
    assert main(["data", f"--model={source}", str(tmp_path / "a.jsonl"), "--length=64", "--check"]) == 1
    assert len(capsys.readouterr().out) < 3000


def test_check_names_documents_that_the_tokenizer_refuses_and_goes_on(tmp_path, capsys):
    small = _tiny.checkpoint(tmp_path / "model", vocab_size=280)
    for name, content in (("1.txt", b"abc"), ("2.txt", _tiny.text(9).encode()), ("3.txt", b"\xff"), ("10.txt", b" ")):
        (tmp_path / name).write_bytes(content)
    assert main(["data", f"--model={small}", str(tmp_path / "*.txt"), "--check"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(str(tmp_path))]
    assert [line.removeprefix(f"{tmp_path}/").split()[0] for line in lines] == ["1.txt:", "2.txt:", "3.txt", "10.txt"]


def test_a_document_of_which_nothing_is_trained_on_is_named(source, capsys, tmp_path):
    question = {"role": "user", "content": _tiny.text(60)}
    long = json.dumps({"messages": [question, {"role": "assistant", "content": "one"}]})
    (source.parent / "long.jsonl").write_text(_tiny.chats(3) + "\n" + long)
    printed = shown(capsys, source, "long.jsonl", "--length=60")
    why = "a prompt that leaves no room for its answer in --length=60"
    assert f"1 document has {why}, and no row: {source.parent / 'long.jsonl'}, line 4\n" in printed


def test_answers_behind_the_cut_are_named_with_the_length(source, capsys):
    assert main(["data", f"--model={source}", str(source.parent / "chats.jsonl"), "--length=8"]) == 2
    assert re.search(
        r"Nothing is left to train on: 12 documents have a prompt that leaves no room for its answer in --length=8, "
        r"and no row: \S+, line 1, \S+, line 2, \S+, line 3, …\. Pass a larger --length, or leave it out\.\n$",
        capsys.readouterr().err,
    )


def test_answers_that_their_weights_leave_out_are_named_with_the_weights(source, capsys):
    rows = [[{"role": "user", "content": "one"}, {"role": "assistant", "content": "two", "weight": 0}]] * 2
    (source.parent / "none.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    assert main(["data", f"--model={source}", str(source.parent / "none.jsonl"), "--length=64"]) == 2
    assert re.search(
        r"Nothing is left to train on: 2 documents have only answers that 'weight' leaves out, and no row: ",
        capsys.readouterr().err,
    )


@pytest.mark.parametrize("options", [["--check"], ["--rows=1"], ["--loss=sigmoid", "--check"]], ids=" ".join)
def test_roles_that_no_template_knows_are_told_with_their_rows(source, capsys, options):
    asked = [{"role": "human", "content": "one"}]
    answer = lambda text: [{"role": "assistant", "content": text}]
    known = {"messages": [{"role": "system", "content": "one"}, {"role": "user", "content": "two"}, *answer("three")]}
    rows = [known, {"messages": asked + answer("two")}, {"messages": asked + asked + answer("two")}, known]
    if "--loss=sigmoid" in options:
        rows = [{"prompt": each["messages"][:-1], "chosen": answer("two"), "rejected": answer("six")} for each in rows]
    (source.parent / "roles.jsonl").write_text("\n".join(map(json.dumps, rows)))
    printed = shown(capsys, source, "roles.jsonl", *options)
    told = [line for line in printed.splitlines() if line.startswith("role ")]
    assert told == [
        f"role 'human' in 2 rows (first: {source.parent / 'roles.jsonl'}, line 2) is printed as it is: chat templates "
        "know system, user, assistant and tool; did you mean user?"
    ]


def test_stretches_add_up_to_the_text_where_a_character_has_several_tokens(source):
    tokenizer = Tokenizer(Source(source), 320, [])
    (piece,) = tokenizer.pieces([Document("", "aé日b")], length=32)
    tokens = piece.tokens[:-1]  # without the end of the text
    assert len(tokens) == 7
    for scored in ([0, 0, 1, 1, 1, 0, 1], [0, 1, 1, 1, 1, 1, 0], [1] * 7, [0] * 7, [0, 0, 0, 0, 1, 0, 0]):
        found = _show.stretches(tokenizer, tokens, np.array(scored, bool))
        assert "".join(text for text, _ in found) == "aé日b", scored
    found = _show.stretches(tokenizer, tokens, np.array([0, 1, 1, 0, 0, 0, 1], bool))
    assert found == [("a", False), ("é", True), ("日", False), ("b", True)]


def test_control_characters_are_shown_and_not_obeyed():
    found = [("a\033[31m", False), ("日\tb\r\n", True), ("c", False)]
    assert _show.underlined(found) == "a␛[31m日\tb␍↵\n      ~~\t~~~\nc"
    assert _show.coloured(found) == "a␛[31m\033[32m日\tb␍↵\033[0m\nc"
