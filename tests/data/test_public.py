"""From chats to tokens, labels and rows, for a loop of one's own: those that the commands train on."""

import itertools
import json

import numpy as np
import pytest

from liger_jax import data
from liger_jax.data import reading, training_rows
from liger_jax.data.options import RowOptions
from liger_jax.data.sources import DataSource
from liger_jax.models.hugging_face.source import find
from tests import _tiny


class DataFrame(list):
    """What tells a table of pandas."""

    columns = to_dict = None


ASKED = [{"role": "user", "content": "a"}]


class Places:
    """What tells a data set of PyTorch's."""

    def __len__(self):
        return 1

    def __getitem__(self, place):
        return {"text": "a"}

    __iter__ = None


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint's folder, with conversations beside it."""
    folder = _tiny.checkpoint(tmp_path_factory.mktemp("source") / "model")
    (folder.parent / "chats.jsonl").write_text(_tiny.chats(12))
    return folder


@pytest.mark.parametrize("packed", [True, False])
def test_rows_of_three_lines_are_those_of_a_run(packed, source, tmp_path, capsys):
    made = data.rows(data.tokens(source, data.read(source.parent / "chats.jsonl"), length=64), 64, packed=packed)
    given = [json.loads(line) for line in _tiny.chats(12).splitlines()]
    tokens = data.tokens(source, data.read(iter(given)))
    own = data.rows(tokens, 64, packed=packed)
    options = RowOptions(data=str(source.parent / "chats.jsonl"), pack=packed, length=64, eval_share=0.0)
    run = training_rows.prepared(options, 4, 0, training_rows.tokenizer(find(source, weights=False), 320), tmp_path)
    for batch in (made, own):
        assert set(batch) <= set(run.rows)
        for name, column in batch.items():
            np.testing.assert_array_equal(column, run.rows[name][:])
    assert data.num_scored(tokens) == run.rows.tokens.num_scored(run.rows.pieces)


def test_labels_are_of_what_the_assistant_wrote(source):
    (tokens,) = data.tokens(source, data.read([json.loads(_tiny.chats(1))]))
    encoder = training_rows.tokenizer(find(source, weights=False), 320)
    scored = encoder.text(tokens.input_ids[tokens.labels != -100].tolist())
    assert scored == "three four five<|im_end|>three four five<|im_end|>"
    assert scored == data.text(source, tokens.input_ids[tokens.labels != -100], special=True)
    begin = int(np.flatnonzero(tokens.labels != -100)[0])
    asked = data.prompt(source, json.loads(_tiny.chats(1))["messages"][:1])
    np.testing.assert_array_equal(asked, tokens.input_ids[:begin])
    assert data.text(source, data.prompt(source, "one two")) == "one two"
    template, messages = data.ChatTemplate(source), json.loads(_tiny.chats(1))["messages"]
    printed, answers = template.render(messages)
    assert printed == data.text(source, tokens.input_ids, special=True)
    assert "".join(printed[begin:end] for begin, end in answers) == scored
    assert template.prompt(messages[:1]) == data.text(source, asked, special=True)
    assert tokens.where == "data, row 1" and data.num_scored([tokens]) == np.count_nonzero(tokens.labels != -100)


PAIRS = [
    {"prompt": "one", "chosen": " two three", "rejected": " four"},
    {"prompt": "five", "chosen": " six", "rejected": " six"},
    {"prompt": [{"role": "user", "content": "one"}], "chosen": "two", "rejected": "three four five"},
]


@pytest.mark.parametrize("packed", [True, False])
def test_rows_of_pairs_have_both_answers_after_their_prompt(packed, source, capsys):
    tokens = data.tokens(source, data.read(PAIRS, format="pairs"), length=64)
    assert "1 of 3 pairs are left out, first data, row 2: equal answers\n" in capsys.readouterr().out
    batch = data.rows(tokens, 64, packed=packed)
    sides = [(row, segment) for row in (0,) for segment in (1, 2, 3, 4)] if packed else [(row, 1) for row in range(4)]
    found = set()
    for (row, segment), (_, other) in zip(sides[::2], sides[1::2], strict=True):
        texts = []
        for place in ((row, segment), (row, other) if packed else (row + 1, 1)):
            here = batch["segment_ids" if packed else "token_mask"][place[0]] == place[1]
            ids, labels = batch["input_ids"][place[0]][here], batch["labels"][place[0]][here]
            np.testing.assert_array_equal(labels[labels != -100], ids[labels != -100])
            texts += [data.text(source, ids[labels == -100]), data.text(source, labels[labels != -100])]
        found.add(tuple(text.strip() for text in texts))
    asked = data.text(source, data.prompt(source, PAIRS[2]["prompt"])).strip()
    assert found == {("one", "two three", "one", "four"), (asked, "two", asked, "three four five")}
    assert data.num_scored(tokens) == np.count_nonzero(batch["labels"] != -100)


def test_answers_with_labels_keep_them_and_kinds_are_not_mixed(source):
    answers = data.read([{"prompt": "one", "completion": " two", "label": 0}], format="unpaired")
    (tokens,) = data.tokens(source, answers)
    assert tokens.desirable is False and data.text(source, tokens.labels[tokens.labels != -100]) == " two"
    with pytest.raises(TypeError, match="^documents holds pairs, answers with labels or texts together. Pass those of"):
        data.tokens(source, [*answers, *data.read([{"text": "one"}])])


@pytest.mark.parametrize(
    ("given", "options", "error", "words"),
    [
        ({"text": "a"}, {}, TypeError, "data is dict, and must be files, or an iterable of dicts. Pass [data] for one "
         "row."),
        ({"messages": ASKED}, {}, TypeError, "data is dict, and must be files, or an iterable of dicts. Pass [data] "
         "for one row."),
        ({"text": ["a", "b"]}, {}, TypeError, "data is dict, and must be files, or an iterable of dicts. Columns "
         "become rows by [dict(zip(data, row)) for row in zip(*data.values())]."),
        (Places(), {}, TypeError, "data is Places, and must be files, or an iterable of dicts. Pass (data[i] for i in "
         "range(len(data)))."),
        ([{"text": None, "id": 3}], {}, ValueError, "data, row 1: there are no messages, and no text in 'text', among "
         "['id']. 'text' is null, which counts as absent. A row has the fields of one of these formats: messages "
         "(messages); sharegpt (conversations); alpaca (instruction and output); prompt-completion (prompt and "
         "completion); text (text)."),
        ([{"input_ids": [1, 2]}], {}, ValueError, "data, row 1: there are no messages, and no text in 'text', among "
         "['input_ids']. input_ids are tokens, and a run makes them of texts itself: train on tokens by make_step."),
        ([{"story": "a b", "id": 3}], {}, ValueError, "data, row 1: there are no messages, and no text in 'text', "
         "among ['id', 'story']. Name the text's field: column='story'."),
        ([], {}, ValueError, "data has no text."),
        ([{"text": "a"}], {"format": "csv"}, ValueError, "format='csv' must be one of messages, sharegpt, alpaca, "
         "prompt-completion, text, pairs, unpaired."),
        (PAIRS[:1], {}, ValueError, "data, row 1: there are no messages, and no text in 'text', among ['chosen', "
         "'prompt', 'rejected']. It is a pair of answers: trainers.dpo trains on such rows, and data.read "
         "with format='pairs' reads them. To train on one answer alone, name it: column='chosen'."),
        (["one two"], {}, ValueError, "data: no file is named 'one two'. If it is a text to train on, pass dicts, such "
         "as [{'text': each} for each in texts]."),
        ([{"prompt": "a", "completion": "b", "label": True}], {}, ValueError, "data, row 1: label says whether the "
         "completion is good, but finetune would train on bad ones too. Remove their rows and then the field, or train "
         "on both with trainers.dpo with loss='kto'."),
        (DataFrame(), {}, TypeError,
         "data is DataFrame, a table of columns. Pass data.to_dict('records')."),
        ([{"text": " "}], {}, ValueError, "data has no text."),
        (iter([{"text": "a"}, 3]), {}, ValueError,
         "data, row 2, holds a number, and must hold an object, with text or messages."),
        ("nowhere.jsonl", {}, ValueError,
         "No file matches 'nowhere.jsonl'. Pass data a file, a folder or a quoted glob."),
        ([{"text": "a", "messages": [{"role": "user", "content": "b"}]}], {}, ValueError,
         "data, row 1: the row has the fields of more than one format: messages (messages); text (text). Choose "
         "one: format='messages' or format='text'."),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_in_the_words_of_python(given, options, error, words):
    with pytest.raises(error) as raised:
        data.read(given, **options)
    assert str(raised.value) == words


def test_what_is_no_document_and_no_row_of_tokens_is_refused(source):
    with pytest.raises(TypeError, match="^documents holds dict: pass what data.read makes of rows or files.$"):
        data.tokens(source, iter([{"text": "a"}]))
    with pytest.raises(ValueError, match=r"^input_ids has shape \(1, 2\), and must be \(tokens,\). Pass one row of a "):
        data.text(source, [[1, 2]])
    with pytest.raises(ValueError, match="^messages: the last message must be one that the assistant answers. "):
        data.ChatTemplate(source).prompt([{"role": "assistant", "content": "a"}])


def test_arrays_in_rows_are_read_as_lists():
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    of_table = {"messages": np.array(said, object), "embedding": np.ones(3), "empty": np.array([]), "id": np.int64(1)}
    lists = data.read([{"messages": said}])
    assert [each.messages for each in data.read([of_table])] == [each.messages for each in lists]
    assert data.read([{"text": "a", "embedding": np.ones(3)}])[0].text == "a"
    ((_, row),) = reading.numbered(
        [{"prompt": "a", "answer": np.array([1, 2]), "deep": [{"x": np.float32(3)}]}], "rows"
    )
    assert row == {"prompt": "a", "answer": [1, 2], "deep": [{"x": 3.0}]}


def test_an_iterator_that_takes_long_is_told_how_one_without_an_end_is_read(capsys, monkeypatch):
    monkeypatch.setattr(reading, "_PATIENCE", 0)
    endless = DataSource("rows", rows=({"text": "a"} for _ in itertools.count()))
    row = next(iter(reading.rows_of(endless, None)))
    assert row == {"text": "a"}
    assert "1 row of an iterator so far. Cut one without an end by" in capsys.readouterr().out


def test_rows_of_a_program_may_change_after_they_were_read():
    def rows():
        messages = []
        for word in ("a", "b"):
            messages[:] = [{"role": "user", "content": word}]
            yield {"prompt": messages, "label": np.bool_(True)}  # as a table of NumPy's has it

    found = [row for _, row in reading.numbered(rows(), "rows")]
    assert [row["prompt"][0]["content"] for row in found] == ["a", "b"]
    assert all(row["label"] is True for row in found)


def test_rows_without_a_text_are_counted(source, tmp_path, capsys):
    texts = ["one two", "", "three four", " \n", "\t", "", "five"]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    path = str(tmp_path / "rows.jsonl")
    options = RowOptions(data=path, length=64, eval_share=0.0)
    run = training_rows.prepared(options, 4, 0, training_rows.tokenizer(find(source, weights=False), 320), tmp_path)
    first, empty = run.summary.splitlines()
    assert first.startswith("data: 3 documents in 3 pieces; ")
    where = f"{path}, line 2, {path}, line 4, {path}, line 5, …"
    assert empty == f"4 documents have no text, and no row: {where}"
    (tmp_path / "eval.jsonl").write_text('{"text": "six"}\n{"text": ""}')
    both = RowOptions(data=path, eval_data=(str(tmp_path / "eval.jsonl"),), length=64)
    run = training_rows.prepared(both, 4, 0, training_rows.tokenizer(find(source, weights=False), 320), tmp_path)
    told = f"1 document has no text, and no row: {tmp_path / 'eval.jsonl'}, line 2"
    assert run.summary.splitlines()[1:] == [empty, told]
    capsys.readouterr()
    assert len(data.read(path)) == 3
    assert capsys.readouterr().out == f"data: 4 documents have no text, and are left out: {where}\n"
    assert len(data.read([{"text": "a"}, {"text": ""}])) == 1
    assert capsys.readouterr().out == "data: 1 document has no text, and is left out: data, row 2\n"
