"""The logits of a few tokens of the vocabulary, the same for all rows, by a product with their rows of the head."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec as P

from liger_jax.ops import meshes
from liger_jax.ops.layout import gathered, names
from liger_jax.ops.linear.split_head import HeadSplit
from liger_jax.pallas_kernels.cross_entropy import formulas
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import LinearOptions
from liger_jax.pallas_kernels.fused_linear_cross_entropy.formulas import put, raw_logits


def check_selected(op: str, ids: jax.Array | None, vocab_size: int) -> None:
    """Raises a TypeError or ValueError unless these are tokens of the vocabulary, as far as they are concrete."""
    if ids is None:
        return
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{op}: selected_token_ids have dtype {ids.dtype}, but must be integers.")
    if ids.ndim != 1:
        raise ValueError(
            f"{op}: selected_token_ids have shape {ids.shape}, but must be (K,), the same tokens for all rows; a token "
            "of each row is what labels are for."
        )
    if isinstance(ids, Tracer) or not ids.is_fully_addressable:
        return
    values = np.asarray(ids)
    wrong = values[(values < 0) | (values >= vocab_size)]
    if wrong.size:
        raise ValueError(f"{op}: selected_token_ids hold {wrong[0]}, but must be in [0, {vocab_size}).")


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

    `ids` (K,) count from the whole vocabulary's first token. `weight` is this device's shard of the vocabulary if
    `vocab_axis` splits it, and of that shard if `split` says so.
    """
    entries = weight.shape[options.vocab_dim] * (1 if split is None else split.shards[options.vocab_dim])
    shards, own = 1, ids.astype(jnp.int32)
    if vocab_axis is not None:
        shards = jax.lax.axis_size(vocab_axis)
        own -= jax.lax.axis_index(vocab_axis).astype(jnp.int32) * entries
    is_own = (own >= 0) & (own < entries)
    weight, place = meshes.align_varying(weight, jnp.where(is_own, own, 0))
    weight, rows = _rows(weight, place, options.vocab_dim, split)
    own_bias = None if bias is None else bias[place]
    # A row that does not count may hold what must not reach the rows' gradient.
    x = jnp.where(counts[:, None], hidden, jnp.zeros((), hidden.dtype))
    z = formulas.transform(raw_logits(x, rows, own_bias, options), options.logit)
    z = jnp.where(is_own[None, :] & counts[:, None], z, 0.0)
    z = z if vocab_axis is None else jax.lax.psum(z, vocab_axis)
    is_token = (ids >= 0) & (ids < entries * shards)
    return weight, jnp.where(counts[:, None] & ~is_token[None, :], jnp.nan, 1.0) * z


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
    # In place, since a gradient of the rows by themselves would be another array of the weight's size; and row by row,
    # since a scatter adds what has one index in any order.
    dweight, drows = cotangents
    take = jax.lax.dynamic_slice_in_dim

    def add(k, dweight):
        row, own = take(dweight, ids[k], 1, axis=vocab_dim), take(drows, k, 1, axis=vocab_dim)
        return put(dweight, row + own, ids[k], vocab_dim)

    return jax.lax.fori_loop(0, ids.size, add, dweight), None


_with_rows_vjp.defvjp(_forward_rule, _backward_rule)
_with_rows = jax.jit(_with_rows_vjp, static_argnums=2, inline=True)
