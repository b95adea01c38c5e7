"""Looking tokens up in an embedding, with a gradient that is summed in float32."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def embed(table: Float[Array, "V D"], ids: Integer[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
    """The rows table[ids] in `dtype`; NaN where an id is not in [0, V).

    A frequent token's gradients are summed in float32 and rounded once, in a buffer of B·T rows; then each row is
    added to the table's gradient once. With a tied head that gradient is the head's, so that there is one such array.

    Args:
        table: one row for each token, any float dtype.
        ids: token ids.
        dtype: of the result.

    Returns:
        (B, T, D).
    """
    return table.at[ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False).astype(dtype)


def _forward(table, ids, dtype):
    return embed(table, ids, dtype), (ids, jnp.empty((0, table.shape[0]), table.dtype))


def _backward(dtype, residuals, dx):
    ids, like = residuals
    vocab_size, table_dtype = like.shape[1], like.dtype
    order = jnp.argsort(ids.reshape(-1))
    tokens, dx = ids.reshape(-1)[order], dx.reshape(-1, dx.shape[-1])[order]
    first = jnp.concatenate([jnp.ones(1, bool), tokens[1:] != tokens[:-1]])
    place = jnp.cumsum(first) - 1  # of a token among the different ones
    sums = jnp.zeros(dx.shape, jnp.float32).at[place].add(dx.astype(jnp.float32), indices_are_sorted=True)
    rows = (vocab_size + jnp.arange(len(tokens))).at[place].set(tokens)  # beyond the table where there are no more
    options = dict(mode="drop", unique_indices=True, indices_are_sorted=True, wrap_negative_indices=False)
    table = jnp.zeros((vocab_size, dx.shape[1]), table_dtype)
    return table.at[rows].add(sums.astype(table_dtype), **options), None


embed.defvjp(_forward, _backward)
