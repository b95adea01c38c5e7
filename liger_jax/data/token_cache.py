"""Tokens of a run's data in files in its folder: made once, mapped into memory, and keyed by the data's content.

A folder of tokens has flat arrays: all tokens, whether each is scored, where each piece ends, and what is shown of
documents. `meta.json` is written last and has digests, so that a folder that is incomplete or damaged is made anew.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from liger_jax.data import kept_tokens, reading
from liger_jax.data.documents import Document
from liger_jax.data.pieces import Piece
from liger_jax.data.sources import DataSource
from liger_jax.data.token_files import ARRAYS, Writer, batches
from liger_jax.data.tokenizer import Tokenizer
from liger_jax.ops.labels import IGNORE_INDEX
from liger_jax.training import digests, disk
from liger_jax.training.files import read_json, write_json
from liger_jax.training.waiting import telling
from liger_jax.user_errors import UserError

FOLDER = "tokens"
NEW = ".new"
META = "meta.json"
_FORMAT = 4


class Tokens:
    """The pieces of documents, in files that are mapped into memory."""

    def __init__(self, folder: Path):
        self.folder, self.meta = folder, read_json(folder / META)
        (
            self._tokens,
            self._scored,
            self._ends,
            self._begins,
            self._document,
            self._totals,
            self._title_ends,
            self._labels,
            self._titles,
        ) = (_mapped(folder / name, dtype) for name, dtype in ARRAYS.items())

    def __len__(self) -> int:
        return len(self._ends)

    def sizes(self) -> np.ndarray:
        """The number of tokens of each piece, (pieces,) int64."""
        return np.diff(self._ends, prepend=0)

    def num_scored(self, pieces: np.ndarray) -> int:
        """How many tokens of some pieces the loss counts: never the first of a piece, which has no token before it."""
        ends, total = self._ends, 0
        for i in pieces.tolist():
            begin = int(ends[i - 1]) if i else 0
            total += int(np.count_nonzero(self._scored[begin + 1 : ends[i]]))
        return total

    @property
    def digest(self) -> str:
        """A text that identifies the tokens and their labels."""
        digests = self.meta["digests"]
        return f"{digests['tokens']} {self.meta['trained_on']} {digests['ends']}"

    def arrays(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of a piece, and their labels, both (tokens,) int32."""
        begin, end = int(self._ends[i - 1]) if i else 0, int(self._ends[i])
        tokens = np.array(self._tokens[begin:end])
        return tokens, np.where(self._scored[begin:end], tokens, IGNORE_INDEX).astype(np.int32)

    def piece(self, i: int) -> Piece:
        """A piece with what is shown of its document: its place, the roles of its messages, and "" for a prompt."""
        number = int(self._document[i])
        first, last = int(self._title_ends[number - 1]) if number else 0, int(self._title_ends[number])
        where, roles, has_prompt = json.loads(bytes(self._titles[first:last]))
        messages = None if roles is None else [{"role": role} for role in roles]
        document = Document(where, messages=messages, prompt="" if has_prompt else None)
        is_good = None if (label := int(self._labels[i])) < 0 else label > 0
        return Piece(*self.arrays(i), document, int(self._begins[i]), int(self._totals[number]), is_good)

    def are_good(self, pieces: np.ndarray) -> np.ndarray:
        """Whether the answers of some pieces are good, (pieces,) bool."""
        return np.asarray(self._labels)[pieces] > 0

    @property
    def together(self) -> int:
        """How many consecutive pieces share a row and are held out together."""
        return self.meta["together"]

    @property
    def kind(self) -> str:
        """The name of such a group of pieces."""
        return self.meta["kind"]

    @property
    def marks(self) -> dict[str, list[int]]:
        """The tokens that end answers, and those within them, as in `Tokenizer.marks`."""
        return self.meta["marks"]


def _mapped(path: Path, dtype: Any) -> np.ndarray:
    """The array of a file, of which an empty one cannot be mapped."""
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)


@contextlib.contextmanager
def leftovers_removed(out: Path) -> Iterator[None]:
    """A context for a run, before and after which tokens are removed that are unfinished or were not kept."""
    remove = lambda: [shutil.rmtree(path, ignore_errors=True) for path in (out / FOLDER).glob(f"*{NEW}")]
    remove()
    try:
        yield
    finally:
        remove()
        with contextlib.suppress(OSError):
            (out / FOLDER).rmdir()  # only if the folder is empty


def find(place: Path, key: str) -> Tokens | None:
    """The tokens of an earlier start, or of another run of the same data by this user, if they are complete."""
    if (tokens := _whole(place / key, key, f"of an earlier start, in {place}")) is not None:
        return tokens
    taken = place / f"{key}{NEW}"
    if not kept_tokens.take(key, taken):
        return None
    if (tokens := _whole(taken, key, f"of an earlier run with this data, from {kept_tokens.folder()}")) is None:
        kept_tokens.forget(key)
    return tokens


def _whole(folder: Path, key: str, which: str) -> Tokens | None:
    """The tokens of a folder, after a check that they are complete; prints `which` they are."""
    meta = read_json(folder / META)
    if meta.get("format") != _FORMAT or meta.get("key") != key:
        return None
    with contextlib.suppress(OSError), telling(f"checking {disk.size(folder_size(folder))} of tokens {which}"):
        if all(digests.of_file(folder / name) == meta["digests"].get(name) for name in ARRAYS):
            return Tokens(folder)
    return None


def write(
    place: Path,
    key: str,
    sources: Sequence[DataSource],
    read: Callable[[DataSource], Iterable[Document]],
    tokenizer: Tokenizer,
    length: int,
    refused: reading.Refused = None,
) -> Tokens:
    """Encodes documents into files, some at a time. Returns the tokens, in a folder that `keep` gives its name."""
    folder, of_rows = place / f"{key}{NEW}", list[OSError]()
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with Writer(folder) as writer:
            for source in sources:
                encode = lambda batch: tokenizer.encoded(batch, length, refused)
                documents = read(source) if source.paths else _noted(read(source), of_rows)
                for batch, pieces in _ahead(batches(documents, writer.leave_out), encode, ahead=refused is None):
                    writer.add(batch, pieces, refused, tokenizer.left_out)
                writer.end_source()
        meta = writer.meta() | {"format": _FORMAT, "key": key, "marks": tokenizer.marks, "chats": tokenizer.chats}
        meta |= {"together": tokenizer.together, "in_segments": tokenizer.in_segments, "kind": tokenizer.kind}
        write_json(folder / META, meta | {"notes": tokenizer.notes(length)})
    except OSError as error:
        if error in of_rows:  # of a program's rows or a dataset, not of these files
            raise
        if disk.is_full(error):
            raise disk.full("The tokens of the data", place, folder_size(folder)) from error
        raise UserError(f"The tokens of the data cannot be written to {place}: {error.strerror or error}.") from error
    return Tokens(folder)


def _noted(documents: Iterable[Document], errors: list[OSError]) -> Iterator[Document]:
    """The documents; an `OSError` of their rows is added to `errors`."""
    try:
        yield from documents
    except OSError as error:
        errors.append(error)
        raise


def _ahead(
    documents: Iterable[list[Document]], encode: Callable[[list[Document]], Iterable[Piece]], *, ahead: bool
) -> Iterator[tuple[list[Document], Iterable[Piece]]]:
    """Some documents at a time and their pieces, while the next ones are being read and encoded if `ahead`.

    An error of the next ones follows those of the ones before.
    """
    before, failed, each = None, None, iter(documents)
    while failed is None:
        try:
            batch = next(each)
            following = batch, encode(batch)
        except StopIteration:
            break
        except Exception as error:
            failed = error
            continue
        if before is not None:
            yield before
        before = following if ahead else None
        if not ahead:
            yield following
    if before is not None:
        yield before
    if failed is not None:
        raise failed


def keep(tokens: Sequence[Tokens]) -> None:
    """Gives the tokens of a run their names, and removes those of other runs beside them."""
    names = {each.folder.name.removesuffix(NEW) for each in tokens}
    for each in tokens:
        if each.folder.name.endswith(NEW):
            kept = each.folder.with_name(each.folder.name.removesuffix(NEW))
            shutil.rmtree(kept, ignore_errors=True)
            with contextlib.suppress(OSError):  # if an open file cannot be moved, the next start makes the tokens anew
                each.folder.rename(kept)
                each.folder = kept
        if each.meta.get("key") == each.folder.name:
            kept_tokens.keep(each.folder, each.folder.name)
    for place in {each.folder.parent for each in tokens}:
        for other in place.iterdir():
            if other.name not in names and read_json(other / META).get("key") == other.name:
                shutil.rmtree(other, ignore_errors=True)


def folder_size(folder: Path) -> int:
    """The bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
