"""What `--data` names: files, folders, splits and weights, and files that are read in chunks."""

import csv
import json
import random
import sys
from pathlib import Path

import pytest

from liger_jax.data import file_rows, reading, sources
from liger_jax.data.options import RowOptions
from liger_jax.data.training_rows import sources_of
from liger_jax.training import rows
from liger_jax.user_errors import UserError

LINE = '{"text": "one"}'


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(**contents):
    """Files by name, with "/" for "__" and "." for the last "_"."""
    for name, content in contents.items():
        path = _path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def _path(name):
    stem, _, end = name.replace("__", "/").rpartition("_")
    return Path(f"{stem}.{end}")


def names(part):
    return [path.as_posix() for path in part.paths]


def test_several_files_globs_and_weights_are_parts_in_their_order():
    write(b_jsonl=LINE, a_jsonl=LINE, c_txt="one")
    found = sources.data_sources(["b.jsonl=2", "a.*=.5", "c.txt", "org/set=3"])
    assert [(names(part), part.weight) for part in found] == [
        (["b.jsonl"], 2.0), (["a.jsonl"], 0.5), (["c.txt"], 1.0), ([], 3.0)
    ]  # fmt: skip
    assert [sources.weight(text) for text in ("b.jsonl=2", "a.*=.5", "c.txt")] == [2.0, 0.5, 1.0]


def test_a_name_with_an_equals_sign_is_a_name_first():
    write(**{"a=2_jsonl": LINE})
    (part,) = sources.data_sources(["a=2.jsonl"])
    assert names(part) == ["a=2.jsonl"] and part.weight == 1
    write(x_jsonl=LINE)
    Path("x.jsonl=2").write_text(LINE)
    with pytest.raises(UserError, match=r"both x.jsonl and x.jsonl=2 exist. Write x.jsonl=2.0 or x.jsonl=2=1."):
        sources.data_sources(["x.jsonl=2"])
    assert [(names(p), p.weight) for p in sources.data_sources(["x.jsonl=2.0", "x.jsonl=2=1"])] == [
        (["x.jsonl"], 2.0), (["x.jsonl=2"], 1.0)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ["data", "message"],
    [
        (["a.jsonl=0"], "--data=a.jsonl=0: what comes after a.jsonl= must be a number above 0, such as a.jsonl=2."),
        (["a.jsonl=-1"], "must be a number above 0"),
        (["a.jsonl=inf"], "must be a number above 0"),
        (["a.jsonl=two"], "must be a number above 0"),
        (["b.jsonl=2"], "No file matches 'b.jsonl=2'. Pass --data a file, a folder or a quoted glob."),
        (["a.jsonl", "*.jsonl"], "--data names .*a.jsonl more than once. Leave one out; .*=2 takes its rows twice."),
        (["empty"], "empty holds no files."),
        (
            ["mixed"],
            r"mixed holds rows, such as mixed/a.jsonl, and other files, such as mixed/b.txt. Name the files",
        ),
        (["splits"], r"files of several splits by their names: no split \(splits/other.jsonl\), train \(splits/train"),
        (["e*y"], "No file matches 'e.y'."),
    ],
    ids=str,
)
def test_what_is_unclear_is_refused(here, data, message):
    write(a_jsonl=LINE, mixed__a_jsonl=LINE, mixed__b_txt="one", splits__train_jsonl=LINE, splits__other_jsonl=LINE)
    (here / "empty").mkdir()
    with pytest.raises(UserError, match=message):
        sources.data_sources(data)


def test_a_folder_is_its_files_without_what_tells_about_them(capsys):
    write(one__a_jsonl=LINE, one__b__c_csv="text\none", one__README_md="# one", **{"one__.hidden_jsonl": LINE})
    (part,) = sources.data_sources(["one"])
    assert names(part) == ["one/a.jsonl", "one/b/c.csv"]
    assert capsys.readouterr().out == "data: one/README.md: skipped, since they describe the data\n"
    write(prose__a_txt="one", prose__README_md="two")
    assert names(sources.data_sources(["prose"])[0]) == ["prose/README.md", "prose/a.txt"]


def test_of_a_folder_with_splits_the_training_data_is_taken(capsys):
    write(d__train_0_jsonl=LINE, d__train_1_jsonl=LINE, d__test_0_jsonl=LINE, e__validation__a_csv="text\none")
    (part,) = sources.data_sources(["d"])
    assert names(part) == ["d/train_0.jsonl", "d/train_1.jsonl"]
    assert "d/test_0.jsonl: skipped, since by their names they are not for training" in capsys.readouterr().out
    assert names(sources.data_sources(["e"], "--eval-data")[0]) == ["e/validation/a.csv"]
    with pytest.raises(UserError, match="d holds files of several splits"):
        sources.data_sources(["d"], "--eval-data")


def test_what_is_trained_on_is_not_scored_by_whatever_name(here):
    write(d__a_jsonl=LINE, d__b_jsonl=LINE)
    (here / "link.jsonl").symlink_to("d/b.jsonl")
    (here / "hard.jsonl").hardlink_to("d/b.jsonl")
    options = lambda *data, **others: RowOptions(data, **others)
    for data, scored in [(["d/b.jsonl"], "./d/b.jsonl"), (["d"], "link.jsonl"), (["d/a.jsonl", "hard.jsonl"], "d/*b*")]:
        with pytest.raises(UserError, match=r"^--eval-data: .*(b|link|hard)\.jsonl is in --data too"):
            sources_of(options(*data, eval_data=scored))
    with pytest.raises(UserError, match="^--eval-data: org/words is in --data too"):
        sources_of(options("org/words", eval_data="org/words", stream=True))
    with pytest.raises(UserError, match="--data names link.jsonl more than once, also as d/b.jsonl. Leave"):
        sources_of(options("d", "link.jsonl"))
    assert sources_of(options("d/a.jsonl", eval_data="link.jsonl"))["--eval-data"][0].name == "link.jsonl"


def test_a_mixture_has_each_file_s_rows_as_often_as_its_weight_says():
    mixture = [(4, 2.0), (10, 0.25), (3, 1.0)]
    table = {"input_ids": rows.np.arange(17)[:, None]}
    batch_of = rows.batches(table, 5, 0, 4.0, mixture)
    number = rows.num_mixed(mixture)
    assert number == 8 + 2 + 3
    steps = rows.num_steps(number, 5, 4.0)
    epochs = [[], [], [], []]
    for step in range(steps):
        epochs[step // 3] += batch_of(step)["input_ids"][:, 0].tolist()
    for epoch in epochs:
        assert sorted(i for i in epoch if i < 4) == sorted([*range(4)] * 2)
        assert len({i for i in epoch if 4 <= i < 14}) == 2 and sorted(i for i in epoch if i >= 14) == [14, 15, 16]
    assert len({i for epoch in epochs for i in epoch if 4 <= i < 14}) == 8  # others in each epoch
    assert not len(batch_of(steps)["input_ids"])


# --- files that are read in chunks ------------------------------------------------------------------------------------


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(file_rows, "MOST_AT_ONCE", 40)
    monkeypatch.setattr(file_rows, "_CHUNK", 16)


def texts(path):
    return [document.text for document in reading.read(str(path))]


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_that_is_read_by_parts_has_all_its_elements(here, small_parts, indent):
    rng = random.Random(0)
    expected = ['é\n,]}"' * rng.randrange(1, 30) for _ in range(20)]
    (here / "a.json").write_text(json.dumps([{"text": text, "n": [1.5e3]} for text in expected], indent=indent))
    assert texts(here / "a.json") == expected


@pytest.mark.parametrize(
    ["end", "message"],
    [
        ("", "element 3, is no JSON: the array does not end"),
        (',{"text": "x', "element 4, is no JSON"),
        ('] {"more": 1}', "there is text after the end of the array"),
        (' {"text": "x"}]', "element 3: '{' follows it, and must be ',' or ']'"),
    ],
)
def test_a_damaged_array_that_is_read_by_parts_is_told(here, small_parts, end, message):
    (here / "a.json").write_text("[" + ", ".join(['{"text": "some words"}'] * 3) + end)
    with pytest.raises(UserError, match=message):
        texts(here / "a.json")


def test_lines_and_tables_are_read_by_parts(here, small_parts):
    expected = [f'line {i}, with "signs"\nand more' for i in range(9)]
    (here / "a.jsonl").write_text("\n\n".join(json.dumps({"text": text}) for text in expected))
    with (here / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["id", "text"], *enumerate(expected)])
    assert texts(here / "a.jsonl") == texts(here / "a.csv") == expected


def test_long_prose_is_not_held_in_memory_and_json_is_found_in_it(here, small_parts):
    (here / "a.txt").write_text("[one] " * 20)
    (document,) = reading.read(str(here / "a.txt"))
    assert document.path == here / "a.txt" and not document.text
    (here / "b.txt").write_text('[ {"text": "one"}, ' + '{"text": "two"},' * 9)
    with pytest.raises(UserError, match="b.txt holds JSON, which would be trained on as plain text"):
        reading.read(str(here / "b.txt"))


@pytest.mark.parametrize("at", [0, 100])
def test_a_byte_that_is_no_text_is_told_with_its_place(here, small_parts, at):
    (here / "a.txt").write_bytes(b"a" * at + b"\xff" + b"b" * 50)
    with pytest.raises(UserError, match=f"a.txt is not in UTF-8: byte 0xff at {at}. "):
        reading.read(str(here / "a.txt"))
    (here / "b.jsonl").write_bytes(b'{"text": "' + b"a" * at + b"\0" + b'"}')
    with pytest.raises(UserError, match=f"b.jsonl is no text file: character {at + 10} is a null"):
        reading.read(str(here / "b.jsonl"))


# --- Parquet and Arrow ------------------------------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]


def test_columnar_tables_are_rows(here):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.Table.from_pylist([{"text": "one", "messages": None}, {"text": None, "messages": CHAT}] * 300)
    parquet.write_table(table, here / "a.parquet")
    with arrow.OSFile(str(here / "b.arrow"), "wb") as file, arrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)  # as `datasets` saves them
    with arrow.OSFile(str(here / "f.arrow"), "wb") as file, arrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=250)  # as Arrow calls a file
    for name in ("a.parquet", "b.arrow", "f.arrow"):
        found = reading.read(name)
        assert [(each.text, each.messages) for each in found] == [("one", None), ("", CHAT)] * 300
        assert found[599].where == f"{name}, row 600"
    (here / "c.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match="c.parquet cannot be read as a .parquet file: "):
        reading.read("c.parquet")
    parquet.write_table(table.slice(0, 0), here / "d.parquet")
    with pytest.raises(UserError, match="d.parquet is empty."):
        reading.read("d.parquet")
    parquet.write_table(arrow.Table.from_arrays(2 * [arrow.array(["one"])], names=["text", "text"]), here / "e.parquet")
    with pytest.raises(UserError, match="e.parquet: two columns have one name"):
        reading.read("e.parquet")


def test_a_columnar_table_without_its_package_says_what_to_install(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (here / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"The package 'pyarrow' is missing: pip install .*\[finetune\]"):
        reading.read("a.parquet")
