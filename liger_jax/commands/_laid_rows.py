"""Rows of pieces that lie in files: each is made when it is asked for, so that all of them need no memory."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from liger_jax.commands._token_cache import Tokens
from liger_jax.ops.labels import IGNORE_INDEX
from liger_jax.training.packing import first_fit
from liger_jax.training.rows import parts

_FILLED = {"labels": IGNORE_INDEX, "pieces": -1}  # what stands at empty places, where it is not 0


class Column:
    """A column of rows, which is read as an array is: by rows, and then by places in them."""

    def __init__(self, made: Callable[[np.ndarray], np.ndarray], shape: tuple[int, ...], dtype: Any = np.int32):
        self._made, self.shape, self.ndim, self.dtype = made, shape, len(shape), np.dtype(dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> np.ndarray:
        of_rows, *rest = index if isinstance(index, tuple) else (index,)
        chosen = np.arange(len(self))[of_rows]
        columns = self._made(np.atleast_1d(chosen))
        return columns[(slice(None), *rest)] if chosen.ndim else columns[(0, *rest)]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or self.dtype)


class LaidRows(Mapping[str, Any]):
    """The rows of some pieces, as `pack`, `pad` or `pack_pairs` lays them."""

    def __init__(self, tokens: Tokens, pieces: list[np.ndarray], length: int, packed: bool):
        self.tokens, self.length, self._together = tokens, length, tokens.together
        self._shared = packed or self._together > 1 or tokens.meta["in_segments"]
        self.beside: dict[str, Any] = {}
        sizes, laid, row, begins, self.counts = tokens.sizes(), [], [], [], []
        for some in pieces:
            bundles = some.reshape(-1, self._together)
            if packed and self._together > 1:  # the largest first, which leaves less empty
                bundles = bundles[np.argsort(-sizes[bundles].sum(axis=1), kind="stable")]
            inside = sizes[bundles]
            if packed:
                rows, places = first_fit(inside.sum(axis=1).tolist(), length)
            else:
                rows, places = range(len(bundles)), [0] * len(bundles)
            laid.append(bundles.ravel())
            row.append(np.repeat(np.asarray(rows, np.int64) + sum(self.counts), self._together))
            begins.append((np.asarray(places, np.int64)[:, None] + np.cumsum(inside, axis=1) - inside).ravel())
            self.counts.append(max(rows, default=-1) + 1)
        self.pieces, rows, self._begins = np.concatenate(laid), np.concatenate(row), np.concatenate(begins)
        self._order = np.argsort(rows, kind="stable")  # places in `pieces`, by row
        self._ends = np.searchsorted(rows[self._order], np.arange(self.num_rows), side="right")

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return sum(self.counts)

    @property
    def most_in_a_row(self) -> int:
        """The most pieces that a row has."""
        return int(np.diff(self._ends, prepend=0).max())

    def __getitem__(self, name: str) -> Any:
        if name in self.beside:
            return self.beside[name]
        if name not in (*self, "pieces"):
            raise KeyError(name)
        return Column(functools.partial(self.made, name), (self.num_rows, self.length))

    def __iter__(self) -> Iterator[str]:
        of_tokens = ("segment_ids", "positions") if self._shared else ("token_mask",)
        yield from ("input_ids", "labels", *of_tokens, *self.beside)

    def __len__(self) -> int:
        return len(list(iter(self)))

    def made(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Some rows of a column.

        `name`: a model's argument, or "pieces" for the place in `pieces` of what stands at each place, -1 for none.
        """
        column = np.full((len(rows), self.length), _FILLED.get(name, 0), np.int32)
        for out, row in zip(column, rows.tolist(), strict=True):
            first = int(self._ends[row - 1]) if row else 0
            for number, place in enumerate(self._order[first : self._ends[row]].tolist(), 1):
                tokens, labels = self.tokens.arrays(int(self.pieces[place]))
                size, begin = len(tokens), self._begins[place]
                values: Any = {"input_ids": tokens, "labels": labels, "segment_ids": number, "token_mask": 1}
                values["pieces"] = place
                out[begin : begin + size] = np.arange(size) if name == "positions" else values[name]
        return column


class RowParts:
    """Rows in equal parts, as `training.rows.parts` makes them, each when it is asked for."""

    def __init__(self, rows: LaidRows | None, size: int):
        self._rows, self._size = rows, size

    def __iter__(self) -> Iterator[Any]:
        return iter(()) if self._rows is None else parts(self._rows, self._size)

    def __len__(self) -> int:
        return 0 if self._rows is None else -(-self._rows.num_rows // self._size)
