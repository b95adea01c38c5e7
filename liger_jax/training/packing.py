"""Documents of any length in rows of one length: packed with little padding, or padded. No token is lost."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from liger_jax.ops.labels import IGNORE_INDEX

Bundle = list[tuple[np.ndarray, np.ndarray]]  # tokens and labels of segments that share a row

WINDOW = 1024  # the most recent rows that are tried for a document, so that the time grows only linearly


def pack(
    documents: Iterable[Any], length: int, *, labels: Iterable[Any] | None = None, pad_id: int = 0
) -> Mapping[str, np.ndarray]:
    """Packs documents into rows for `model(**batch)`: each goes into the first row that has room for it.

    A document is a segment of its row: attention, positions and loss stay within it. A document longer than a row is
    cut into segments of `length` tokens and a remainder. Rows are in the order of their first documents.

    Args:
        documents: token ids, a sequence of integers for each document. Empty documents are skipped.
        length: tokens in a row, at least 1.
        labels: for each document its labels, unshifted, -100 where a token is not scored; `None` for the tokens.
        pad_id: the token id of padding.

    Returns:
        The model's arguments, int32 arrays of (rows, length): `input_ids`; `labels`, which are -100 at padding;
        `segment_ids`, which number a row's segments from 1 and are 0 at padding; and `positions`, which number a
        segment's tokens from 0.

    Raises:
        TypeError: a document's tokens are not integers.
        ValueError: `length` is less than 1, a document is not a sequence, its labels have another length, or there is
            no token.

    Example:
        >>> batch = pack([[5, 6, 7], [8, 9], [10]], length=4)
        >>> batch["input_ids"].tolist()
        [[5, 6, 7, 10], [8, 9, 0, 0]]
        >>> batch["segment_ids"].tolist()
        [[1, 1, 1, 2], [1, 1, 0, 0]]
        >>> share_of_padding(batch)
        0.25

    References:
        First fit, which takes at most 1.7 times the fewest rows: Johnson et al., "Worst-Case Performance Bounds for
        Simple One-Dimensional Packing Algorithms", 1974.
    """
    segments = _cut("pack", documents, length, labels)
    return _laid([[segment] for segment in segments], length, pad_id)[0]


def pack_pairs(
    chosen: Iterable[Any],
    rejected: Iterable[Any],
    length: int,
    *,
    chosen_labels: Iterable[Any] | None = None,
    rejected_labels: Iterable[Any] | None = None,
    pad_id: int = 0,
) -> tuple[Mapping[str, np.ndarray], np.ndarray, np.ndarray]:
    """Packs the pairs of a preference loss into rows: both responses of a pair are successive segments of one row.

    In the array (rows, segments) that `sequence_log_probs` returns, chosen responses are `[:, 0::2]` and rejected ones
    `[:, 1::2]`, so micro-batches and meshes can divide it by rows. `take_segments` returns them in the order of pairs.
    The longest pairs are packed first, each into the first row with room.

    Args:
        chosen: token ids, a sequence of integers for each pair: prompt and preferred response.
        rejected: the same with the other response.
        length: tokens in a row, at least as many as both responses of the longest pair have together.
        chosen_labels: for each of `chosen` its labels, unshifted, -100 where a token is not scored, as in the prompt;
            `None` for the tokens.
        rejected_labels: the same for `rejected`.
        pad_id: the token id of padding.

    Returns:
        (batch, chosen places, rejected places). The batch holds a model's arguments, as `pack` makes them. Places are
        int32 (pairs, 2): row and segment, both counted from 0, so that segment s has the id s + 1.

    Raises:
        ValueError: a pair is longer than a row, a response has no token, or there are no pairs.

    Example:
        >>> batch, chosen, rejected = pack_pairs([[5, 6], [7, 8]], [[5, 9, 9], [7, 3]], length=5)
        >>> batch["segment_ids"].tolist(), chosen.tolist(), rejected.tolist()
        ([[1, 1, 2, 2, 2], [1, 1, 2, 2, 0]], [[0, 0], [1, 0]], [[0, 1], [1, 1]])
    """
    op = "pack_pairs"
    sides = []
    for name, side, labels in (("chosen", chosen, chosen_labels), ("rejected", rejected, rejected_labels)):
        tokens = [_as_tokens(op, name, number, response) for number, response in enumerate(side)]
        sides.append(list(zip(tokens, _scored(op, tokens, labels, name, f"{name}_labels"), strict=True)))
    if len(sides[0]) != len(sides[1]):
        raise ValueError(
            f"{op}: there are {len(sides[0])} chosen and {len(sides[1])} rejected responses; pass one of each."
        )
    batch, places = _packed_bundles(op, "pair", list(map(list, zip(*sides, strict=True))), length, pad_id)
    return batch, places[0::2], places[1::2]


def pack_completions(
    groups: Iterable[Iterable[Any]], length: int, *, labels: Iterable[Iterable[Any]] | None = None, pad_id: int = 0
) -> tuple[Mapping[str, np.ndarray], np.ndarray]:
    """Packs groups of completions into rows: all completions of a group are successive segments of one row.

    The longest groups are packed first, each into the first row with room. If advantages have been computed before,
    groups of one completion each need less padding.

    Args:
        groups: for each prompt a list of completions, each of which is the token ids of prompt and completion.
        length: tokens in a row, at least as many as the longest group has together.
        labels: labels in the same form, unshifted, -100 where a token is not scored, as in the prompt; `None` for the
            tokens.
        pad_id: the token id of padding.

    Returns:
        (batch, places). The batch holds a model's arguments, as `pack` makes them. Places are int32 (completions, 2),
        in the order of groups and of completions in them: row and segment, both counted from 0. Pass them to
        `place_segments` with the advantages.

    Raises:
        ValueError: a group is longer than a row, a completion has no token, or there are no completions.

    Example:
        >>> batch, places = pack_completions([[[5, 6], [5, 7]], [[8, 9, 9]]], length=4)
        >>> batch["input_ids"].tolist(), places.tolist()
        ([[5, 6, 5, 7], [8, 9, 9, 0]], [[0, 0], [0, 1], [1, 0]])
    """
    op = "pack_completions"
    groups = [list(group) for group in groups]
    all_labels = [None] * len(groups) if labels is None else [list(group) for group in labels]
    if len(all_labels) != len(groups):
        raise ValueError(f"{op}: there are labels of {len(all_labels)} groups and {len(groups)} groups; pass one each.")
    bundles = []
    for number, (group, targets) in enumerate(zip(groups, all_labels, strict=True)):
        name, label_name = f"groups[{number}]", f"labels[{number}]"
        tokens = [_as_tokens(op, name, place, completion) for place, completion in enumerate(group)]
        bundles.append(list(zip(tokens, _scored(op, tokens, targets, name, label_name), strict=True)))
    return _packed_bundles(op, "group", bundles, length, pad_id)


def pad(
    documents: Iterable[Any], length: int, *, labels: Iterable[Any] | None = None, pad_id: int = 0
) -> Mapping[str, np.ndarray]:
    """Puts each document into separate rows for `model(**batch)`, padded at their ends.

    A document longer than a row is cut into rows of `length` tokens and a remainder. Arguments and errors are those of
    `pack`.

    Returns:
        The model's arguments, int32 arrays of (rows, length): `input_ids`; `labels`, which are -100 at padding; and
        `token_mask`, 1 at tokens and 0 at padding. Since attention is causal, no token attends to the padding after it,
        and the routers of a mixture of experts do not count it.

    Example:
        >>> batch = pad([[5, 6, 7], [8, 9]], length=4)
        >>> batch["input_ids"].tolist(), batch["labels"].tolist()
        ([[5, 6, 7, 0], [8, 9, 0, 0]], [[5, 6, 7, -100], [8, 9, -100, -100]])
        >>> batch["token_mask"].tolist()
        [[1, 1, 1, 0], [1, 1, 0, 0]]
    """
    segments = _cut("pad", documents, length, labels)
    return _laid([[segment] for segment in segments], length, pad_id, packed=False)[0]


def share_of_padding(batch: Mapping[str, np.ndarray]) -> float:
    """The fraction of a batch's positions that are padding.

    Args:
        batch: what `pack` or `pad` returns, or some of its rows.

    Returns:
        A number in [0, 1).

    Example:
        >>> share_of_padding(pack([[1, 2, 3]], length=4))
        0.25
    """
    return float(np.mean(batch["segment_ids" if "segment_ids" in batch else "token_mask"] == 0))


def _cut(op: str, documents: Any, length: int, labels: Any) -> Bundle:
    """Tokens and labels of each document, cut where they are longer than a row."""
    _check_length(op, length)
    documents = [_as_tokens(op, "documents", number, document) for number, document in enumerate(documents)]
    segments = [
        (tokens[begin : begin + length], targets[begin : begin + length])
        for tokens, targets in zip(documents, _scored(op, documents, labels), strict=True)
        for begin in range(0, len(tokens), length)
    ]
    if not segments:
        raise ValueError(f"{op}: {len(documents)} documents have no token; pass at least one with tokens.")
    return segments


def _check_length(op: str, length: Any) -> None:
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ValueError(f"{op}: length={length!r} must be a Python int of at least 1.")


def _as_tokens(op: str, name: str, number: int, document: Any) -> np.ndarray:
    tokens = np.asarray(document)
    if tokens.ndim != 1:
        raise ValueError(f"{op}: {name}[{number}] has shape {tokens.shape}, but must be a sequence of token ids.")
    if tokens.size and not np.issubdtype(tokens.dtype, np.integer):
        raise TypeError(f"{op}: {name}[{number}] holds {tokens.dtype}; token ids are integers.")
    least, most = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    if tokens.size and not (least <= tokens.min() and tokens.max() <= most):
        raise ValueError(f"{op}: {name}[{number}] holds a number beyond int32, in which rows are laid; check the ids.")
    return tokens


def _scored(
    op: str, documents: list[np.ndarray], labels: Any, name: str = "documents", label_name: str = "labels"
) -> list[np.ndarray]:
    """The labels of documents; the tokens themselves if there are none."""
    if labels is None:
        return documents
    scored = [_as_tokens(op, label_name, number, document) for number, document in enumerate(labels)]
    if len(scored) != len(documents):
        raise ValueError(f"{op}: there are {len(scored)} {label_name} and {len(documents)} {name}; pass one for each.")
    for number, (tokens, targets) in enumerate(zip(documents, scored, strict=True)):
        if len(tokens) != len(targets):
            raise ValueError(
                f"{op}: {label_name}[{number}] has length {len(targets)} and {name}[{number}] length {len(tokens)}; "
                "pass one label for each token, -100 where it is not scored."
            )
    return scored


def _packed_bundles(
    op: str, what: str, bundles: list[Bundle], length: int, pad_id: int
) -> tuple[Mapping[str, np.ndarray], np.ndarray]:
    """Bundles of segments that share a row, laid after checks, and the places of all segments in order."""
    _check_length(op, length)
    if not any(bundles):
        raise ValueError(f"{op}: there is no {what} to pack; pass at least one.")
    for number, bundle in enumerate(bundles):
        sizes = [len(tokens) for tokens, _ in bundle]
        if 0 in sizes:
            raise ValueError(
                f"{op}: sequence {sizes.index(0)} of {what} {number} has no token, so it would have no segment; "
                f"leave the {what} out."
            )
        if sum(sizes) > length:
            raise ValueError(
                f"{op}: {what} {number} has {sum(sizes)} tokens, but a row has length={length}, and no {what} is "
                f"split or cut; shorten its sequences, leave it out, or pass length={sum(sizes)} or more."
            )
    # The largest first, which leaves less padding; `places` says where each is.
    order = sorted(range(len(bundles)), key=lambda number: -sum(len(tokens) for tokens, _ in bundles[number]))
    batch, segments = _laid([bundles[number] for number in order if bundles[number]], length, pad_id)
    sizes = np.array([len(bundle) for bundle in bundles])
    owners = np.repeat(order, sizes[order])
    return batch, segments[np.argsort(owners, kind="stable")]


def _laid(
    bundles: list[Bundle], length: int, pad_id: int, packed: bool = True
) -> tuple[Mapping[str, np.ndarray], np.ndarray]:
    """The model's arguments, and the row and number in the row of each segment, from 0."""
    rows = Rows(*places([[len(tokens) for tokens, _ in bundle] for bundle in bundles], length, packed), length)
    segments = [segment for bundle in bundles for segment in bundle]
    batch = {
        name: rows.column(name, np.arange(rows.num_rows), segments.__getitem__, pad_id) for name in columns(packed)
    }
    return batch, rows.segments


def columns(in_segments: bool) -> tuple[str, ...]:
    """The names of the model's arguments in rows."""
    return ("input_ids", "labels", *(("segment_ids", "positions") if in_segments else ("token_mask",)))


class FirstFit:
    """Rows of `length` tokens for pieces: each goes into the first row with room, or if not `packed` into its own."""

    def __init__(self, length: int, packed: bool = True):
        self._length, self._packed, self._opened = length, packed, 0
        self._room = np.zeros(WINDOW, np.int64)  # the free places of the open rows

    def __call__(self, size: int) -> tuple[int, int]:
        """The row of a piece of `size` tokens, and the place in the row at which it begins."""
        first = max(0, self._opened - WINDOW)
        fits = np.flatnonzero(self._room[first : self._opened] >= size) if self._packed else np.zeros(0, int)
        row = first + int(fits[0]) if fits.size else self._opened
        if row == self._opened:
            self._room = np.pad(self._room, (0, row)) if row == len(self._room) else self._room
            self._opened, self._room[row] = row + 1, self._length
        begin = self._length - int(self._room[row])
        self._room[row] -= size
        return row, begin


def places(bundles: Iterable[Sequence[int]], length: int, packed: bool = True) -> tuple[list[int], list[int]]:
    """The row of each piece, and where it begins there; `bundles` are the sizes of pieces that are adjacent."""
    place, rows, begins = FirstFit(length, packed), [], []
    for sizes in bundles:
        row, begin = place(sum(sizes))
        for size in sizes:
            rows.append(row)
            begins.append(begin)
            begin += size
    return rows, begins


class Rows:
    """Pieces in rows, by the row of each and the place at which it begins there."""

    def __init__(self, rows: Any, begins: Any, length: int):
        rows, self.begins, self.length = np.asarray(rows, np.int64), np.asarray(begins, np.int64), length
        self.num_rows = int(rows.max(initial=-1)) + 1
        self._order = np.argsort(rows, kind="stable")  # the indices of the pieces, by row
        self._ends = np.searchsorted(rows[self._order], np.arange(self.num_rows), side="right")

    @property
    def counts(self) -> np.ndarray:
        """(rows,): the number of pieces in each."""
        return np.diff(self._ends, prepend=0)

    @property
    def segments(self) -> np.ndarray:
        """(pieces, 2) int32: the row of each piece, and its number in the row, both from 0."""
        segments = np.empty((len(self._order), 2), np.int32)
        segments[self._order, 0] = np.repeat(np.arange(self.num_rows), self.counts)
        segments[self._order, 1] = np.arange(len(self._order)) - np.repeat(self._ends - self.counts, self.counts)
        return segments

    def column(
        self, name: str, rows: np.ndarray, read: Callable[[int], tuple[np.ndarray, np.ndarray]], pad_id: int = 0
    ) -> np.ndarray:
        """(rows, length) int32 of some rows: a model's argument, or "pieces" for the number of the piece at each place,
        -1 for none. `read` gives a piece's tokens and labels.
        """
        empty = {"input_ids": pad_id, "labels": IGNORE_INDEX, "pieces": -1}.get(name, 0)
        column = np.full((len(rows), self.length), empty, np.int32)
        for out, row in zip(column, rows.tolist(), strict=True):
            first = int(self._ends[row - 1]) if row else 0
            for number, piece in enumerate(self._order[first : self._ends[row]].tolist(), 1):
                tokens, labels = read(piece)
                values: Any = {"input_ids": tokens, "labels": labels, "segment_ids": number, "token_mask": 1}
                values |= {"pieces": piece, "positions": np.arange(len(tokens))}
                begin = self.begins[piece]
                out[begin : begin + len(tokens)] = values[name]
        return column
