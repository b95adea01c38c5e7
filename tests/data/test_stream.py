"""A dataset that is read from the hub while a run goes on: the rows of each step, whichever was asked for before."""

import itertools
import json
import sys
import types

import numpy as np
import pytest

from liger_jax.commands import main
from liger_jax.data.options import RowOptions
from liger_jax.data.reading import Document
from liger_jax.data.stream import Stream
from liger_jax.data.tokenizer import Tokenizer
from liger_jax.models.hugging_face.source import Source
from liger_jax.trainers.finetune_options import FinetuneOptions
from liger_jax.trainers.options import Settings
from liger_jax.user_errors import UserError
from tests import _tiny

ROWS = [{"text": _tiny.text(1 + 7 * i % 50, i)} for i in range(40)]


class Dataset:
    """A stream as `datasets` has it, which counts the rows that are read."""

    def __init__(self, rows, begin=0, read=None):
        self.rows, self.begin, self.read = rows, begin, [] if read is None else read

    def skip(self, number):
        return Dataset(self.rows, self.begin + number, self.read)

    def __iter__(self):
        for i, row in enumerate(self.rows[self.begin :], self.begin):
            self.read.append(i)
            yield row


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return _tiny.checkpoint(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture
def dataset(monkeypatch):
    found = Dataset(ROWS)

    def load_dataset(name, subset, split, streaming=False):
        assert (name, split, streaming) == ("org/words", "train", True)
        return found

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    return found


def stream(source, folder, **options):
    rows = RowOptions("org/words", **{"length": 16, "eval_data": ("e",), "stream": True, **options})
    return Stream(rows, 3, Tokenizer(Source(source), 320, []), folder)


@pytest.mark.parametrize("packed", [False, True])
def test_steps_have_all_tokens_of_the_stream_in_their_order(source, dataset, tmp_path, packed):
    one = stream(source, tmp_path, pack=packed)
    pieces = Tokenizer(Source(source), 320, []).pieces([_document(row) for row in ROWS], 16)
    expected = [piece.tokens.tolist() for piece in pieces]
    assert sum(map(len, expected)) < 30 * 48  # a stream that ends begins again
    expected = iter(expected * 9)
    for step in range(40):
        batch = one.rows_of(step)
        assert batch["input_ids"].shape == (3, 16)
        found = [piece for row in range(3) for piece in _pieces({name: x[row] for name, x in batch.items()})]
        own, numbers = list(itertools.islice(expected, len(found))), one.numbers_of(step)
        assert sorted(found) == sorted(own)
        is_token = batch["segment_ids"] > 0 if packed else batch["labels"] >= 0
        assert [batch["input_ids"][is_token & (numbers == i)].tolist() for i in range(len(own))] == own


def _pieces(row):
    if "segment_ids" not in row:
        return [row["input_ids"][row["labels"] >= 0].tolist()]
    return [row["input_ids"][row["segment_ids"] == i].tolist() for i in range(1, row["segment_ids"].max() + 1)]


def _document(row):
    return Document("", row["text"])


@pytest.mark.parametrize("packed", [False, True])
def test_a_run_that_goes_on_reads_from_its_place_and_has_the_same_rows(source, dataset, tmp_path, packed):
    whole = [dict(stream(source, tmp_path / "whole", pack=packed).rows_of(step)) for step in (0, 5, 6, 7)]
    first = stream(source, tmp_path / "run", pack=packed)
    for step in range(6):
        first.rows_of(step)
    dataset.read.clear()
    again = stream(source, tmp_path / "run", pack=packed)
    found = [again.rows_of(step) for step in (5, 6, 7)]
    assert min(dataset.read) > 0  # it begins to read where the step begins
    for ours, expected in zip([again.rows_of(0), *found], whole, strict=True):
        for name in expected:
            np.testing.assert_array_equal(ours[name], expected[name])
    other = stream(source, tmp_path / "run", pack=packed, length=32)  # whose places are others
    assert other.rows_of(0)["input_ids"].shape == (3, 32)


def test_what_a_stream_needs_is_said(source, dataset, tmp_path, monkeypatch):
    for given in (dict(steps=4), dict(eval_data="e")):
        with pytest.raises(UserError, match="--stream reads data of unknown length, .* pass --steps and --eval-data."):
            Settings.of(FinetuneOptions, model="m", data="org/words", stream=True, **given)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "words").write_text("one")
    with pytest.raises(UserError, match="--stream reads a dataset of the hub, and --data=org/words is not one."):
        stream(source, tmp_path)


def test_a_stream_says_once_that_rows_have_no_text(source, dataset, tmp_path, capsys):
    dataset.rows = [{"text": ""}, *ROWS, {"text": " "}]
    one = stream(source, tmp_path)
    for step in range(40):  # it begins again
        one.rows_of(step)
    told = "data: rows with no text are left out, such as org/words, row 1\n"
    assert capsys.readouterr().out.count(told) == 1


def test_a_stream_that_breaks_or_is_empty_is_a_sentence(source, dataset, tmp_path):
    dataset.rows = [*ROWS[:2], {"words": 3}]
    with pytest.raises(UserError, match="org/words, row 3: there are no messages"):
        stream(source, tmp_path / "a").rows_of(9)
    dataset.rows = [{"text": ""}] * 3
    with pytest.raises(UserError, match="The data has no token to train on"):
        stream(source, tmp_path / "b").rows_of(0)

    class Broken(list):
        def __getitem__(self, index):
            raise ConnectionError("the hub is away")

    dataset.rows = Broken()
    with pytest.raises(UserError, match="cannot be read any more: the hub is away The same command resumes"):
        stream(source, tmp_path / "c").rows_of(0)


@pytest.mark.full
def test_finetune_trains_on_a_stream(source, dataset, tmp_path):
    (tmp_path / "eval.jsonl").write_text("\n".join(json.dumps({"text": _tiny.text(9, i)}) for i in range(3)))
    options = "--stream --steps 4 --batch 2 --length 16 --lora 2 --every 2".split()
    arguments = [f"--model={source}", "--data", "org/words", "--eval-data", str(tmp_path / "eval.jsonl"), *options]
    assert main(["finetune", *arguments, f"--out={tmp_path / 'out'}"]) == 0
    assert (tmp_path / "out" / "adapters").is_dir()
