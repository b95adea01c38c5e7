"""The embedding, the head that may be tied to it, and logits. A tied table's two gradients are summed in float32."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from liger_jax.ops.meshes import align_varying
from liger_jax.pallas_kernels.tiles import is_symbolic


def embed(table: Float[Array, "V D"], ids: Integer[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
    """Looks up table[ids] in `dtype`; an id outside [0, V) gives NaN.

    The gradients of a token that occurs several times are summed in float32 and rounded once. The sum takes a float32
    buffer of min(B·T, V + 1) × D.
    """
    return _embedded(*align_varying(table, ids), dtype)


def sums_gradients(mesh_axes: tuple[str, ...], *, is_frozen: bool) -> bool:
    """Whether a tied table's two gradients are summed in float32, by `embed_tied`: on one device, if it is trained."""
    return not mesh_axes and not is_frozen


def tied_head_dtype(table_dtype: Any) -> Any:
    """The dtype of the head that `embed_tied` returns."""
    table_dtype = jnp.dtype(table_dtype)
    return jnp.dtype(jnp.float32) if table_dtype == jnp.bfloat16 else table_dtype


def embed_tied(
    table: Float[Array, "V D"], ids: Integer[Array, "B T"], dtype: Any
) -> tuple[Float[Array, "B T D"], Float[Array, "V D"]]:
    """Looks up table[ids] as `embed` does, and also returns the table as the weight of the tied head.

    The table's gradient is the sum of the head's gradient and the embedding's, rounded once. To that end the head gets
    a bfloat16 table as float32; the compiler undoes the conversion where products take bfloat16. The head's float32
    gradient then comes back in two terms: rounded to bfloat16 for the whole table, and the rounding error for the
    vectors of the batch's tokens. Only these vectors get a gradient from the embedding. It is added to them and their
    rounding error in float32, so that every vector is rounded once.

    Returns the embeddings (B, T, D), and the head (V, D): float32 for a bfloat16 table, else in the table's dtype. A
    float16 head's gradient is rounded before the embedding's is added, since float16 may not hold its rounding errors.
    """
    table, ids = align_varying(table, ids)
    embeddings, head, rounding_errors = _looked_up(table, ids, dtype)
    if tied_head_dtype(table.dtype) != table.dtype:
        head = _widened(head, rounding_errors, _sorted_tokens(ids, len(table)).distinct_ids)
    return embeddings, head


class _SortedTokens(NamedTuple):
    """The N tokens of a batch, sorted by id. At most U = min(N, V + 1) ids are distinct."""

    order: jax.Array  # (N,): sorts the flat batch
    place: jax.Array  # (N,): the place of each sorted token in `distinct_ids`
    distinct_ids: jax.Array  # (U,): ascending; those after the last distinct id are outside the table


def _sorted_tokens(ids, vocab_size) -> _SortedTokens:
    ids = jnp.where((ids >= 0) & (ids < vocab_size), ids, vocab_size).reshape(-1)
    order = jnp.argsort(ids)
    ids = ids[order]
    place = jnp.cumsum(jnp.diff(ids, prepend=-1) != 0, dtype=jnp.int32) - 1
    beyond = vocab_size + jnp.arange(_most_distinct(ids.size, vocab_size), dtype=ids.dtype)
    return _SortedTokens(order, place, beyond.at[place].set(ids))


def _most_distinct(num_tokens, vocab_size):
    """The most ids that differ. With a symbolic number of tokens the smaller number is not known."""
    return num_tokens if is_symbolic(num_tokens) else min(num_tokens, vocab_size + 1)


_DISTINCT: Any = dict(unique_indices=True, indices_are_sorted=True, wrap_negative_indices=False)


def _rows(table, ids, dtype):
    return table.at[ids].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False).astype(dtype)


def _sums(dx, tokens: _SortedTokens, start):
    """The sums (U, D) of the tokens' gradients by id, added to `start`."""
    dx = dx.reshape(-1, dx.shape[-1])[tokens.order].astype(jnp.float32)
    return start.at[tokens.place].add(dx, indices_are_sorted=True)


def _embed_forward(table, ids, dtype):
    return _rows(table, ids, dtype), (ids, jnp.zeros((len(table), 0), table.dtype))


def _embed_backward(dtype, residuals, dx):
    ids, like = residuals
    tokens, width = _sorted_tokens(ids, len(like)), dx.shape[-1]
    sums = _sums(dx, tokens, jnp.zeros((len(tokens.distinct_ids), width), jnp.float32))
    dtable = jnp.zeros((len(like), width), like.dtype)
    return dtable.at[tokens.distinct_ids].set(sums.astype(like.dtype), mode="drop", **_DISTINCT), None


_embedded = jax.custom_vjp(_rows, nondiff_argnums=(2,))
_embedded.defvjp(_embed_forward, _embed_backward)


def _look_up(table, ids, dtype):
    """table[ids]; the table; and zeros (U, D).

    The cotangent of the zeros holds the rounding errors of the table's cotangent.
    """
    return (
        _rows(table, ids, dtype),
        table,
        jnp.zeros((_most_distinct(ids.size, len(table)), table.shape[1]), jnp.float32),
    )


def _look_up_backward(dtype, residuals, cotangents):
    (ids,) = residuals
    dx, dtable, rounding_errors = cotangents
    tokens = _sorted_tokens(ids, len(dtable))
    distinct_ids, sums = tokens.distinct_ids, _sums(dx, tokens, rounding_errors)
    if dtable.dtype == jnp.float32:  # one scatter, without the (U, D) array that is gathered below
        return dtable.at[distinct_ids].add(sums, mode="drop", **_DISTINCT), None
    sums += dtable.at[distinct_ids].get(mode="fill", fill_value=0, **_DISTINCT).astype(jnp.float32)
    return dtable.at[distinct_ids].set(sums.astype(dtable.dtype), mode="drop", **_DISTINCT), None


_looked_up = jax.custom_vjp(_look_up, nondiff_argnums=(2,))
_looked_up.defvjp(lambda table, ids, dtype: (_look_up(table, ids, dtype), (ids,)), _look_up_backward)


@jax.custom_vjp
def _widened(table, rounding_errors, ids):
    """A bfloat16 table as float32. Its gradient is rounded.

    The gradient of `rounding_errors` is the error at these ids.
    """
    return table.astype(jnp.float32)


def _widened_backward(ids, dtable):
    # The compiler may drop a conversion to bfloat16 and back, but not this.
    rounded = jax.lax.reduce_precision(dtable, exponent_bits=8, mantissa_bits=7)
    at_ids = lambda x: x.at[ids].get(mode="fill", fill_value=0, **_DISTINCT)
    return rounded.astype(jnp.bfloat16), at_ids(dtable) - at_ids(rounded), None


_widened.defvjp(lambda table, rounding_errors, ids: (_widened(table, rounding_errors, ids), ids), _widened_backward)


def logit_options_of(config: Any) -> dict[str, Any]:
    """How logits come from the head's product, as the losses take it."""
    return dict(logit_scale=config.logit_scale, logit_softcap=config.final_logit_softcapping)


def head_logits(hidden: Float[Array, "B T D"], weight: Float[Array, "V D"]) -> Float[Array, "B T V"]:
    """hidden·weightᵀ in float32: both factors have hidden's dtype, and the accumulator is float32.

    The gradient's products take factors of hidden's dtype too, as in the fused loss. JAX's own derivative would compute
    them in float32, since the logits are float32.
    """
    return _head_logits(*align_varying(hidden, weight))


@jax.custom_vjp
def _head_logits(hidden, weight):
    return jnp.einsum("btd,vd->btv", hidden, weight.astype(hidden.dtype), preferred_element_type=jnp.float32)


def _head_logits_backward(residuals, dlogits):
    hidden, weight = residuals
    dlogits = dlogits.astype(hidden.dtype)
    dhidden = jnp.einsum("btv,vd->btd", dlogits, weight.astype(hidden.dtype))
    dweight = jnp.einsum("btv,btd->vd", dlogits, hidden, preferred_element_type=jnp.float32)
    return dhidden, dweight.astype(weight.dtype)


_head_logits.defvjp(lambda hidden, weight: (_head_logits(hidden, weight), (hidden, weight)), _head_logits_backward)
