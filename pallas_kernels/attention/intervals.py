"""The mask as intervals: query t attends to keys from first(t) to t, and queries from s to last(s) attend to key s.

One stable sort of the ids finds both, in O(T) memory (`Segments`). If an id recurs after another one, its interval
contains keys of other segments. Such rows are marked as foreign, and kernels compare their ids.

A kernel computes a block of rows at a time. It visits the columns that at least one of these rows sees, and masks only
the columns that some of them do not see.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

COLUMNS = 7  # columns of a `table`: the numbers of an entry
_FARTHEST = 2**30  # a window that no row is longer than


def is_numbered(ids: Any) -> Any:
    """Whether rows of ids (..., T) count documents from 1, with padding, 0, after them; (...,) bool."""
    has_token_after = (ids[..., :-1] == 0) & (ids[..., 1:] != 0)
    return ~(ids < 0).any(axis=-1) & ~has_token_after.any(axis=-1)


class Segments(NamedTuple):
    """Segments of packed rows (B, T), with their first and last positions; computed once for all layers.

    Use `Segments.of`. A segment consists of all positions of a row with the same id. Ids number documents from 1, and
    are 0 at the padding after them.

    Attributes:
        ids: (B, T) integers.
        first: (B, T) int32, the first position with the same id.
        last: (B, T) int32, the last position with the same id.
        is_foreign: (B,) whether some id of the row occurs again after another id.
        is_valid: (B,) whether the row's ids are valid; attention makes other rows NaN. `None` if that has been checked.

    Example:
        >>> Segments.of(jnp.array([[1, 1, 2, 0]])).first.tolist()
        [[0, 0, 2, 3]]
    """

    ids: jax.Array
    first: jax.Array
    last: jax.Array
    is_foreign: jax.Array
    is_valid: jax.Array | None = None

    @classmethod
    def of(cls, ids: jax.Array | np.ndarray) -> "Segments":
        """The segments of ids (B, T), by one stable sort."""
        ids = jnp.asarray(ids)
        place = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
        by_id, position = jax.lax.sort((ids, place), dimension=1, num_keys=1, is_stable=True)
        # XLA makes one kernel of the few gathers of a search. Running maxima would be a dozen kernels.
        find = lambda side: jax.vmap(functools.partial(jnp.searchsorted, side=side, method="scan_unrolled"))(by_id, ids)
        begin, end = find("left").astype(jnp.int32), find("right").astype(jnp.int32) - 1
        first, last = (jnp.take_along_axis(position, at, axis=1) for at in (begin, end))
        return cls(ids, first, last, jnp.any(last - first != end - begin, axis=1), is_numbered(ids))


class Bounds(NamedTuple):
    """The columns that rows see: low ≤ column ≤ high, and if ids are given, only columns of a row's own id.

    `low` and `high` are int32 of (B, rows), or (1, rows) for the whole batch. A row with low > high sees nothing.
    """

    low: Any
    high: Any
    is_foreign: Any  # (B,), or (1,): whether a row's intervals hold columns of other segments
    row_ids: Any = None  # (B, rows)
    column_ids: Any = None  # (B, columns)


class Intervals(NamedTuple):
    """The intervals of Tq queries and Tk keys, int32. Without segments one row serves the whole batch."""

    first: Any  # (B, Tq), the first key that a query sees
    until: Any  # (B, Tq), the last key that it sees
    since: Any  # (B, Tk), the first query that sees a key
    last: Any  # (B, Tk), the last query that sees it
    is_foreign: Any  # (B,), whether a row's intervals hold keys of other segments
    query_ids: Any = None  # (B, Tq)
    key_ids: Any = None  # (B, Tk)

    @property
    def of_queries(self) -> Bounds:
        """The bounds of the keys that queries see."""
        return Bounds(self.first, self.until, self.is_foreign, self.query_ids, self.key_ids)

    @property
    def of_keys(self) -> Bounds:
        """Which queries see a key."""
        return Bounds(self.since, self.last, self.is_foreign, self.key_ids, self.query_ids)


def intervals(
    length: int,
    segments: Segments | None = None,
    window: int | None = None,
    *,
    q_length: int | None = None,
    q_offset: jax.Array | int | None = None,
) -> Intervals:
    """The intervals of rows of `length` keys. Without segments they are NumPy arrays (1, T), constants of the program.

    A row has `q_length` queries, or one for each key. The first of them has the position `q_offset` among the keys,
    or, with None, 0.
    """
    q_offset = 0 if q_offset is None else q_offset
    q_length = length if q_length is None else q_length
    key, query = (np.arange(n, dtype=np.int32)[None] for n in (length, q_length))
    xp: Any = jnp if isinstance(q_offset, jax.Array) else np
    query = query + xp.int32(q_offset)
    before = _FARTHEST if window is None else min(window - 1, _FARTHEST)
    first, until = xp.maximum(query - before, 0), xp.minimum(query, length - 1)
    since, last = xp.maximum(key - xp.int32(q_offset), 0), xp.minimum(key - xp.int32(q_offset) + before, q_length - 1)
    if segments is None:
        return Intervals(first, until, since, last, np.zeros(1, bool))
    is_all = q_length == length and isinstance(q_offset, int) and q_offset == 0
    own = lambda x: x if is_all else jax.lax.dynamic_slice_in_dim(x, q_offset, q_length, axis=1)
    first = jnp.maximum(first, own(segments.first))
    last = jnp.minimum(last, segments.last - q_offset)
    return Intervals(first, until, since, last, segments.is_foreign, own(segments.ids), segments.ids)


def table(low: Any, high: Any, is_foreign: Any, batch: int, row_block: int, column_block: int) -> Any:
    """Blocks of rows with their columns in [low, high] (1|B, T) → int32 (B · blocks, 7), the most work first.

    An entry has seven numbers: the batch row, the block of rows, the first block of columns that some row sees, the
    first that all rows see, how many all rows see, how many some row sees, and whether ids must be compared.
    NumPy arrays stay NumPy arrays.
    """
    xp: Any = np if all(isinstance(x, np.ndarray) for x in (low, high, is_foreign)) else jnp
    low, high = (whole_blocks(x, row_block) for x in (low, high))
    blocks = low.shape[1] // row_block
    low, high = (x.reshape(x.shape[0], blocks, row_block) for x in (low, high))
    begin, end = low.min(axis=2) // column_block, high.max(axis=2) // column_block + 1
    all_begin, all_end = -(-low.max(axis=2) // column_block), (high.min(axis=2) + 1) // column_block
    foreign = is_foreign[:, None]
    count = xp.where(foreign, 0, xp.maximum(all_end - all_begin, 0))
    fields = [begin, xp.where(count > 0, all_begin, end), count, xp.maximum(end - begin, 0), foreign]
    fields = [xp.broadcast_to(x, (batch, blocks)).reshape(-1).astype(np.int32) for x in fields]
    number = np.arange(batch * blocks, dtype=np.int32)
    entries = xp.stack([number // blocks, number % blocks, *fields], axis=1)
    return entries[xp.argsort(-entries[:, 5], stable=True)]


def whole_blocks(x: Any, block: int) -> Any:
    """(B, T) → T rounded up to whole blocks. The last value is repeated."""
    xp: Any = np if isinstance(x, np.ndarray) else jnp
    return xp.pad(x, ((0, 0), (0, -x.shape[1] % block)), mode="edge")


@dataclasses.dataclass(frozen=True)
class Tile:
    """What a kernel's block computes at a time: a block of rows, which is an entry of `table`, of one head."""

    batch: Any
    rows: Any
    begin: Any
    all_begin: Any
    all_count: Any
    count: Any
    is_foreign: Any
    head: Any
    entry: Any

    @classmethod
    def read(cls, table_ref: Any, entry: Any, head: Any) -> "Tile":
        """The tile of a head at an entry of the flat table."""
        return cls(*[table_ref[entry * COLUMNS + i] for i in range(COLUMNS)], head=head, entry=entry)

    @property
    def num_masked(self) -> Any:
        """How many blocks of columns are seen by some rows, but not by all."""
        return self.count - self.all_count

    def column_block(self, n: Any) -> Any:
        """The n-th block of columns. The masked ones come first; they are on both sides of the others."""
        masked = self.begin + n
        masked = jnp.where(masked < self.all_begin, masked, masked + self.all_count)
        return jnp.where(n < self.num_masked, masked, self.all_begin + n - self.num_masked)

    def over_columns(self, step: Callable[..., Any], carry: Any) -> Any:
        """Calls carry = step(n, carry, is_masked=…) for all blocks of columns: the masked ones, then the others."""
        num_masked = self.count - self.all_count
        carry = jax.lax.fori_loop(0, num_masked, functools.partial(step, is_masked=True), carry)
        return jax.lax.fori_loop(num_masked, self.count, functools.partial(step, is_masked=False), carry)
