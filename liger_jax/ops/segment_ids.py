"""`segment_ids` of all ops, losses and models: a row's documents are numbered from 1, and 0 is padding after them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from liger_jax.ops import checks
from liger_jax.pallas_kernels.attention.intervals import is_numbered as is_numbered


def check_segment_ids(ids: jax.Array, prefix: str = "", name: str = "segment_ids") -> None:
    """Raises a ValueError where concrete ids break the rule. Traced ones make their row NaN instead: `numbered`."""
    if isinstance(ids, Tracer) or not ids.is_fully_addressable or not ids.size:
        return
    values = np.asarray(ids)
    if values.min() < 0:
        raise ValueError(f"{prefix}{name} hold {values.min()}, but must count from 1, and be 0 at padding.")
    wrong = ~is_numbered(values)
    if wrong.any():
        row = values[wrong][0]
        at = int(np.argmax((row[:-1] == 0) & (row[1:] != 0)))
        raise ValueError(
            f"{prefix}{name} hold a 0 at position {at} and {row[at + 1]} after it, but 0 is padding, which "
            "follows a row's tokens. Number documents from 1, and pass padding on the left as a model's attention_mask."
        )


def ids_of_rows(op: str, ids: Any, shape: tuple[int, ...]) -> Any:
    """An op's segment ids as JAX's array, after checking them; None stays None."""
    if ids is None:
        return None
    ids = checks.as_array(op, "segment_ids", ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{op}: segment_ids has dtype {ids.dtype}, but must hold integers.")
    checks.check_shape(op, "segment_ids", ids, shape, "it is (B, T), as the tokens are")
    check_segment_ids(ids, f"{op}: ")
    return ids


def document_numbers(ids: jax.Array) -> jax.Array:
    """The number of each token's document in its row (B, T), from 0; int32. Padding counts as one more document."""
    begins = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)))
    return jnp.cumsum(begins, axis=1, dtype=jnp.int32)


def default_positions(length: int, ids: Any) -> jax.Array:
    """The place of each token in its document (B, T), or in its row (1, T) without ids; from 0, int32."""
    order = jnp.arange(length, dtype=jnp.int32)[None]
    if ids is None:
        return order
    ids = jnp.asarray(ids)
    begins = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return order - jax.lax.cummax(jnp.where(begins, order, 0), axis=1)


def numbered(ids: jax.Array) -> jax.Array:
    """The factor that refuses rows under jit, where nothing can be raised.

    Returns (..., 1) float32: 1, or NaN for a row in which an id is negative or a 0 stands before another id.
    """
    return jnp.where(is_numbered(ids), 1.0, jnp.nan).astype(jnp.float32)[..., None]
