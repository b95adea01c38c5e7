"""Which tokens belong to which sequence: a row is one sequence, or it is packed and holds several segments."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from liger_jax.ops.checks import as_array, check_shape
from liger_jax.ops.segment_ids import check_segment_ids, numbered


@dataclasses.dataclass(frozen=True)
class Sequences:
    """The S sequences of each row of tokens (..., T). Numbers of sequences are (..., S); S is 1 without packing.

    All of it is comparisons and sums, and no scatter: the same bits every time, and rows stay where a mesh has them.
    """

    ids: jax.Array | None  # (..., T) int32: 1 to `count`, and 0 at empty places; None without packing
    count: int

    def tokens(self, mask: jax.Array) -> jax.Array:
        """The mask without empty places."""
        return mask if self.ids is None else mask & (self.ids != 0)

    def sum(self, x: jax.Array) -> jax.Array:
        """(..., T) → (..., S). A row that holds more segments than `count` has NaN, in its gradient too."""
        if self.ids is None:
            return jnp.sum(x, axis=-1, keepdims=True)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.sum(jnp.where(self._members(), x[..., None, :], jnp.zeros((), x.dtype)), axis=-1)
        fits = self.fits()
        return fits * jnp.sum(jnp.where(self._members(), (fits * x)[..., None, :], 0.0), axis=-1)

    def mean(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        """(..., T) → (..., S), over the tokens of the mask, where x must be 0 elsewhere; 0 if there are none."""
        return self.sum(x) / jnp.maximum(self.sum(mask.astype(jnp.int32)), 1).astype(jnp.float32)

    def spread(self, x: jax.Array) -> jax.Array:
        """(..., S) → (..., T), each token its sequence's number, and 0 at empty places; (..., 1) without packing."""
        if self.ids is None:
            return x
        spread = jnp.sum(jnp.where(self._members(), x[..., None], jnp.zeros((), x.dtype)), axis=-2)
        return spread * self.fits() if jnp.issubdtype(x.dtype, jnp.floating) else spread.astype(x.dtype)

    def exist(self) -> jax.Array:
        """(..., S) bool, which segments have a token, whether or not one counts."""
        assert self.ids is not None
        return jnp.any(self._members(), axis=-1)

    def rank(self, mask: jax.Array) -> jax.Array:
        """(..., T) int32, how many tokens of the mask its sequence has up to and with this one."""
        if self.ids is None:
            return jnp.cumsum(mask, axis=-1, dtype=jnp.int32)
        members = self._members()
        ranks = jnp.cumsum(members & mask[..., None, :], axis=-1, dtype=jnp.int32)
        return jnp.sum(jnp.where(members, ranks, 0), axis=-2)

    def fits(self) -> jax.Array:
        """(..., 1) float32: 1, or NaN for a row with a segment that no place is kept for, or with 0 before an id."""
        assert self.ids is not None
        is_held = jnp.all(self.ids <= self.count, axis=-1, keepdims=True)
        return jnp.where(is_held, numbered(self.ids), jnp.nan)

    def _members(self) -> jax.Array:
        """(..., S, T) bool, which tokens are a segment's. It is fused into the sum over it, and never stored."""
        assert self.ids is not None
        numbers = jnp.arange(1, self.count + 1, dtype=jnp.int32).reshape((1,) * (self.ids.ndim - 1) + (-1, 1))
        return self.ids[..., None, :] == numbers


def sequences_of(op: str, segment_ids: Any, num_segments: Any, shape: tuple[int, ...]) -> Sequences:
    """The sequences of tokens of `shape`, after checks."""
    if (segment_ids is None) != (num_segments is None):
        raise ValueError(
            f"{op}: segment_ids and num_segments belong together; pass both for packed rows, where num_segments is the "
            "largest number of segments in a row, or neither."
        )
    if segment_ids is None:
        return Sequences(None, 1)
    if isinstance(num_segments, bool) or not isinstance(num_segments, int):
        raise TypeError(
            f"{op}: num_segments is a {type(num_segments).__name__}, but must be a Python int, because results have "
            "this size; take int(segment_ids.max()) outside of jit."
        )
    if num_segments < 1:
        raise ValueError(f"{op}: num_segments={num_segments} must be at least 1, the segments of the fullest row.")
    ids = as_array(op, "segment_ids", segment_ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{op}: segment_ids have dtype {ids.dtype}, but must be integers: 1, 2, … and 0 where empty.")
    check_shape(op, "segment_ids", ids, shape, "one entry for each token")
    _check_range(op, ids, num_segments)
    return Sequences(ids.astype(jnp.int32), num_segments)


def _check_range(op: str, ids: jax.Array, num_segments: int) -> None:
    """Raises a ValueError where a concrete id has no place. A traced one makes its row's results NaN instead."""
    check_segment_ids(ids, f"{op}: ")
    if isinstance(ids, Tracer) or not ids.is_fully_addressable or not ids.size:
        return
    values = np.asarray(ids)
    if values.max() > num_segments:
        raise ValueError(
            f"{op}: segment_ids hold {values.max()}, but num_segments={num_segments} keeps a place for segments 1 to "
            f"{num_segments}; pass num_segments={values.max()} or more."
        )
