"""The tokens of a run's data: made once, in files beside the run, and the same as those of all documents at once."""

import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

import liger_jax
from liger_jax.data import kept_tokens, long_text, reading, token_cache, training_rows
from liger_jax.data.laid_rows import LaidRows
from liger_jax.data.options import RowOptions
from liger_jax.data.sources import DataSource
from liger_jax.data.step_rows import Laying
from liger_jax.data.tokenizer import Tokenizer
from liger_jax.models.hugging_face.source import Source
from liger_jax.training import pack, pad, rows, user_caches
from liger_jax.user_errors import UserError
from tests import _tiny


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = _tiny.checkpoint(tmp_path_factory.mktemp("source") / "model")
    texts = [json.dumps({"text": _tiny.text(3 + 5 * i % 40, i)}) for i in range(30)]
    chats = _tiny.chats(30).split("\n")
    mixed = [line for pair in zip(texts, chats, strict=True) for line in pair]
    (folder.parent / "mixed.jsonl").write_text("\n".join(mixed))
    (folder.parent / "chats.jsonl").write_text("\n".join(chats[:7]))
    return folder


def tokenizer(source):
    return Tokenizer(Source(source), 320, [])


def options_of(source, *data, **options):
    paths = tuple(str(source.parent / each) for each in data)
    return RowOptions(paths, **{"length": 32, "eval_share": 0.0, **options})


def rows_of(options, encoder, place, seed=0):
    return training_rows.prepared(options, 8, seed, encoder, place)


@pytest.mark.parametrize("packed", [True, False])
def test_rows_from_files_are_those_of_all_documents_at_once(source, tmp_path, packed, monkeypatch):
    monkeypatch.setattr("liger_jax.data.token_files._BATCH", 7)
    options = options_of(source, "mixed.jsonl", pack=packed)
    laid = rows_of(options, tokenizer(source), tmp_path / "tokens").rows
    pieces = tokenizer(source).pieces(reading.read(options.data), 32)
    expected = (pack if packed else pad)([p.tokens for p in pieces], 32, labels=[p.labels for p in pieces])
    assert list(laid) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(laid[name], array)
        np.testing.assert_array_equal(laid[name][[5, 2]], array[[5, 2]])
        np.testing.assert_array_equal(laid[name][3, :5], array[3, :5])
    for part, other in zip(rows.batched(laid, 4), rows.batched(expected, 4), strict=True):
        np.testing.assert_array_equal(part["labels"], other["labels"])
    found = [laid.tokens.piece(i) for i in range(len(pieces))]
    assert [(p.begin, p.total, p.document.where) for p in found] == [
        (p.begin, p.total, p.document.where) for p in pieces
    ]
    assert laid.tokens.num_scored(np.arange(len(pieces))) == sum((p.labels[1:] >= 0).sum() for p in pieces)


def prepared(source, place, capsys, *data, seed=0, **options):
    """The rows of a start that keeps its tokens, and whether it made them."""
    capsys.readouterr()
    found = rows_of(options_of(source, *data, **options), tokenizer(source), place, seed)
    found.keep()
    return found, "tokenising" in capsys.readouterr().out


def test_tokens_are_made_once_and_again_when_anything_of_them_has_changed(source, tmp_path, capsys):
    place, file = tmp_path / "tokens", source.parent / "once.jsonl"
    file.write_text((source.parent / "mixed.jsonl").read_text())
    first, was_made = prepared(source, place, capsys, "once.jsonl")
    assert was_made
    for options in ({}, {"pack": True}, {"seed": 3, "eval_share": 0.1}):  # which change the rows alone
        again, was_made = prepared(source, place, capsys, "once.jsonl", **options)
        assert not was_made and again.rows.tokens.digest == first.rows.tokens.digest
    assert len(list(place.iterdir())) == 1
    for options in ({"length": 16}, {"column": "text"}):
        assert prepared(source, place, capsys, "once.jsonl", **options)[1], options
    content = file.read_text()
    file.write_text(content.replace("three", "seven", 1))
    changed, was_made = prepared(source, place, capsys, "once.jsonl")
    assert was_made and changed.made_of() != first.made_of()
    file.write_text(content)
    assert prepared(source, place, capsys, "once.jsonl")[0].made_of() == first.made_of()
    assert len(list(place.iterdir())) == 1


def test_tokens_are_made_anew_when_the_code_that_makes_them_has_changed(source, tmp_path, capsys, monkeypatch):
    for room in ("chat", "commands", "data"):
        shutil.copytree(Path(liger_jax.__file__).parent / room, tmp_path / room)
    monkeypatch.setattr(training_rows, "_ROOT", tmp_path)
    place = tmp_path / "tokens"
    assert prepared(source, place, capsys, "chats.jsonl")[1]
    changes = {"commands/_parser": False, "data/stream": False, "chat/spans": True, "data/formats": True}
    for name, is_made in changes.items():
        with (tmp_path / f"{name}.py").open("a") as file:
            file.write("# changed\n")
        assert prepared(source, place, capsys, "chats.jsonl")[1] is is_made, name
        assert not prepared(source, place, capsys, "chats.jsonl")[1], name


@pytest.mark.parametrize("name", ["tokens", "scored", "ends", "meta.json"])
def test_damaged_tokens_are_made_anew(source, tmp_path, capsys, name):
    first, _ = prepared(source, tmp_path, capsys, "chats.jsonl")
    made_of, path = first.made_of(), first.rows.tokens.folder / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    again, was_made = prepared(source, tmp_path, capsys, "chats.jsonl")
    assert was_made and again.made_of() == made_of
    assert not prepared(source, tmp_path, capsys, "chats.jsonl")[1]


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The folder of tokens in the user's folder for caches, which may be used."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    with user_caches.used(True):
        yield kept_tokens.folder()


def is_made(source, place, capsys, **options):
    """Whether a start in another folder made its tokens, which are removed behind it; they are the same."""
    found, was_made = prepared(source, place / "tokens", capsys, "chats.jsonl", length=24, **options)
    assert len(found.rows.tokens) == 7
    found.rows.tokens.arrays(6)
    shutil.rmtree(place)
    return was_made


def test_a_run_in_another_folder_finds_the_tokens_of_the_same_data(source, tmp_path, capsys, kept, monkeypatch):
    assert is_made(source, tmp_path / "a", capsys) and not is_made(source, tmp_path / "b", capsys)
    (folder,) = kept.iterdir()
    content = (folder / "scored").read_bytes()
    (folder / "scored").write_bytes(bytes([content[0] ^ 1]) + content[1:])
    assert is_made(source, tmp_path / "c", capsys) and not is_made(source, tmp_path / "d", capsys)
    assert (folder / "scored").read_bytes() == content
    with user_caches.used(False):
        assert is_made(source, tmp_path / "e", capsys)

    def no_link(*paths):
        raise OSError("another disk")

    monkeypatch.setattr("os.link", no_link)
    monkeypatch.setattr("os.utime", no_link)  # as in a folder that can only be read
    assert not is_made(source, tmp_path / "f", capsys)


def test_a_start_says_where_the_tokens_are_that_it_finds(source, tmp_path, capsys, kept):
    def said(place):
        rows_of(options_of(source, "chats.jsonl"), tokenizer(source), place, 0).keep()
        return capsys.readouterr().out

    assert "tokenising" in said(tmp_path / "a")
    assert f"of tokens of an earlier start, in {tmp_path / 'a'} …" in said(tmp_path / "a")
    assert f"of tokens of an earlier run with this data, from {kept} …" in said(tmp_path / "b")


@pytest.mark.parametrize("limit", ["_MOST_BYTES", "_MOST_COPIED"])
def test_tokens_that_are_too_large_are_not_kept(limit, source, tmp_path, capsys, kept, monkeypatch):
    monkeypatch.setattr(kept_tokens, limit, 9)
    monkeypatch.setattr("os.link", lambda *paths: (tmp_path / "absent").open())
    assert is_made(source, tmp_path / "a", capsys) and is_made(source, tmp_path / "b", capsys)
    assert not [*kept.rglob("*")]


def test_tokens_that_were_not_used_for_longest_are_removed(source, tmp_path, capsys, kept, monkeypatch):
    assert is_made(source, tmp_path / "a", capsys)
    own = sum(path.stat().st_size for path in kept.glob("*/*"))
    shutil.rmtree(kept)
    for name, age in (("old", 100), ("new", 10), (".unfinished-old", 10**6), (".unfinished-new", 200)):
        (kept / name).mkdir(parents=True)
        (kept / name / "tokens").write_bytes(bytes(2000))
        os.utime(kept / name, (time.time() - age,) * 2)
    monkeypatch.setattr(kept_tokens, "_MOST_BYTES", own + 3000)
    assert is_made(source, tmp_path / "b", capsys)
    names = {path.name for path in kept.iterdir()}
    assert len(names) == 3 and names > {"new", ".unfinished-new"}


def test_what_is_said_of_conversations_is_said_at_each_start(source, tmp_path, capsys):
    for _ in range(2):
        found = rows_of(options_of(source, "chats.jsonl", length=40), tokenizer(source), tmp_path)
        found.keep()
        assert "7 of 7 conversations are longer than --length=40, and cut off\n" in capsys.readouterr().out


def test_the_mark_that_ends_answers_is_known_from_files_too(source, tmp_path):
    stops = []
    for _ in range(2):
        one = tokenizer(source)
        rows_of(options_of(source, "chats.jsonl"), one, tmp_path).keep()
        stops.append(one.stops)
    assert stops[0] == stops[1] and len(stops[0]) == 2


def test_tokens_that_no_run_has_kept_are_removed(source, tmp_path):
    with token_cache.leftovers_removed(tmp_path):
        rows_of(options_of(source, "chats.jsonl"), tokenizer(source), tmp_path / "tokens")
        assert list((tmp_path / "tokens").iterdir())
    assert not (tmp_path / "tokens").exists()
    (tmp_path / "tokens" / "mine").mkdir(parents=True)
    with token_cache.leftovers_removed(tmp_path):
        rows_of(options_of(source, "chats.jsonl"), tokenizer(source), tmp_path / "tokens").keep()
    assert len(list((tmp_path / "tokens").iterdir())) == 2  # and what no run has left stays


def test_weights_mix_files_by_rows(source, tmp_path):
    options = options_of(source, "mixed.jsonl=.5", "chats.jsonl=3")
    data = rows_of(options, tokenizer(source), tmp_path)
    (mixed, half), (chats, thrice) = data.mixture or []
    assert (half, thrice, chats) == (0.5, 3.0, 7) and data.num_in_epoch == round(mixed / 2) + 21
    batch_of = rows.batches(data.rows, 8, 0, 1.0, data.mixture)
    of_chats = {row.tobytes() for row in data.rows["input_ids"][mixed:]}
    seen = [row.tobytes() for i in range(-(-data.num_in_epoch // 8)) for row in batch_of(i)["input_ids"]]
    assert len(seen) == data.num_in_epoch
    assert sum(row in of_chats for row in seen) >= 21  # some rows of the other file are the same


def test_other_data_is_scored_and_not_trained_on(source, tmp_path):
    (source.parent / "other.jsonl").write_text("\n".join(_tiny.chats(12).split("\n")[9:]))
    scored = (str(source.parent / "other.jsonl"),)
    options = options_of(source, "chats.jsonl", eval_data=scored, eval_share=None)
    data = rows_of(options, tokenizer(source), tmp_path)
    assert (data.rows.num_rows, data.held_out_rows.num_rows) == (7, 3)
    data.keep()
    assert len(list(tmp_path.iterdir())) == 2
    same = options_of(source, "chats.jsonl", eval_data=options_of(source, "chats.jsonl").data, eval_share=None)
    with pytest.raises(UserError, match="chats.jsonl is in --data too"):
        rows_of(same, tokenizer(source), tmp_path)
    (source.parent / "copy.jsonl").write_bytes((source.parent / "chats.jsonl").read_bytes())
    copied = options_of(source, "chats.jsonl", eval_data=(str(source.parent / "copy.jsonl"),), eval_share=None)
    with pytest.raises(UserError, match="--eval-data has the content of --data"):
        rows_of(copied, tokenizer(source), tmp_path)
    weighed = options_of(source, "mixed.jsonl", eval_data=(scored[0] + "=2",), eval_share=None)
    with pytest.raises(UserError, match="has a weight, but all held-out rows are weighted equally"):
        rows_of(weighed, tokenizer(source), tmp_path)
    with pytest.raises(UserError, match="--eval-share=0.1 and --eval-data both say what is scored"):
        options_of(source, "chats.jsonl", eval_data=scored, eval_share=0.1)


def test_a_long_text_has_the_tokens_of_the_whole(source, tmp_path, monkeypatch):
    rng = np.random.default_rng()
    words = [*_tiny.WORDS, "\n\n", "   ", "é", "日本", "!?", "<|im_end|>", "x" * 9]
    text = " ".join(rng.choice(words, 3000))
    path = tmp_path / "long.txt"
    path.write_text(text)
    whole = tokenizer(source).pieces([reading.Document("a", text)], 32)
    monkeypatch.setattr(long_text, "WINDOW", 700)
    monkeypatch.setattr(long_text, "OVERLAP", 200)
    parts = tokenizer(source).pieces([reading.Document("a", path=path)], 32)
    assert [piece.begin for piece in parts] == [piece.begin for piece in whole]
    for part, expected in zip(parts, whole, strict=True):
        np.testing.assert_array_equal(part.tokens, expected.tokens)


def test_the_next_documents_are_read_and_encoded_meanwhile_with_the_same_tokens(source, tmp_path, monkeypatch):
    monkeypatch.setattr("liger_jax.data.token_files._BATCH", 7)
    monkeypatch.setattr("liger_jax.data.token_files._MOST_HELD", 3)
    events, made = [], []

    class Begun(Tokenizer):
        def encoded(self, documents, length, refused=None):
            begun = super().encoded(documents, length, refused)
            events.append(("begin", documents[0].where))
            return (events.append(("piece", piece.document.where)) or piece for piece in begun)

    for refused in ({}, None):
        options = options_of(source, "mixed.jsonl")
        encoder = Begun(Source(source), 320, [])
        place = tmp_path / str(refused)
        sources = training_rows.sources_of(options)["--data"]
        made.append(training_rows.tokens_of(options, encoder, place, sources, refused=refused, is_kept=False))
        second = [i for i, (event, _) in enumerate(events) if event == "begin"][1]
        assert (second < next(i for i, (event, _) in enumerate(events) if event == "piece")) == (refused is None)
        events.clear()
    one, other = (dict(tokens.meta) for tokens in made)
    assert one == other and len(made[0]) > 7


@pytest.mark.parametrize("bad", [7, 8, 30])
def test_the_first_error_is_raised_though_the_next_documents_have_another(bad, source, tmp_path, monkeypatch):
    monkeypatch.setattr("liger_jax.data.token_files._BATCH", 7)
    rows: list[dict] = [{"text": "one two"} for _ in range(40)]
    rows[bad] = {"text": "one", "messages": "two"}
    rows[4] = {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    encoder = tokenizer(source)

    def refuse(document):
        raise UserError("the template fails")

    monkeypatch.setattr(encoder.conversations, "rendered", refuse)
    options = options_of(source, str(tmp_path / "rows.jsonl"))
    sources = training_rows.sources_of(options)["--data"]
    with pytest.raises(UserError, match=r"line 5: the template fails"):
        training_rows.tokens_of(options, encoder, tmp_path / "tokens", sources)


def test_windows_that_nowhere_agree_are_refused(monkeypatch):
    monkeypatch.setattr(long_text, "WINDOW", 20)
    monkeypatch.setattr(long_text, "OVERLAP", 8)

    class Encoded:
        def __init__(self, text):  # tokens of three characters, counted from the begin of a window
            self.offsets = [(i, i + 3) for i in range(0, len(text), 3)]
            self.ids = [len(text)] * len(self.offsets)

    left = iter("abcdefgh" * 20)
    read = lambda size: "".join(character for _, character in zip(range(size), left, strict=False))
    with pytest.raises(UserError, match="splits a section of the text differently from the whole text"):
        list(long_text.encoded(read, Encoded))


def test_laid_rows_of_several_groups_share_no_row(source, tmp_path):
    data = rows_of(options_of(source, "mixed.jsonl"), tokenizer(source), tmp_path)
    groups = [np.arange(0, 9), np.arange(9, 9), np.arange(9, 20)]
    laid = LaidRows(data.rows.tokens, groups, 32, True)
    assert laid.counts[1] == 0 and sum(laid.counts) == laid.num_rows
    first = set(laid["pieces"][: laid.counts[0]].ravel().tolist()) - {-1}
    assert first == set(range(9))


def test_pieces_have_one_number_in_packed_and_padded_rows_and_another_where_they_come_twice(source, tmp_path):
    options = options_of(source, "mixed.jsonl")
    tokens = rows_of(options, tokenizer(source), tmp_path).rows.tokens
    for packed in (True, False):
        laid = LaidRows(tokens, [np.arange(2, 12)], 32, packed)
        data = training_rows.TrainingRows(laid, None, [(laid.num_rows, 2.0)], "")
        in_steps = data.laid_in_steps(50, 3, 1.0, 1, Laying(batch=50)).in_steps
        ids, numbers = in_steps.rows_of(0)["input_ids"], in_steps.numbers_of(0)
        for number in range(2, 12):
            expected = tokens.arrays(number)[0]
            for turn in (0, len(tokens)):  # places without a token have any number
                own = [row[is_own][: len(expected)] for row, is_own in zip(ids, numbers == number + turn, strict=True)]
                np.testing.assert_array_equal([each for each in own if each.any()], [expected])


def test_an_os_error_of_a_programs_rows_passes_as_it_is(source, tmp_path):
    def rows_lost():
        yield {"text": _tiny.text(5, 1)}
        raise OSError("lost")

    read = lambda each: reading.rows_to_documents(each.rows, each.name, None, None)
    data = DataSource("rows", rows=rows_lost())
    with pytest.raises(OSError, match="^lost$"):
        token_cache.write(tmp_path / "tokens", "key", [data], read, tokenizer(source), 32)
