"""The tokens of a batch's rows, for all layers: which of them belong to one document, and which are padding."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num, Shaped

from liger_jax.ops import Segments


class TokensInOrder(NamedTuple):
    """A row's tokens in the order of a recurrence, in which masked positions come last."""

    documents: Int[Array, "B T"] | None  # the ids of their documents, 0 for padding; `None` for one document
    order: Int[Array, "B T"] | None  # their positions in the row; `None` where the row is in this order
    place: Int[Array, "B T"] | None  # the inverse of `order`
    is_token: Bool[Array, "B T"] | None  # which of them the mask does not hide; `None` without an order

    @classmethod
    def of(
        cls,
        segment_ids: Int[Array, "B T"] | None,
        attention_mask: Bool[Array, "B T"] | Int[Array, "B T"] | None,
    ) -> "TokensInOrder":
        """The tokens of rows, as a model's call gets them."""
        if attention_mask is None:
            return cls(segment_ids, None, None, None)
        is_token = attention_mask.astype(bool)
        order = jnp.argsort(~is_token, axis=1, stable=True).astype(jnp.int32)
        documents = None if segment_ids is None else jnp.where(is_token, segment_ids, 0)
        rows = cls(documents, order, jnp.argsort(order, axis=1).astype(jnp.int32), is_token)
        ordered = None if documents is None else rows.in_order(documents)
        return rows._replace(documents=ordered, is_token=rows.in_order(is_token))

    def in_order(self, x: Shaped[Array, "B T ..."]) -> Shaped[Array, "B T ..."]:
        """An array over positions, in this order."""
        return x if self.order is None else _taken(x, self.order)

    def in_place(self, x: Shaped[Array, "B T ..."]) -> Shaped[Array, "B T ..."]:
        """The inverse of `in_order`."""
        return x if self.place is None else _taken(x, self.place)


class RowTokens(NamedTuple):
    """The arrays over rows that layers use."""

    segments: Segments | None  # within which attention stays; `None` for rows of one document, without a mask
    is_token: Bool[Array, "B row"] | None  # (B, T) bool of whole rows, which positions routers count; `None` for all
    query_scale: Float[Array, "#B T 1"] | None = None  # a factor of queries; `None` for none
    in_order: TokensInOrder | None = None  # for layers without keys; `None` in models without such layers


def attention_segments(
    segment_ids: Int[Array, "B T"] | None, attention_mask: Bool[Array, "B T"] | Int[Array, "B T"] | None
) -> Int[Array, "B T"] | None:
    """The segments of tokens. Padding is one more segment, so that every token sees at least itself.

    Returns the segments' ids. Masked positions, wherever they are, have the largest int32. `None` if all tokens belong
    to one segment.
    """
    if attention_mask is None:
        return segment_ids
    ids = jnp.int32(1) if segment_ids is None else segment_ids.astype(jnp.int32)
    return jnp.where(attention_mask.astype(bool), ids, jnp.int32(jnp.iinfo(jnp.int32).max))


def tokens_of(*masks: Num[Array, "B T"] | Bool[Array, "B T"] | None) -> Bool[Array, "B T"] | None:
    """Where rows hold a token."""
    given = [mask != 0 for mask in masks if mask is not None]
    return functools.reduce(jnp.logical_and, given) if given else None


def _taken(x: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1)
