"""The text that the examples train on."""

import re

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer

from examples._lib import text
from liger_jax.training.rows import num_tokens
from liger_jax.user_errors import UserError


@pytest.fixture
def library(tmp_path):
    """200 kB of words in two files."""
    words = np.random.default_rng(0).choice(["alpha", "beta", "gamma", "delta", "epsilon", "\n"], 40_000)
    for i, part in enumerate(np.split(words, 2)):
        (tmp_path / f"part{i}.txt").write_text(" ".join(part))
    return tmp_path


def test_text_is_tokenised_once_and_then_cached(library):
    first = text.load(str(library / "*.txt"), 300, library / "cache")
    cached = next((library / "cache").glob("*/tokens.npz"))
    written = cached.stat().st_mtime_ns
    again = text.load(str(library / "*.txt"), 300, library / "cache")
    assert cached.stat().st_mtime_ns == written
    assert first.vocab_size <= 300 and first.train.max() < first.vocab_size
    np.testing.assert_array_equal(first.train, again.train)


def test_one_token_in_twenty_is_held_out(library):
    corpus = text.load(str(library / "*.txt"), 300, library / "cache")
    share = len(corpus.held_out) / (len(corpus.train) + len(corpus.held_out))
    assert 0.02 < share < 0.08


def test_a_step_has_the_same_batch_in_every_run(library):
    corpus = text.load(str(library / "*.txt"), 300, library / "cache")
    np.testing.assert_array_equal(corpus.batch(7, 2, 16), corpus.batch(7, 2, 16))
    assert not np.array_equal(corpus.batch(7, 2, 16), corpus.batch(8, 2, 16))
    window = corpus.batch(7, 2, 16)[0]
    assert any(np.array_equal(window, corpus.train[i : i + 16]) for i in range(len(corpus.train) - 15))


def test_a_document_is_a_file_or_what_lies_between_held_out_pieces(library):
    corpus = text.load(str(library / "*.txt"), 300, library / "cache")
    tokenizer = Tokenizer.from_file(str(next((library / "cache").glob("*/tokenizer.json"))))
    first, second, third = map(tokenizer.decode, np.split(corpus.train, corpus.ends[:-1]))
    assert first == (library / "part0.txt").read_text()
    assert second + tokenizer.decode(corpus.held_out) + third == (library / "part1.txt").read_text()


def test_packed_batches_hold_every_token_once_an_epoch_and_are_told_by_their_step(rng, capsys):
    sizes = rng.integers(1, 40, 300)
    tokens = np.arange(sizes.sum(), dtype=np.int32)
    batch_of = text.batches(text.Text(tokens, np.cumsum(sizes), tokens[:0], 0, ""), 3, 16, packed=True)
    documents, rows, padding = re.fullmatch(
        r"packing: (\d+) documents in (\d+) rows, ([\d.]+)% of them padding\n", capsys.readouterr().out
    ).groups()
    batches = [batch_of(step) for step in range(2 * int(rows))]  # six epochs
    seen = np.concatenate([batch["input_ids"][batch["segment_ids"] > 0] for batch in batches])
    np.testing.assert_array_equal(np.bincount(seen), np.full(len(tokens), 6))
    assert len(seen) == sum(map(num_tokens, batches)) and documents == "300"
    assert float(padding) == pytest.approx(100 * (1 - len(tokens) / (int(rows) * 16)), abs=0.06)
    jax.tree.map(np.testing.assert_array_equal, batch_of(7), batches[7])


def test_unigram_loss_of_words_drawn_at_random_is_their_entropy():
    train = np.random.default_rng(0).integers(0, 8, 100_000).astype(np.int32)
    corpus = text.Text(train, np.array([len(train)]), train[:4096], 8, "")
    assert text.unigram_loss(corpus, corpus.held_out_batches(4, 64, most=16)) == pytest.approx(np.log(8), rel=1e-3)


def test_every_machine_has_a_text(tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(text, "_tokenize", lambda files, *_: seen.update(files=["".join(pieces) for pieces in files]))
    with pytest.raises(FileNotFoundError, match="tokens.npz"):  # nothing was written
        text.load(None, 8192, tmp_path)
    assert sum(map(len, seen["files"])) > 5_000_000
    assert any("The standard type hierarchy" in file for file in seen["files"])  # documentation, not only source


def test_of_python_s_text_no_more_files_are_read_than_are_needed(tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(text, "_tokenize", lambda files, *_: seen.update(sizes=[len("".join(f)) for f in files]))
    with pytest.raises(FileNotFoundError, match="tokens.npz"):
        text.load(None, 1024, tmp_path, characters=1_000_000)
    assert sum(seen["sizes"][:-1]) < 1_000_000 <= sum(seen["sizes"])


@pytest.mark.parametrize(
    ["name", "message"],
    [
        ("*.nothing", "No file matches"),
        ("short.txt", "has 5 characters"),
        ("*", "picture.png is not in UTF-8: byte 0x89 at 0"),
        ("zeros.bin", "zeros.bin is no text file: character 3 is a null"),
    ],
)
def test_text_that_is_not_there_or_too_short_or_none_is_refused(tmp_path, name, message):
    (tmp_path / "short.txt").write_text("hello")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / "zeros.bin").write_bytes(b"abc\0\0")
    with pytest.raises(UserError, match=message):
        text.load(str(tmp_path / name), 300, tmp_path)
