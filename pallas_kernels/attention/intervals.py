"""What a position may see, as intervals: query t sees keys from first(t) to t, and key s is seen from s to last(s).

One stable sort of the ids finds both, in O(T) memory (`Segments`). Where an id comes back after another, the interval
between holds foreign keys, which kernels have to look for; such rows are told. Blocks of an interval kernel run over
what somebody in the block sees, and know which of it everybody sees: there nothing is masked.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

COLUMNS = 7  # of a block's entry in a table: see `Table`


class Segments(NamedTuple):
    """Segments of packed rows (B, T), and where they begin and end; made once, for all layers that attend to them.

    `of` makes one. A segment is all positions of a row with one id, wherever they stand.

    Attributes:
        ids: (B, T) integers.
        first: (B, T) int32, the first position with a position's id.
        last: (B, T) int32, the last one.
        is_foreign: (B,) whether some id comes back after another.

    Example:
        >>> Segments.of(jnp.array([[5, 5, 2, 2]])).first.tolist()
        [[0, 0, 2, 2]]
    """

    ids: jax.Array
    first: jax.Array
    last: jax.Array
    is_foreign: jax.Array

    @classmethod
    def of(cls, ids: jax.Array) -> "Segments":
        """The segments of ids (B, T), by one stable sort.

        Args:
            ids: (B, T) integers.

        Returns:
            The segments.
        """
        batch, length = ids.shape
        place = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), ids.shape)
        by_id, position = jax.lax.sort((ids, place), dimension=1, num_keys=1, is_stable=True)
        changes = by_id[:, 1:] != by_id[:, :-1]
        edge = jnp.ones((batch, 1), bool)
        begins = jnp.concatenate([edge, changes], axis=1)
        ends = jnp.concatenate([changes, edge], axis=1)
        # Positions grow within a run of equal ids, and the next run's are not looked at before it begins.
        begin = jax.lax.cummax(jnp.where(begins, place, 0), axis=1)
        end = jax.lax.cummin(jnp.where(ends, place, length - 1), axis=1, reverse=True)
        of_run = lambda at: jnp.take_along_axis(position, at, axis=1)
        first, last = of_run(begin), of_run(end)
        is_foreign = jnp.any(last - first != end - begin, axis=1)
        rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
        back = lambda x: jnp.zeros_like(x).at[rows, position].set(x, unique_indices=True)
        return cls(ids, back(first), back(last), is_foreign)


class Intervals(NamedTuple):
    """For queries (B, T) and keys (B, T), int32; one row serves the whole batch where ids are the same."""

    first: Any  # key that a query sees
    last: Any  # query that sees a key
    is_foreign: Any  # (B,), whether a row's intervals hold keys of other segments


def intervals(length: int, segments: Segments | None = None, window: int | None = None) -> Intervals:
    """Without segments NumPy arrays of (1, T): constants of the program; with them arrays of (B, T)."""
    t = np.arange(length, dtype=np.int32)[None]
    reach = length if window is None else min(window, length)
    first, last = np.maximum(t - (reach - 1), 0), np.minimum(t + (reach - 1), length - 1)
    if segments is None:
        return Intervals(first, last, np.zeros(1, bool))
    return Intervals(jnp.maximum(first, segments.first), jnp.minimum(last, segments.last), segments.is_foreign)


def table(low: Any, high: Any, is_foreign: Any, batch: int, row_block: int, column_block: int) -> Any:
    """Blocks of rows whose columns lie in [low, high] (1|B, T) → int32 (B · blocks, 7), those with most work first.

    An entry: batch row, block of rows, first block of columns that somebody sees, first that everybody sees, how many
    everybody sees, how many somebody sees, whether ids must be compared. NumPy arrays stay NumPy arrays.
    """
    xp: Any = np if all(isinstance(x, np.ndarray) for x in (low, high, is_foreign)) else jnp
    low, high = (whole_blocks(x, row_block) for x in (low, high))
    blocks = low.shape[1] // row_block
    low, high = (x.reshape(x.shape[0], blocks, row_block) for x in (low, high))
    begin, end = low.min(axis=2) // column_block, high.max(axis=2) // column_block + 1
    all_begin, all_end = -(-low.max(axis=2) // column_block), (high.min(axis=2) + 1) // column_block
    foreign = is_foreign[:, None]
    count = xp.where(foreign, 0, xp.maximum(all_end - all_begin, 0))
    fields = [begin, xp.where(count > 0, all_begin, end), count, end - begin, foreign]
    fields = [xp.broadcast_to(x, (batch, blocks)).reshape(-1).astype(np.int32) for x in fields]
    number = np.arange(batch * blocks, dtype=np.int32)
    entries = xp.stack([number // blocks, number % blocks, *fields], axis=1)
    return entries[xp.argsort(-entries[:, 5], stable=True)]


def whole_blocks(x: Any, block: int) -> Any:
    """(B, T) → T rounded up: what is added is as the last."""
    xp: Any = np if isinstance(x, np.ndarray) else jnp
    return xp.pad(x, ((0, 0), (0, -x.shape[1] % block)), mode="edge")
