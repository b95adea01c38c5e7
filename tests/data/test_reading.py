"""The data of `liger-jax finetune`: which tokens are trained on, and one sentence for whatever cannot be used."""

import csv
import glob
import gzip
import json
import pathlib
import re
import sys
import types

import numpy as np
import pytest
from tokenizers import Tokenizer as Plain

from liger_jax import data, trainers
from liger_jax.chat.template import ChatTemplate
from liger_jax.commands import main
from liger_jax.data import reading, training_rows
from liger_jax.data.files import found as found_files
from liger_jax.data.options import RowOptions
from liger_jax.data.reading import Document
from liger_jax.data.tokenizer import Tokenizer
from liger_jax.models.hugging_face.source import Source
from liger_jax.planner import devices
from liger_jax.planner.architectures import architecture_of
from liger_jax.planner.estimate import estimate
from liger_jax.trainers import memory
from liger_jax.trainers.finetune_options import FinetuneOptions
from liger_jax.trainers.options import Settings
from liger_jax.user_errors import UserError
from tests import _tiny

QUESTION = {"role": "user", "content": "one two"}
ANSWER = {"role": "assistant", "content": "three four"}
CHAT = [{"role": "system", "content": "ten"}, QUESTION, ANSWER, {"role": "user", "content": "and?"}, ANSWER]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return _tiny.checkpoint(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture(scope="module")
def plain(source):
    return Plain.from_file(str(source / "tokenizer.json"))


def failure(capsys, source, *arguments):
    """The one line that a run ends with, which must have the exit code 2."""
    assert main(["finetune", f"--model={source}", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("liger-jax finetune: ") and error.count("\n") == 1
    return error


def answers(plain, piece):
    """The text of the tokens that are trained on."""
    return plain.decode([token for token in piece.labels.tolist() if token >= 0], skip_special_tokens=False)


# --- what cannot be used ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ["name", "content", "message"],
    [
        ("a.txt", b"", "a.txt is empty."),
        ("a.txt", b"  \n", "a.txt is empty."),
        ("a.png", b"\x89PNG\r\n\x1a\n", "a.png is no text file: byte 0x89 at 0 is no UTF-8"),
        (
            "a.txt",
            "one, né".encode("latin-1"),
            "a.txt is not in UTF-8: byte 0xe9 at 6. If it is text in Latin-1, convert it by: iconv -f ISO-8859-1",
        ),
        (
            "a.txt",
            "one".encode("utf-16"),
            "a.txt is in UTF-16, and must be in UTF-8: convert it by: iconv -f UTF-16 -t UTF-8",
        ),
        ("a.txt", b"one\0two", "a.txt is no text file: character 3 is a null"),
        ("a.jsonl", b'{"text": "one"}\n{"text": ', "a.jsonl, line 2, is no JSON: Expecting value: column 10"),
        ("a.jsonl", b'{"text": "one", "text": "two"}', "line 1, cannot be read: the name 'text' occurs twice"),
        ("a.json", b'[{"messages": [{"role": "user", "role": "tool"}]}]', "the name 'role' occurs twice in one object"),
        ("a.csv", b'messages\n"[{""role"":""user"",""role"":""tool""}]"', "line 2: a cell with JSON cannot be read"),
        ("a.jsonl", b'{"text": "one"}\n\n[1]', "a.jsonl, line 3, holds a list, and must hold an object"),
        (
            "a.jsonl",
            b'{"story": "one"}',
            "a.jsonl, line 1: there are no messages, and no text in 'text', among",
        ),
        ("a.jsonl", b'{"promt": "one", "completion": "two"}', " Did you mean 'prompt' by 'promt'? Rename it."),
        (
            "a.csv",
            b"question,answer\na,b",
            "is asked and 'answer' is answered, rename them to instruction",
        ),
        ("a.jsonl", b'{"text": "\\ud800"}', "a.jsonl, line 1: '\\ud800' is not a valid character."),
        ("a.jsonl", b'{"messages": "hello"}', "a.jsonl, line 1: messages must be a list of objects"),
        ("a.jsonl", b'{"messages": [{"role": "user", "content": "?"}]}', "line 1: no message is the assistant's"),
        (
            "a.jsonl",
            b'{"messages": [{"role": "assistant", "contents": "?"}]}',
            "line 1: message 1, the assistant's, has",
        ),
        ("a.jsonl", b'{"text": ""}', "has no text."),
        ("a.txt", b"!", "The data has only one piece, so nothing can be held out."),
    ],
    ids=str,
)
def test_bad_data_is_one_sentence_that_says_where(source, tmp_path, capsys, name, content, message):
    (tmp_path / name).write_bytes(content)
    arguments = [f"--data={tmp_path / name}", f"--out={tmp_path / 'out'}", "--length=32"]
    assert message in failure(capsys, source, *arguments)


@pytest.mark.parametrize(
    ["arguments", "message"],
    [
        (["--batch=3", "--micro-batches=2"], "--micro-batches=2 must divide --batch=3."),
        (["--steps=2", "--epochs=1"], "--steps=2 and --epochs=1.0 both say how long the run is. Pass one of them."),
        (["--length=1"], "--length=1 must be at least 2."),
        (["--length=513"], "--length=513 is more than the 512 positions of"),
        (["--quantize=nf4"], "--quantize is for adapters: pass --lora, such as --lora 16, as well."),
        (["--merge"], "--merge is for adapters"),
        (["--log=csv,mlflow"], "--log=csv,mlflow: 'mlflow' must be one of csv, tensorboard, wandb."),
        (["--eval-share=1"], "--eval-share=1.0 must be in [0, 1); 0 holds nothing out."),
        (["--learning-rate=nan"], "--learning-rate=nan must be a finite number above 0."),
        (["--model=./nowhere"], "no such folder: './nowhere'"),
        (["--data=nothing*.txt"], "No file matches 'nothing*.txt'."),
        (["--out=text.txt/run"], "Nothing can be written to text.txt/run: Not a directory. Pass another --out."),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_options_are_one_sentence(source, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("one two three")
    length = [] if any("length" in argument for argument in arguments) else ["--length=32"]
    assert message in failure(capsys, source, "--data=text.txt", *length, *arguments)


def test_a_token_outside_the_models_vocabulary_is_named(tmp_path, capsys):
    small = _tiny.checkpoint(tmp_path / "model", vocab_size=280)
    (tmp_path / "a.txt").write_text(_tiny.text(20))
    error = failure(capsys, small, f"--data={tmp_path / 'a.txt'}", "--length=32", f"--out={tmp_path / 'out'}")
    assert "a.txt: the token '" in error and "and the model's vocabulary has 280 entries." in error


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_tokenizer_is_named(tmp_path, capsys, file):
    folder = _tiny.checkpoint(tmp_path / "model")
    (folder / file).write_text("{")
    (tmp_path / "a.txt").write_text("one")
    error = failure(capsys, folder, f"--data={tmp_path / 'a.txt'}", "--length=32", f"--out={tmp_path / 'out'}")
    assert f"{file} cannot be read" in error


@pytest.mark.parametrize("package", ["tokenizers", "orbax.checkpoint", "tqdm"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(package, source, monkeypatch, capsys):
    for room, name in ((trainers, "run"), (trainers, "training_inputs"), (data, "training_rows"), (data, "tokenizer")):
        monkeypatch.delitem(sys.modules, f"{room.__name__}.{name}", raising=False)
        monkeypatch.delattr(room, name, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    error = failure(capsys, source, "--data=d")
    assert re.match(rf"liger-jax finetune: The package '{package.partition('.')[0]}' is missing: pip install", error)
    assert "[finetune]" in error


ROWS = '{"text": "one"}\n{"text": "two"}'


@pytest.mark.parametrize(
    ["name", "content", "where"],
    [
        ("a.csv", b'text,label\n"one","a\nb"\n\ntwo,1\n', ["line 2", "line 5"]),
        ("A.TSV", b"label\ttext\n0\tone\n1\ttwo", ["line 2", "line 3"]),
        ("a.JSONL", ROWS.encode(), ["line 1", "line 2"]),
        ("a.json", b'[\n{"text": "one"},\n{"text": "two"}\n]', ["element 1", "element 2"]),
        ("a.jsonl.gz", gzip.compress(ROWS.encode(), mtime=0), ["line 1", "line 2"]),
    ],
    ids=["csv", "TSV", "JSONL", "json", "jsonl.gz"],
)
def test_rows_of_tables_and_json_are_documents_whatever_the_case_of_the_name(tmp_path, name, content, where):
    (tmp_path / name).write_bytes(content)
    found = reading.read(str(tmp_path / name))
    assert [(document.text, document.where) for document in found] == [
        (text, f"{tmp_path / name}, {place}") for text, place in zip(("one", "two"), where, strict=True)
    ]


def test_a_cell_of_a_table_holds_any_text(tmp_path):
    text = 'a "b", c\n' + "long " * 100_000
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text"], [text]])
    assert [document.text for document in reading.read(str(tmp_path / "a.csv"))] == [text]


@pytest.mark.parametrize(
    ["name", "content", "message"],
    [
        ("a.csv", "text;label\none, two;0", "line 1: ';' separates the columns, and must be ','. .* sep=';'"),
        (
            "a.csv",
            "text\tlabel\none\t0",
            "line 1: '.t' separates the columns, .* Give the file a name that ends in .tsv.",
        ),
        ("a.csv", 'text,label\n"one\ntwo",0,0', "line 2: the row has 3 fields"),
        ("a.csv", 'text\n\n"one\ntwo', "line 3: unexpected end of data"),
        ("a.csv", "text,label\none, two,0", "line 2: the row has 3 fields, and the first one names 2 columns. Put"),
        ("a.csv", 'text\n"one', "line 2: unexpected end of data, so the table cannot be read"),
        ("a.csv", "text,text\none,two", "line 1: two columns have one name"),
        ("a.json", "[1]", "element 1, holds a number, and must hold an object"),
        (
            "a.json",
            '{\n"text": ',
            "line 2, is no JSON: .* The file must be an array of objects, or each",
        ),
        ("a.txt", ROWS, "holds JSON, which would be trained on as plain text. .* a name that ends in .jsonl"),
        ("a", '[\n{"text": "one"}]', "holds JSON, which would be trained on as plain text"),
        ("a.gz", "one", "a.gz cannot be read: Not a gzipped file"),
        ("a.feather", "one", "is a .feather file, which is not read as it is. Write its table as Parquet: "),
        ("a.parquet.gz", "one", "is compressed as a whole, and cannot be read in chunks. Unpack it first."),
        ("a.tar.gz", "one", "is a .tar file, which is not read as it is. Unpack it first"),
        ("a.ipynb", "{}", "is a .ipynb file, which is not read as it is. Write its text to a .txt file"),
    ],
    ids=str,
)
def test_what_is_no_prose_is_never_read_as_prose(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        reading.read(str(tmp_path / name))


@pytest.mark.parametrize("name", ["chats[1].jsonl", "chats.JSONL", "what?.jsonl"])
def test_a_name_that_looks_like_a_glob_is_a_name_first(tmp_path, name):
    (tmp_path / name).write_text(json.dumps({"messages": CHAT}))
    (document,) = reading.read(str(tmp_path / name))
    assert document.messages == CHAT


def test_a_double_star_finds_what_glob_finds_and_follows_no_linked_folder(tmp_path, monkeypatch):
    for name in ("a.txt", "x/b.txt", "x/y/c.txt", "x/y/[d].txt", ".hidden/e.txt", "x/.f.txt", "z[1]/y/g.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    patterns = (
        "**/*.txt",
        "x/**/*.txt",
        "x/**",
        "**",
        "**/y/*.txt",
        "**/y/**/*.txt",
        "*/**/g.txt",
        f"{tmp_path}/**/c*",
    )
    paths = lambda names: {path for path in map(pathlib.Path, names) if path.is_file()}
    for pattern in patterns:
        expected = paths(glob.glob(pattern, recursive=True))
        assert expected and paths(found_files(pattern)) == expected, pattern
    for i in range(3):  # Python's glob finds each file some 3**40 times
        (tmp_path / f"x/circle{i}").symlink_to("..")
        (tmp_path / f"x/y/circle{i}").symlink_to(tmp_path)
    assert len([path for path in found_files("**/*.txt") if path.is_file()]) == 5


HUGE = b'{"text": "ok", "n": ' + b"9" * 5_000 + b"}"
DEEP = b'{"text": "ok", "n": ' + b"[" * 150 + b"]" * 150 + b"}"
DEEPER = b'{"text": "ok", "n": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize(
    ["name", "content", "message"],
    [
        ("a.jsonl", b'{"text": "ok"}\n' + HUGE, "a.jsonl, line 2, cannot be read: Exceeds the limit"),
        ("a.json", b"[\n" + HUGE + b"]", "a.json, line 1, cannot be read: Exceeds the limit"),
        ("a.txt", HUGE, "a.txt holds JSON, which would be trained on as plain text"),
        ("a.jsonl", DEEP, "a.jsonl, line 1: lists and objects are nested to more than 100 levels"),
        ("a.jsonl", DEEPER, "a.jsonl, line 1, is nested too deep"),
        ("a.json", b"[\n" + DEEPER + b"]", "a.json, line 1, is nested too deep"),
        ("a.txt", DEEPER, "a.txt holds JSON, which would be trained on as plain text"),
    ],
)
def test_numbers_and_nestings_beyond_python_s_are_one_sentence(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        reading.read(str(tmp_path / name))
    assert len(str(caught.value)) < 1_000


def test_files_of_several_kinds_are_told_apart(tmp_path, capsys):
    for name, content in {"README.md": "# one", "a.txt": "[1] two", "b.jsonl": ROWS, "c.csv": "text\none"}.items():
        (tmp_path / name).write_text(content)
    assert len(reading.read(str(tmp_path / "*"))) == 5
    assert "data: read as prose README.md, a.txt; as JSON b.jsonl; as a table c.csv\n" == capsys.readouterr().out


# --- what does not fit ------------------------------------------------------------------------------------------------


def _device(gib):
    size = int(gib * 2**30)
    return devices.Target("gpu", "gpu", "A card", 1, size, "", size, size)


@pytest.mark.parametrize(
    ["gib", "message"],
    [
        (1.0, "It fits with --micro-batches "),
        (0.3, " --lora 16"),
        (0.001, "No change makes it fit: even --remat offload --micro"),
    ],
)
def test_a_run_that_cannot_fit_is_refused_with_what_makes_it_fit(source, tmp_path, monkeypatch, capsys, gib, message):
    monkeypatch.setattr(devices, "here", lambda: _device(gib))
    folder = tmp_path / "model"
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    large = dict(
        layer_types=None, hidden_size=512, intermediate_size=2048, num_hidden_layers=8, max_position_embeddings=4096
    )
    (folder / "config.json").write_text(json.dumps(config | large))
    (folder / "model.safetensors").touch()  # nothing comes as far as to read it
    arguments = ["--data=a.txt", "--length=4096", "--batch=8", "--dtype=float32", f"--out={tmp_path / 'out'}"]
    arguments += ["--micro-batches=1", "--remat=full", "--pack"]  # else the run would choose by itself
    error = failure(capsys, folder, *arguments)
    assert "by the planner's estimate, and A card has" in error and message in error
    if "It fits with" in error:
        changed = error.partition("It fits with ")[2].partition(":")[0].split()
        later = failure(capsys, folder, *arguments, *changed)
        assert "The run needs" not in later and "a.txt" in later  # it goes on to the data, which is not there


@pytest.mark.parametrize("share, is_near", [(1.05, True), (1.2, False)])
def test_a_refusal_by_a_little_says_how_to_begin_nevertheless(source, tmp_path, monkeypatch, capsys, share, is_near):
    arguments = [
        "--data=a.txt",
        "--length=512",
        "--micro-batches=1",
        "--remat=full",
        "--pack",
        f"--out={tmp_path / 'out'}",
    ]
    monkeypatch.setattr(devices, "here", lambda: _device(1e-6))
    needed = []
    monkeypatch.setattr(memory, "estimate", lambda run: needed.append(estimate(run)) or needed[-1])
    failure(capsys, source, *arguments)
    monkeypatch.setattr(devices, "here", lambda: _device(needed[0].total / share / 2**30))
    told = failure(capsys, source, *arguments)
    assert "The run needs" in told and ("--risk-memory starts the run nevertheless." in told) == is_near
    told = failure(capsys, source, *arguments, "--risk-memory")
    assert "The run needs" not in told and "a.txt" in told  # it goes on to the data, which is not there


def test_a_run_that_risks_it_takes_what_needs_least_of_what_is_left_to_it(source, monkeypatch, capsys):
    monkeypatch.setattr(devices, "here", lambda: _device(1e-6))
    settings = Settings.of(FinetuneOptions, model=str(source), data="a.txt", length=512, batch=4, risk_memory=True)
    model, mesh = architecture_of(Source(source)), {"data": 1, "fsdp": 1}
    chosen = memory.fitted(settings, model, "float32", "float32", "float32", mesh)
    assert chosen.recipe.micro_batches == 4  # a run that is refused has one
    assert "the run starts nevertheless, by --risk-memory\n" in capsys.readouterr().out


# --- text -------------------------------------------------------------------------------------------------------------


def test_a_text_ends_with_the_end_of_text_and_its_parts_fill_rows(source, plain):
    eos = plain.token_to_id("<|endoftext|>")
    pieces = Tokenizer(Source(source), 320, [eos]).pieces([Document("", _tiny.text(30)), Document("", "one")], length=8)
    ids = plain.encode(_tiny.text(30)).ids + [eos]
    assert np.concatenate([piece.tokens for piece in pieces[:-1]]).tolist() == ids[: 8 * (len(pieces) - 1)]
    assert pieces[-1].tokens.tolist() == [*plain.encode("one").ids, eos]
    assert all(piece.labels is piece.tokens for piece in pieces)


def test_rows_hold_documents_each_by_itself(source, tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": _tiny.text(3 + i)}) for i in range(9)))
    options = RowOptions(str(tmp_path / "a.jsonl"), length=32, eval_share=0.2)
    data = training_rows.prepared(options, 8, 0, Tokenizer(Source(source), 320, []), tmp_path / "tokens")
    assert data.held_out_rows and (data.rows.num_rows, data.held_out_rows.num_rows) == (7, 2)
    scored = data.rows["labels"][:] >= 0
    assert scored.sum(1).tolist() == data.rows.tokens.sizes()[data.rows.pieces].tolist()


def test_a_configuration_is_for_datasets_of_the_hub(tmp_path):
    (tmp_path / "a.txt").write_text("one two")
    files = RowOptions(str(tmp_path / "a.txt"), subset="small")
    with pytest.raises(UserError, match="--subset=small is a dataset's configuration, and the data are files"):
        training_rows.sources_of(files)
    mixed = RowOptions(("org/words", str(tmp_path / "a.txt")), subset="small")
    assert [bool(each.paths) for each in training_rows.sources_of(mixed)["--data"]] == [False, True]


def test_a_dataset_of_the_hub_is_read_by_its_column(monkeypatch):
    def load_dataset(name, subset, split):
        assert (name, subset, split) == ("org/words", "small", "train")
        return [{"story": "one two"}, {"story": ""}, {"messages": CHAT}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    found = reading.read("org/words", "story", "small")
    assert [(document.text, document.messages) for document in found] == [("one two", None), ("", CHAT)]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"The package 'datasets' is missing: pip install .*\[finetune\]"):
        reading.read("org/words", "story", None)


def test_a_named_field_that_no_row_has_is_refused(tmp_path, source):
    stories, chats = tmp_path / "stories.jsonl", tmp_path / "chats.jsonl"
    stories.write_text('{"story": "one two"}\n')
    chats.write_text(json.dumps({"messages": CHAT}) + "\n")
    tokenizer = Tokenizer(Source(source), 320, [])

    def prepared(names, column):
        options = RowOptions(tuple(map(str, names)), column=column, length=64, eval_share=0.0)
        return training_rows.prepared(options, 1, 0, tokenizer, tmp_path / "tokens")

    for _ in range(2):  # the tokens of a refused start are not found by the next one
        with pytest.raises(UserError, match="--column=stroy is a field of no row, and a row without it is read by"):
            prepared([chats], "stroy")
    with pytest.raises(UserError, match="--column=stroy is a field of no row"):
        reading.read(str(chats), "stroy")
    with pytest.raises(ValueError, match="column=stroy is a field of no row"):
        data.read([{"messages": CHAT}], column="stroy")
    assert len(reading.read([str(stories), str(chats)], "story")) == 2
    for order in ([stories, chats], [chats, stories]):
        assert len(prepared(order, "story").rows.tokens) == 2


# --- conversations ----------------------------------------------------------------------------------------------------


def test_only_the_assistants_tokens_and_the_mark_that_ends_them_are_trained_on(source, plain):
    tokenizer = Tokenizer(Source(source), 320, [])
    (piece,) = tokenizer.pieces([Document("", messages=CHAT)], length=512)
    assert answers(plain, piece) == "three four<|im_end|>three four<|im_end|>"
    text = ChatTemplate(_tiny.CHAT_TEMPLATE, {}).render(CHAT)[0]
    assert plain.decode(piece.tokens.tolist(), skip_special_tokens=False) == text
    assert plain.token_to_id("<|im_end|>") in tokenizer.stops


def test_a_conversation_longer_than_a_row_is_cut_off_and_told_of(source, plain, capsys):
    (piece,) = Tokenizer(Source(source), 320, []).pieces([Document("", messages=CHAT)], length=60)
    assert len(piece.tokens) == 60 and answers(plain, piece).startswith("three")
    assert "1 of 1 conversations are longer than --length=60, and cut off" in capsys.readouterr().out


TURNS = "{% for m in messages %}[{{ m.role }}] {{ m.content }}<e>\n{% endfor %}"
THOUGHTS = """{% for m in messages %}[{{ m.role }}] {% if m.role == 'assistant' and loop.last -%}
<think></think>{% endif -%}
{{ m.content }}<e>
{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"""
PROMPT_THINKS = TURNS + "{% if add_generation_prompt %}[assistant] <think>{% endif %}"
MARKED = """{% for m in messages %}[{{ m.role }}] {% if m.role == 'assistant' -%}
{% generation %}{{ m.content }}{% endgeneration %}<e>
{% else %}{{ m.content }}<e>
{% endif %}{% endfor %}"""


@pytest.mark.parametrize(
    ["template", "spoken"],
    [
        (TURNS + "{% if add_generation_prompt %}[assistant] {% endif %}", ["three four<e>"] * 2),
        (PROMPT_THINKS, ["three four<e>"] * 2),
        (THOUGHTS, ["three four<e>", "<think></think>three four<e>"]),
        (MARKED, ["three four"] * 2),
    ],
    ids=["plain", "a prompt that goes on", "thoughts in the last answer only", "marked in the template"],
)
def test_answers_are_found_by_the_template(template, spoken):
    text, spans, *_ = ChatTemplate(template, {}).render(CHAT)
    assert [text[begin:end] for begin, end in spans] == spoken
    assert text.count("[assistant] ") == 2 and "\ufdd0" not in text


@pytest.mark.parametrize(
    ["template", "message"],
    [
        ("{{ raise_exception('no system role') }}", "The chat template refuses the messages: no system role."),
        ("{{ ''.__class__.__mro__ }}", "The chat template refuses the messages: access to attribute '__class__'"),
        ("{{ messages.clear() }}", "The chat template refuses the messages: access to attribute 'clear'"),
        ("{% for %}", "The tokenizer's chat template cannot be read"),
        (
            "{{ messages | length }} {{ messages[-1].content }}",
            "The chat template does not print 'three four' of message 3",
        ),
    ],
    ids=["its own error", "Python's inside", "changes its input", "no Jinja", "prints the last message only"],
)
def test_a_template_that_fails_or_reaches_out_is_one_sentence(template, message):
    with pytest.raises(UserError, match=message):
        ChatTemplate(template, {}).render(CHAT)
