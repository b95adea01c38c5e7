"""Pieces of documents: tokens, and labels for those that are trained on."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from liger_jax.data.documents import Document
from liger_jax.ops.labels import IGNORE_INDEX
from liger_jax.user_errors import UserError, refusals_kept

NO_TOKEN = "no token to train on"  # why a document is left out, where nothing more is known
NO_TEXT = "no text"  # why one is that has nothing but white space
_MOST_SAID = 500  # characters of another library's error


@dataclasses.dataclass(frozen=True)
class Piece:
    """The tokens of a document, or of a section of it that fills a row."""

    tokens: np.ndarray  # (tokens,) int32
    labels: np.ndarray  # (tokens,) int32, the token where it is trained on and -100 elsewhere
    document: Document | None = None  # the document
    begin: int = 0  # the index of the first token in the document
    total: int = 0  # how many tokens the document has; 0 where that is not known yet
    is_good: bool | None = None  # the label of a single answer; `None` for a piece without one

    @property
    def is_scored(self) -> bool:
        """Whether a token is trained on. The first one cannot be, since nothing precedes it."""
        return bool(np.any(self.labels[1:] != IGNORE_INDEX))


@contextlib.contextmanager
def failures() -> Iterator[None]:
    """A context for the tokenizer. A panic of its Rust code is not an `Exception`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise UserError(f"the tokenizer fails: {str(error)[:_MOST_SAID]}.") from error


@contextlib.contextmanager
def errors_at(where: str) -> Iterator[None]:
    """A context for a document, whose errors begin with its place."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


class Begun:
    """The encodings of texts, which a thread makes while this one does other work."""

    def __init__(self, documents: list[Document], texts: list[str], encode: Callable[[list[str]], list[Any]]):
        self.documents, self._texts, self._encode = documents, texts, encode
        pool = ThreadPoolExecutor(1)
        self._made = pool.submit(self._all) if texts else None
        pool.shutdown(wait=False)

    def encodings(self, refused: dict[str, UserError] | None) -> list[Any]:
        """The encodings, `None` for one that is refused. If all at once fail, they are encoded one by one."""
        try:
            return [] if self._made is None else self._made.result()
        except UserError:
            encodings: list[Any] = [None] * len(self._texts)
            for i, document in enumerate(self.documents):
                with refusals_kept(refused, document.where), errors_at(document.where), failures():
                    (encodings[i],) = self._encode(self._texts[i : i + 1])
            return encodings

    def _all(self) -> list[Any]:
        with failures():
            return self._encode(self._texts)


def offsets_of(encoded: Any) -> np.ndarray:
    """Where each token begins and ends in the text, (tokens, 2)."""
    numbers = itertools.chain.from_iterable(encoded.offsets)
    return np.fromiter(numbers, np.int64, 2 * len(encoded)).reshape(-1, 2)


def places(offsets: np.ndarray, text: str, span: tuple[int, int]) -> np.ndarray:
    """The tokens of a span of text. One that begins earlier belongs to it if it has only white space there."""
    (begin, end), (begins, ends) = span, offsets.reshape(-1, 2).T
    before = begin
    while before and text[before - 1].isspace():
        before -= 1
    return np.flatnonzero((begins >= before) & (begins < end) & ((begins >= begin) | (ends > begin)))


def completed(offsets: np.ndarray, prompt_size: int) -> np.ndarray:
    """Which tokens are a completion's: those that end after its prompt, and what the tokenizer adds after them.

    A token that holds the end of the prompt and the begin of the completion is the completion's: without it the
    completion's first characters would not be learnt.

    `offsets`: (tokens, 2), where each token begins and ends in the text; (0, 0) for those that are added.
    """
    is_completion = offsets.reshape(-1, 2)[:, 1] > prompt_size
    if is_completion.any():
        is_completion[np.flatnonzero(is_completion)[-1] :] = True
    return is_completion


def no_place(length: int) -> str:
    """The reason to leave out a document of which a whole answer is cut off."""
    return f"a prompt that leaves no room for its answer in --length={length}"


def nothing_to_train_on(why: Iterable[str] = ()) -> UserError:
    """The error for data without a token to train on."""
    if not (reasons := "; ".join(dict.fromkeys(why))):
        return UserError("The data has no token to train on: each is predicted from those before it.")
    cure = " Pass a larger --length, or leave it out." if "--length" in reasons else ""
    return UserError(f"Nothing is left to train on: {reasons}.{cure}")
