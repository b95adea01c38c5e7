"""Tokens of a text that is too long to be encoded at once, from windows that overlap.

Two windows give the same tokens where they overlap, but for the places near their ends. They are joined at a token in
the middle of the overlap, around which both agree.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from liger_jax.data.pieces import failures
from liger_jax.user_errors import UserError

WINDOW = 2**20  # characters
OVERLAP = 2**12


def encoded(read: Callable[[int], str], encode: Callable[[str], Any]) -> Iterator[list[int]]:
    """The tokens of a long text. `read`: returns the next n characters of the text, and fewer at its end."""
    text = read(WINDOW)
    encoding, skipped = encode(text), 0  # the tokens before `skipped` were yielded already
    while len(text) >= WINDOW and (more := read(WINDOW - OVERLAP)):
        begin = len(text) - OVERLAP
        text = text[begin:] + more
        following = encode(text)
        at = _joint(encoding, begin, following)
        yield encoding.ids[skipped : _first(encoding, begin + at)]
        encoding, skipped = following, _first(following, at)
        if len(more) < WINDOW - OVERLAP:
            break
    yield encoding.ids[skipped:]


def with_added(
    read: Callable[[int], str], tokenizer: Any, repeat: Callable[[str, Sequence[int]], None]
) -> Iterator[list[int]]:
    """The tokens of a long text with the special ones that the tokenizer adds around every text."""

    def encode(text: str) -> Any:
        with failures():
            return tokenizer.encode(text, add_special_tokens=False)

    some = tokenizer.encode("a")
    own = [i for i, is_added in enumerate(some.special_tokens_mask) if not is_added]
    before, after = (some.ids[: own[0]], some.ids[own[-1] + 1 :]) if own else ([], [])
    last: list[int] = []
    for number, tokens in enumerate(encoded(read, encode)):
        if number == 0 and before and tokens[: len(before)] == before:
            repeat("begin", before)
        elif number == 0:
            yield before
        last = [*last, *tokens][-len(after) :] if after else []
        yield tokens
    if after and last == after:
        repeat("end", after)
    else:
        yield after


def _joint(encoding: Any, begin: int, following: Any) -> int:
    """A place in the next window at which the same token begins in both windows, which agree around it."""
    least, most = OVERLAP // 4, OVERLAP - OVERLAP // 4
    ours, theirs = _tokens(encoding, begin, least, most), _tokens(following, 0, least, most)
    if ours != theirs or not ours:
        raise UserError(
            f"the tokenizer splits a section of the text differently from the whole text, which is longer than "
            f"{WINDOW:,} characters. Split the file."
        )
    return ours[len(ours) // 2][0]


def _tokens(encoding: Any, begin: int, least: int, most: int) -> list[tuple[int, int, int]]:
    """Begin, end and id of the tokens within a range of a window; `begin` is the place of the text in that window."""
    first, last = _first(encoding, begin + least), _first(encoding, begin + most)
    each = zip(encoding.offsets[first:last], encoding.ids[first:last], strict=True)
    return [(start - begin, end - begin, token) for (start, end), token in each]


def _first(encoding: Any, place: int) -> int:
    """The index of the first token that begins at a place or after it."""
    offsets = encoding.offsets
    low, high = 0, len(offsets)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if offsets[middle][0] < place else (low, middle)
    return low
