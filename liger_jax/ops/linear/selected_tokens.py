"""The logits of a few tokens of the vocabulary, the same for all rows, by a product with their rows of the head."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec as P

from liger_jax.ops import meshes
from liger_jax.ops.block_quantized import BlockQuantized
from liger_jax.ops.eager import compiled_once
from liger_jax.ops.labels import as_labels
from liger_jax.ops.layout import gathered, names
from liger_jax.ops.linear.split_head import HeadSplit
from liger_jax.pallas_kernels.cross_entropy import formulas
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import LinearOptions
from liger_jax.pallas_kernels.fused_linear_cross_entropy.formulas import put, raw_logits


def as_selected(op: str, ids: Any, vocab_size: int) -> jax.Array | None:
    """The ids as an int32 array, with −1 for every id that is not a token. None passes.

    Raises a TypeError or ValueError unless they are tokens of the vocabulary, as far as they are concrete.
    """
    if ids is None:
        return None
    ids = as_labels(ids, op, "selected_token_ids")
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{op}: selected_token_ids have dtype {ids.dtype}, but must be integers.")
    if ids.ndim != 1 or not ids.size:
        raise ValueError(
            f"{op}: selected_token_ids have shape {ids.shape}, but must be (K,), one token or more, the same for all "
            "rows; a token of each row is what labels are for."
        )
    are_tokens = (ids >= 0) & (ids < vocab_size)
    if not isinstance(ids, Tracer) and ids.is_fully_addressable:
        values = np.asarray(ids)
        wrong = values[(values < 0) | (values >= vocab_size)]
        if wrong.size:
            raise ValueError(f"{op}: selected_token_ids hold {wrong[0]}, but must be in [0, {vocab_size}).")
    return jnp.where(are_tokens, ids, -1).astype(jnp.int32)


class _Places(NamedTuple):
    """Where the tokens (K,) are among the entries of the vocabulary that this device has."""

    entries: jax.Array  # int32; 0 for tokens of other devices
    are_own: jax.Array  # bool
    are_tokens: jax.Array  # bool; false for −1


def logits_of_selected(
    hidden: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    ids: jax.Array,
    counts: jax.Array,
    options: LinearOptions,
    vocab_axis: str | None,
    split: HeadSplit | None,
) -> tuple[jax.Array, jax.Array]:
    """The weight for the loss's other products, and the logits (N, K): 0 in rows that do not count, NaN for no token.

    `ids` (K,) int32 count from the whole vocabulary's first token, and −1 is no token. `weight` is this device's shard
    of the vocabulary if `vocab_axis` splits it, and of that shard if `split` says so.
    """
    entries = weight.shape[options.vocab_dim] * (1 if split is None else split.shards[options.vocab_dim])
    places = _places(ids, entries, vocab_axis)
    weight, place = meshes.align_varying(weight, places.entries)
    weight, rows = _rows(weight, place, options.vocab_dim, split)
    own_bias = None if bias is None else bias[place]
    z = _logits(hidden, rows, own_bias, places, counts, options, vocab_axis)
    return weight, _of_first_names(z, ids)


def logits_of_quantized(
    hidden: jax.Array,
    head: BlockQuantized,
    ids: jax.Array,
    counts: jax.Array,
    options: LinearOptions,
    vocab_axis: str | None,
) -> jax.Array:
    """The logits (N, K) of `logits_of_selected` by a quantised head, of which these rows alone are made dense."""
    places = _places(ids, head.shape[0], vocab_axis)
    rows = head[places.entries].astype(hidden.dtype)
    return _logits(hidden, rows, None, places, counts, options, vocab_axis)


def _of_first_names(z: jax.Array, ids: jax.Array) -> jax.Array:
    """The logits (N, K), those of a token named several times from its first column alone.

    So the token's row of the head has one gradient. Several would be rounded to the head's dtype, each, before they are
    added, and they may cancel.
    """
    return _columns(z, jnp.argmax(ids[:, None] == ids[None, :], axis=1))


@jax.custom_vjp
def _columns(z: jax.Array, first: jax.Array) -> jax.Array:
    return jnp.take(z, first, axis=1)


@compiled_once
def _into_columns(first: jax.Array, dz: jax.Array) -> jax.Array:
    # One column at a time: the order in which a scatter adds values of one index is not fixed.
    is_first = first == jnp.arange(first.size)
    add = lambda k, total: total.at[:, first[k]].add(jnp.where(is_first[k], 0.0, dz[:, k]))
    return jax.lax.fori_loop(0, first.size, add, jnp.where(is_first, dz, 0.0))


_columns.defvjp(lambda z, first: (_columns(z, first), first), lambda first, dz: (_into_columns(first, dz), None))


def _places(ids: jax.Array, entries: int, vocab_axis: str | None) -> _Places:
    own = ids if vocab_axis is None else ids - jax.lax.axis_index(vocab_axis).astype(jnp.int32) * entries
    are_own = (own >= 0) & (own < entries) & (ids >= 0)
    return _Places(jnp.where(are_own, own, 0), are_own, ids >= 0)


def _logits(
    hidden: jax.Array,
    rows: jax.Array,
    bias: jax.Array | None,
    places: _Places,
    counts: jax.Array,
    options: LinearOptions,
    vocab_axis: str | None,
) -> jax.Array:
    # The values of an ignored row must not reach the rows' gradient.
    x = jnp.where(counts[:, None], hidden, jnp.zeros((), hidden.dtype))
    z = formulas.transform(raw_logits(x, rows, bias, options), options.logit)
    z = jnp.where(places.are_own[None, :] & counts[:, None], z, 0.0)
    z = z if vocab_axis is None else jax.lax.psum(z, vocab_axis)
    return jnp.where(counts[:, None] & ~places.are_tokens[None, :], jnp.nan, 1.0) * z


def _rows(weight: jax.Array, ids: jax.Array, vocab_dim: int, split: HeadSplit | None) -> tuple[jax.Array, jax.Array]:
    """The weight, and its rows of these entries in its layout, of all shards if it is split."""
    if split is None:
        return _with_rows(weight, ids, vocab_dim)
    owners, entries = names(split.axes[vocab_dim]), weight.shape[vocab_dim]
    is_own = jnp.ones(ids.shape, bool)
    if owners:
        ids = ids - jax.lax.axis_index(owners).astype(jnp.int32) * entries
        is_own = (ids >= 0) & (ids < entries)
    weight, rows = _with_rows(weight, jnp.where(is_own, ids, 0), vocab_dim)
    # Their gradient is summed over the devices in float32.
    rows = jnp.where(jnp.expand_dims(is_own, 1 - vocab_dim), rows.astype(jnp.float32), 0.0)
    rows = jax.lax.psum(rows, owners) if owners else rows
    width = split.axes[1 - vocab_dim] or None
    return weight, gathered(rows, P(None, width) if vocab_dim == 0 else P(width, None))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _with_rows_vjp(weight: jax.Array, ids: jax.Array, vocab_dim: int) -> tuple[jax.Array, jax.Array]:
    return weight, jnp.take(weight, ids, axis=vocab_dim)


def _forward_rule(weight, ids, vocab_dim):
    return _with_rows_vjp(weight, ids, vocab_dim), ids


def _backward_rule(vocab_dim: int, ids: jax.Array, cotangents: Any):
    return _added(vocab_dim, ids, *cotangents), None


@functools.partial(compiled_once, static_argnums=0)
def _added(vocab_dim: int, ids: jax.Array, dweight: jax.Array, drows: jax.Array) -> jax.Array:
    # In place, since a separate gradient of the rows would be another array of the weight's size; and row by row, since
    # the order in which a scatter adds values of one index is not fixed.
    take = jax.lax.dynamic_slice_in_dim

    def add(k, dweight):
        row, own = take(dweight, ids[k], 1, axis=vocab_dim), take(drows, k, 1, axis=vocab_dim)
        return put(dweight, row + own, ids[k], vocab_dim)

    return jax.lax.fori_loop(0, ids.size, add, dweight)


_with_rows_vjp.defvjp(_forward_rule, _backward_rule)
_with_rows = jax.jit(_with_rows_vjp, static_argnums=2, inline=True)
