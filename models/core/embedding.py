"""The embedding, and the head that is tied to it. Both give the table a gradient, and the two are summed in float32."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer


def embed(table: Float[Array, "V D"], ids: Integer[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
    """The rows table[ids] in `dtype`; NaN where an id is not in [0, V).

    A frequent token's gradients are summed in float32 and rounded once, in a buffer of B·T rows.

    Args:
        table: one row for each token, any float dtype.
        ids: token ids.
        dtype: of the result.

    Returns:
        (B, T, D).
    """
    rows, _, _ = _looked_up(table, ids, dtype)
    return rows


def embed_tied(
    table: Float[Array, "V D"], ids: Integer[Array, "B T"], dtype: Any
) -> tuple[Float[Array, "B T D"], Float[Array, "V D"]]:
    """Looks tokens up as `embed` does, and returns the table as the head's weight too.

    The table's gradient is the sum of the head's and the embedding's, and it is rounded once. For that a bfloat16 table
    is handed to the head as float32; the compiler undoes this where products take bfloat16. The head's float32 gradient
    comes back in two parts: rounded to bfloat16 for all rows, and the rounding's error for the rows of the batch's
    tokens. Only those rows get anything from the embedding, so each row is rounded once.

    Args:
        table: one row for each token, any float dtype.
        ids: token ids.
        dtype: of the rows.

    Returns:
        The rows, (B, T, D), and the head: float32 for a bfloat16 table, else in the table's dtype. A float16 head's
        gradient is rounded before the embedding's is added, since float16 may not hold a rounding error.
    """
    rows, head, remainder = _looked_up(table, ids, dtype)
    if table.dtype == jnp.bfloat16:
        head = _widened(head, remainder, _tokens(ids, len(table)).rows)
    return rows, head


class _Tokens(NamedTuple):
    """The N tokens of a batch, sorted by id. At most U = min(N, V + 1) of them differ."""

    order: jax.Array  # (N,): sorts the flat batch
    place: jax.Array  # (N,): the place of each sorted token in `rows`
    rows: jax.Array  # (U,): the different ids in order, then ids beyond the table


def _tokens(ids, vocab_size) -> _Tokens:
    ids = jnp.where((ids >= 0) & (ids < vocab_size), ids, vocab_size).reshape(-1)
    order = jnp.argsort(ids)
    ids = ids[order]
    place = jnp.cumsum(jnp.diff(ids, prepend=-1) != 0) - 1
    beyond = vocab_size + jnp.arange(min(len(ids), vocab_size + 1))
    return _Tokens(order, place, beyond.at[place].set(ids))


_ROWS: Any = dict(unique_indices=True, indices_are_sorted=True, wrap_negative_indices=False)


def _look_up(table, ids, dtype):
    """The tokens' rows; the table; zeros (U, D). What comes back for the zeros is added to the table's gradient."""
    rows = table.at[ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False).astype(dtype)
    return rows, table, jnp.zeros((min(ids.size, len(table) + 1), table.shape[1]), jnp.float32)


def _look_up_forward(table, ids, dtype):
    return _look_up(table, ids, dtype), (ids,)


def _look_up_backward(dtype, residuals, cotangents):
    (ids,) = residuals
    dx, dtable, remainder = cotangents
    order, place, rows = _tokens(ids, len(dtable))
    dx = dx.reshape(-1, dx.shape[-1])[order].astype(jnp.float32)
    sums = remainder.at[place].add(dx, indices_are_sorted=True)
    if dtable.dtype == jnp.float32:  # one scatter, without the (U, D) array that is gathered below
        return dtable.at[rows].add(sums, mode="drop", **_ROWS), None
    sums += dtable.at[rows].get(mode="fill", fill_value=0, **_ROWS).astype(jnp.float32)
    return dtable.at[rows].set(sums.astype(dtable.dtype), mode="drop", **_ROWS), None


_looked_up = jax.custom_vjp(_look_up, nondiff_argnums=(2,))
_looked_up.defvjp(_look_up_forward, _look_up_backward)


@jax.custom_vjp
def _widened(table, remainder, rows):
    """A bfloat16 table as float32. Its gradient comes back rounded, beside the rounding's error in these rows."""
    return table.astype(jnp.float32)


def _widened_forward(table, remainder, rows):
    return _widened(table, remainder, rows), rows


def _widened_backward(rows, dtable):
    # Not a conversion to bfloat16 and back: the compiler may leave that out.
    rounded = jax.lax.reduce_precision(dtable, exponent_bits=8, mantissa_bits=7)
    row_of = lambda x: x.at[rows].get(mode="fill", fill_value=0, **_ROWS)
    return rounded.astype(jnp.bfloat16), row_of(dtable) - row_of(rounded), None


_widened.defvjp(_widened_forward, _widened_backward)
