"""Strings that know where their characters are from, so that a template's output shows the message of each fragment.

For a template such a string equals the plain one, so that it prints the same text with any test or cut. The result of
adding, cutting, stripping, splitting, joining or replacing keeps the origin of each fragment; that of any other
operation, such as `upper`, keeps only the message.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, SupportsIndex

from liger_jax.chat.limits import check_size

NOBODY = -1  # the message of a text that is made of several messages, or of a message and the template's own words


class Origin(NamedTuple):
    """Where a text is from."""

    message: int  # index of the message, or `NOBODY`
    field: str  # the field of the message, or several, joined by "+"
    call: int = -1  # index of the tool call that the field belongs to, or -1
    # Place of the first character in the field, or `None` if the text is not a plain substring of the field.
    at: int | None = 0


class Event(NamedTuple):
    """What happens between two characters."""

    kind: str  # "at" where a loop comes to a message, "left" after the loop, "begin" and "end" of marked words
    loop: int = 0  # which of the template's loops it is
    message: int = NOBODY  # index of the message that the loop is at


class Fragment(NamedTuple):
    """A stretch of a text."""

    text: str  # its characters; none at an event
    origin: Origin | None = None  # where they are from; `None` for the template's own words
    event: Event | None = None  # what happens there

    def cut(self, begin: int, end: int) -> "Fragment":
        """The fragment from one character to another."""
        origin = self.origin
        if origin is not None and origin.at is not None:
            origin = origin._replace(at=origin.at + begin)
        return Fragment(self.text[begin:end], origin, self.event)


class Traced(str):
    """A string with its fragments."""

    __module__ = "builtins"  # errors of templates name it
    # The underscores keep them out of a template's reach. A text and its extension share a list, so that a template
    # that adds to a text a thousand times copies no fragment.
    _list: list[Fragment]
    _count: int

    def __new__(cls, fragments: Iterable[Fragment] | str):
        if isinstance(fragments, str):  # Jinja's sandbox makes the result of `format` so
            fragments = (Fragment(fragments, Origin(NOBODY, "", at=None)),)
        fragments = list(fragments)
        return cls._of("".join(fragment.text for fragment in fragments), fragments)

    @classmethod
    def _of(cls, text: str, fragments: list[Fragment]) -> "Traced":
        """The string with this text, which is that of the fragments."""
        self = str.__new__(cls, text)
        self._list, self._count = fragments, len(fragments)
        return self

    @property
    def _fragments(self) -> list[Fragment]:
        return self._list[: self._count]

    def __str__(self) -> str:
        return self

    def __add__(self, other: Any) -> Any:
        return join((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return join((other, self)) if isinstance(other, str) else NotImplemented

    def __mod__(self, other: Any) -> str:
        return mixed(super().__mod__(other), self, other)

    def __rmod__(self, other: Any) -> Any:
        return mixed(str.__mod__(other, (self,)), self) if isinstance(other, str) else NotImplemented

    def __iter__(self) -> Iterator[str]:
        return (self._between(i, i + 1) for i in range(len(self)))

    def __getitem__(self, key: Any) -> str:
        if isinstance(key, slice):
            begin, end, step = key.indices(len(self))
            return self._between(begin, max(begin, end)) if step == 1 else derived(super().__getitem__(key), self)
        begin = range(len(self))[key]
        return self._between(begin, begin + 1)

    def _between(self, begin: int, end: int) -> "Traced":
        """The characters from begin to end, with the events at both places and between them."""
        fragments, at = [], 0
        for fragment in self._fragments:
            first, last = max(begin - at, 0), min(end - at, len(fragment.text))
            if first < last:
                fragments.append(fragment.cut(first, last))
            elif fragment.event is not None and begin <= at <= end:
                fragments.append(fragment)
            at += len(fragment.text)
        return Traced(fragments)

    def strip(self, chars: str | None = None, /) -> str:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> str:
        return self._between(len(self) - len(super().lstrip(chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> str:
        return self._between(0, len(super().rstrip(chars)))

    def removeprefix(self, prefix: str, /) -> str:
        return self._between(len(self) - len(super().removeprefix(prefix)), len(self))

    def removesuffix(self, suffix: str, /) -> str:
        return self._between(0, len(super().removesuffix(suffix)))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._pieces(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._pieces(super().rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        return self._pieces(super().splitlines(keepends), None)

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        first, middle, last = self._pieces(super().partition(sep), "")
        return first, middle, last

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        first, middle, last = self._pieces(super().rpartition(sep), "")
        return first, middle, last

    def _pieces(self, pieces: Iterable[str], sep: str | None) -> list[str]:
        """The pieces where they stand in this string, one after the other, with `sep` or white space between them."""
        stretches, at = [], 0
        for piece in pieces:
            at = self.find(piece, at) if sep is None else at
            stretches.append(self._between(at, at + len(piece)))
            at += len(piece) + len(sep or "")
        return stretches

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old:
            return derived(super().replace(old, new, count), self, new)
        return join(self.split(old, count), new)

    def join(self, iterable: Iterable[str], /) -> str:
        return join(iterable, self)


def join(texts: Iterable[Any], sep: str = "") -> str:
    """The texts one after the other, each with its origin."""
    fragments: list[Fragment] = []
    pieces: list[str] = []
    size = 0
    for i, text in enumerate(texts):
        if i and sep:
            fragments += _fragments(sep)
            pieces.append(sep)
        if i == 0 and isinstance(text, Traced) and text._count == len(text._list):
            fragments = text._list  # nothing was added to it yet
        else:
            fragments += _fragments(text)
        pieces.append(text if isinstance(text, str) else str(text))
        size += len(pieces[-1]) + len(sep)
        check_size(size)
    return Traced._of("".join(pieces), fragments)


def derived(text: str, *sources: Any) -> str:
    """A text that is made of others by an operation that is not traced.

    Returns the text, whose origin is the message of its sources if they have a single one.
    """
    origins = {
        fragment.origin for source in sources for fragment in _all_fragments(source) if fragment.origin is not None
    }
    if not origins or not text:
        return text
    messages, calls = {origin.message for origin in origins}, {origin.call for origin in origins}
    fields = sorted({field for origin in origins for field in origin.field.split("+")})
    if len(messages) > 1:
        return Traced(text)
    return Traced(
        [Fragment(text, Origin(messages.pop(), "+".join(fields), calls.pop() if len(calls) == 1 else -1, None))]
    )


def mixed(text: str, *sources: Any) -> str:
    """A text that mixes the template's own words and others at unknown places, such as a filled pattern.

    Returns the text, whose origin is `NOBODY` if a source is from a message.
    """
    has_origin = any(fragment.origin is not None for source in sources for fragment in _all_fragments(source))
    return Traced(text) if has_origin and text else text


def traced(value: Any, origin: Origin) -> Any:
    """A value whose strings, keys included, know their origin."""
    if isinstance(value, dict):
        return {traced(key, origin): traced(each, origin) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [traced(each, origin) for each in value]
    return Traced([Fragment(value, origin)]) if isinstance(value, str) else value


def fragments_of(text: str) -> Sequence[Fragment]:
    """The fragments of a string."""
    return _fragments(text)


def _fragments(text: Any) -> Sequence[Fragment]:
    return text._fragments if isinstance(text, Traced) else (Fragment(str(text)),)


def _all_fragments(value: Any) -> Iterator[Fragment]:
    """The fragments of all strings in a value."""
    if isinstance(value, Traced):
        yield from value._fragments
    elif isinstance(value, dict):
        for item in value.items():
            yield from _all_fragments(item)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _all_fragments(each)


def _not_followed(name: str) -> Callable[..., Any]:
    """A method of `str` whose result keeps the message only."""
    method = getattr(str, name)

    @functools.wraps(method)
    def call(self: Traced, *args: Any, **options: Any) -> Any:
        return derived(method(self, *args, **options), self, args, options)

    return call


for _name in (
    "__mul__", "__rmul__", "capitalize", "casefold", "center", "expandtabs", "format", "format_map", "ljust",
    "lower", "rjust", "swapcase", "title", "translate", "upper", "zfill",
):  # fmt: skip
    setattr(Traced, _name, _not_followed(_name))
