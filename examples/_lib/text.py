"""Text to train on: one's own files, or the source and documentation that come with Python.

`load` gives token ids to train on and token ids to hold out, from a byte-level BPE vocabulary trained on the text.
"""

import dataclasses
import hashlib
import importlib.util
import itertools
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from liger_jax.data.files import read_texts
from liger_jax.training import pack, share_of_padding
from liger_jax.user_errors import UserError

PIECE = 8192  # characters; the text is cut into pieces of these, and one in twenty is never trained on
HELD_OUT_EVERY = 20
# Tests and character tables are more than half of the standard library, and little like other text.
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "encodings", "lib2to3"}
Batch = np.ndarray | dict[str, np.ndarray]  # tokens, or a model's arguments


@dataclasses.dataclass(frozen=True)
class Text:
    """Token ids of a corpus.

    Attributes:
        train: (tokens,) int32, document after document.
        ends: (documents,) integers, the place after each document's last token. A document is a file, or the part of
            one that is between two held-out pieces.
        held_out: (tokens,) int32, from other pieces of the text.
        vocab_size: number of entries in the vocabulary.
        source: what the text is, in words.
    """

    train: np.ndarray
    ends: np.ndarray
    held_out: np.ndarray
    vocab_size: int
    source: str

    def batch(self, step: int, batch: int, length: int) -> np.ndarray:
        """Cuts random windows out of the training text: the same for the same step, whatever ran before.

        Args:
            step: the training step.
            batch: number of windows.
            length: tokens in each.

        Returns:
            (batch, length) int32.
        """
        starts = np.random.default_rng(step).integers(0, len(self.train) - length + 1, batch)
        return self.train[starts[:, None] + np.arange(length)]

    def held_out_batches(self, batch: int, length: int, most: int) -> np.ndarray:
        """Cuts the held-out text into windows side by side.

        Args:
            batch: windows in a batch.
            length: tokens in a window.
            most: no more batches than these.

        Returns:
            (batches, batch, length) int32.

        Raises:
            UserError: the held-out text does not fill one batch.
        """
        count = min(most, len(self.held_out) // (batch * length))
        if count == 0:
            raise UserError(
                f"The text holds out {len(self.held_out)} tokens, and one batch takes {batch}·{length}. "
                "Pass more text with --data, or a smaller --batch or --length."
            )
        return self.held_out[: count * batch * length].reshape(count, batch, length)


def batches(text: Text, batch: int, length: int, *, packed: bool) -> Callable[[int], Batch]:
    """The training data: random windows, or whole documents packed into rows. The share of padding is printed.

    Args:
        text: the corpus.
        batch: rows in a step.
        length: tokens in a row.
        packed: each row holds whole documents, or parts of one that is longer. Every row is in one step of an epoch.

    Returns:
        A step's batch by the step's number, whatever ran before: of `Text.batch`, or some rows of `pack`.
    """
    if not packed:
        return lambda step: text.batch(step, batch, length)
    rows = pack(np.split(text.train, text.ends[:-1]), length)
    count = len(rows["input_ids"])
    print(f"packing: {len(text.ends):,} documents in {count:,} rows, {share_of_padding(rows):.1%} of them padding")

    def batch_of(step):  # rows in a new order each epoch
        places = np.arange(step * batch, (step + 1) * batch)
        epochs = range(places[0] // count, places[-1] // count + 1)
        order = np.concatenate([np.random.default_rng(epoch).permutation(count) for epoch in epochs])
        chosen = order[places - epochs[0] * count]
        return {name: values[chosen] for name, values in rows.items()}

    return batch_of


def load(pattern: str | None, vocab_size: int, cache: Path, characters: int | None = None) -> Text:
    """Reads the text, trains the vocabulary on the training pieces and encodes; or takes it from the cache.

    Args:
        pattern: a file or a glob of UTF-8 text files; `None` for the text that comes with Python.
        vocab_size: entries of the BPE vocabulary; a short text gives fewer entries.
        cache: folder for vocabularies and token ids.
        characters: of the text that comes with Python, as many files as have so many; `None` for all.

    Returns:
        The corpus.

    Raises:
        UserError: a file cannot be read, or the text is shorter than one held-out piece needs.
    """
    if pattern is None:
        documents = list(_python_text(characters))
    else:
        documents = [*read_texts(pattern).values()]
    files = [[text[i : i + PIECE] for i in range(0, len(text), PIECE)] for text in documents]
    if sum(map(len, files)) < HELD_OUT_EVERY:
        raise UserError(f"The text has {sum(map(len, documents))} characters; {HELD_OUT_EVERY * PIECE} are the least.")
    made_of = f"{vocab_size} {PIECE} ends\0{chr(0).join(documents)}"
    fingerprint = hashlib.sha256(made_of.encode(errors="replace")).hexdigest()
    folder = cache / f"tokens-{fingerprint[:12]}"
    if not (folder / "tokens.npz").exists():
        _tokenize(files, vocab_size, folder)
    tokens = np.load(folder / "tokens.npz")
    what = "the source and documentation that come with Python" if pattern is None else pattern
    source = f"{what}: {len(documents)} files, {len(tokens['train']) + len(tokens['held_out']):,} tokens"
    return Text(tokens["train"], tokens["ends"], tokens["held_out"], int(tokens["vocab_size"]), source)


def unigram_loss(text: Text, batches: np.ndarray) -> float:
    """Scores held-out batches with the tokens' frequencies in the training text: the loss without any context.

    Args:
        text: the corpus. Its training part is counted, and one is added to each count.
        batches: (batches, batch, length); the first token of a window is not scored, as in the model.

    Returns:
        Mean negative log-probability in nats.
    """
    counts = np.bincount(text.train, minlength=text.vocab_size) + 1.0
    return float(-np.log(counts / counts.sum())[batches[..., 1:]].mean())


def _python_files() -> Iterator[Path]:
    library = Path(sysconfig.get_path("stdlib"))
    yield Path(importlib.util.find_spec("pydoc_data.topics").origin)  # the language reference, as help() shows it
    for path in sorted(library.rglob("*.py"), key=lambda path: path.relative_to(library).parts):
        folders = path.relative_to(library).parts[:-1]
        if not SKIPPED_FOLDERS.intersection(folders) and "pydoc_data" not in folders:
            yield path


def _python_text(characters: int | None) -> Iterator[str]:
    """The files' texts, until so many characters are read."""
    read = 0
    for path in _python_files():
        if characters is not None and read >= characters:
            return
        yield (text := path.read_text(encoding="utf-8", errors="replace"))
        read += len(text)


def _documents(files: list[list[str]]) -> tuple[list[list[str]], list[str]]:
    """Files in pieces → documents in pieces, and the pieces that are held out, at which documents are cut."""
    documents, held_out, count = [], [], 0
    for file in files:
        documents.append([])
        for piece in file:
            count += 1
            if count % HELD_OUT_EVERY:
                documents[-1].append(piece)
            else:
                held_out.append(piece)
                documents.append([])
    return [document for document in documents if document], held_out


def _tokenize(files: list[list[str]], vocab_size: int, folder: Path) -> None:
    documents, held_out = _documents(files)
    train = list(itertools.chain(*documents))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(train, trainer)

    def encode(texts):
        return [np.asarray(e.ids, np.int32) for e in tokenizer.encode_batch_fast(texts)]

    pieces = encode(train)
    ends_of_pieces = np.cumsum([len(piece) for piece in pieces])
    last_pieces = np.cumsum([len(document) for document in documents]) - 1
    tokens = dict(
        train=np.concatenate(pieces), ends=ends_of_pieces[last_pieces], held_out=np.concatenate(encode(held_out))
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    unfinished = folder / "unfinished.npz"  # renamed when whole: an interrupted run leaves no broken cache
    np.savez(unfinished, **tokens, vocab_size=tokenizer.get_vocab_size())
    unfinished.rename(folder / "tokens.npz")
