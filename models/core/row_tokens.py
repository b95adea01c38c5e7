"""What a batch's rows hold, for all layers: which tokens belong together, and which positions are padding."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from liger_jax.ops import Segments


class RowTokens(NamedTuple):
    """What layers know of rows."""

    segments: Segments | None  # what attention stays within; `None` for rows of one document, which need no mask
    is_token: Bool[Array, "B row"] | None  # (B, T) bool of whole rows, which positions routers count; `None` for all
    query_scale: Float[Array, "#B T 1"] | None = None  # what queries are multiplied by; `None` for nothing


def attention_segments(
    segment_ids: Int[Array, "B T"] | None, attention_mask: Bool[Array, "B T"] | Int[Array, "B T"] | None
) -> Int[Array, "B T"] | None:
    """The segments of tokens. Padding is one more segment, so that every token sees at least itself.

    Returns the segments' ids. What the mask hides, wherever it stands, has the largest int32. `None` if all tokens
    belong to one segment.
    """
    if attention_mask is None:
        return segment_ids
    ids = jnp.int32(1) if segment_ids is None else segment_ids.astype(jnp.int32)
    return jnp.where(attention_mask.astype(bool), ids, jnp.int32(jnp.iinfo(jnp.int32).max))


def tokens_of(*masks: Num[Array, "B T"] | Bool[Array, "B T"] | None) -> Bool[Array, "B T"] | None:
    """Where rows hold a token."""
    given = [mask != 0 for mask in masks if mask is not None]
    return functools.reduce(jnp.logical_and, given) if given else None
