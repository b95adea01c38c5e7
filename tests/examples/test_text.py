"""The text that the examples train on."""

import numpy as np
import pytest

from examples._lib import text
from examples._lib.command import UserError


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


def test_unigram_loss_of_words_drawn_at_random_is_their_entropy():
    train = np.random.default_rng(0).integers(0, 8, 100_000).astype(np.int32)
    corpus = text.Text(train, train[:4096], 8, "")
    assert text.unigram_loss(corpus, corpus.held_out_batches(4, 64, most=16)) == pytest.approx(np.log(8), rel=1e-3)


def test_every_machine_has_a_text(tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(text, "_tokenize", lambda pieces, vocab_size, folder: seen.update(pieces=pieces))
    with pytest.raises(FileNotFoundError, match="tokens.npz"):  # nothing was written
        text.load(None, 8192, tmp_path)
    assert sum(map(len, seen["pieces"])) > 5_000_000
    assert any("The standard type hierarchy" in piece for piece in seen["pieces"])  # documentation, not only source


@pytest.mark.parametrize(
    ["name", "message"],
    [
        ("*.nothing", "No file matches"),
        ("short.txt", "has 5 characters"),
        ("*", "picture.png is no text file: byte 0x89 at 0 is no UTF-8. Let --data match text files only"),
        ("zeros.bin", "zeros.bin is no text file: character 3 is a null"),
    ],
)
def test_text_that_is_not_there_or_too_short_or_none_is_refused(tmp_path, name, message):
    (tmp_path / "short.txt").write_text("hello")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / "zeros.bin").write_bytes(b"abc\0\0")
    with pytest.raises(UserError, match=message):
        text.load(str(tmp_path / name), 300, tmp_path)
