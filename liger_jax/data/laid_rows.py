"""Rows of pieces that are stored in files: each is made when it is read, so that they take no memory together."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from liger_jax.data.token_cache import Tokens
from liger_jax.training import packing


class Column:
    """A column of rows, which is indexed like an array: by rows, and then by places in them."""

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
    """The rows of some pieces, laid as by `pack`, `pad` or `pack_pairs`."""

    def __init__(self, tokens: Tokens, pieces: list[np.ndarray], length: int, packed: bool):
        self.tokens, self.length, self.packed, self._together = tokens, length, packed, tokens.together
        self.in_segments: bool = packed or self._together > 1 or tokens.meta["in_segments"]
        self.beside: dict[str, Any] = {}
        sizes, laid, rows, begins, self.counts = tokens.sizes(), [], [], [], []
        for some in pieces:
            bundles = some.reshape(-1, self._together)
            if packed and self._together > 1:  # the largest first, which leaves less empty
                bundles = bundles[np.argsort(-sizes[bundles].sum(axis=1), kind="stable")]
            own, places = packing.places(sizes[bundles].tolist(), length, packed)
            laid.append(bundles.ravel())
            rows.append(np.array(own, np.int64) + sum(self.counts))
            begins.append(np.array(places, np.int64))
            self.counts.append(max(own, default=-1) + 1)
        self.pieces = np.concatenate(laid)
        of_pieces = np.concatenate(rows)
        self._rows = packing.Rows(of_pieces, np.concatenate(begins), length)
        self.sizes = np.bincount(of_pieces, sizes[self.pieces], self._rows.num_rows).astype(np.int64)  # tokens of a row

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return self._rows.num_rows

    @property
    def most_in_a_row(self) -> int:
        """The largest number of pieces in a row."""
        return int(self._rows.counts.max())

    def of_pieces(self, values: np.ndarray, most: int) -> np.ndarray:
        """A column (rows, `most`) float32 with one number for each of `pieces`, and 0 where a row has fewer."""
        column = np.zeros((self.num_rows, most), np.float32)
        rows, numbers = self._rows.segments.T
        column[rows, numbers] = values
        return column

    def __getitem__(self, name: str) -> Any:
        if name in self.beside:
            return self.beside[name]
        if name not in (*self, "pieces"):
            raise KeyError(name)
        return Column(functools.partial(self.made, name), (self.num_rows, self.length))

    def __iter__(self) -> Iterator[str]:
        yield from (*packing.columns(self.in_segments), *self.beside)

    def __len__(self) -> int:
        return len(list(iter(self)))

    def made(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Some rows of a column.

        `name`: a model's argument, or "pieces" for the index in `pieces` of the piece at each place, -1 for none.
        """
        return self._rows.column(name, rows, lambda place: self.tokens.arrays(int(self.pieces[place])))
