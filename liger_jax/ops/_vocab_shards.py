"""The loss over a vocabulary that a mesh axis splits, inside `jax.shard_map`.

Each device reduces its own logits; what crosses the mesh is a few numbers a token. The collectives act on the
statistics and are differentiable as they stand: through lse = M + log Σ_shards exp(lse_shard − M) a shard's logits
get their share of the softmax's gradient.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from liger_jax.ops import loss_terms, meshes
from liger_jax.pallas_kernels.cross_entropy.formulas import (
    IMPOSSIBLE_LABEL,
    LEAST_EXPONENT,
    LEAST_MAXIMUM,
    NO_LABEL,
    Statistics,
    first_of_largest,
)
from liger_jax.pallas_kernels.tiles import full_like


def check_axis(op: str, axis: str, shards: dict[str, Any], same: dict[str, Any]) -> None:
    """Raises a ValueError unless `axis` splits the vocabulary of `shards`, and every device has all of `same`.

    Both are arrays by their arguments' names; `None` entries pass. What varies over an axis is known where
    `jax.shard_map` follows it (`check_vma=True`, its default); elsewhere only the axis itself is checked.
    """
    if not isinstance(axis, str):
        raise TypeError(f"{op}: vocab_axis is a {type(axis).__name__}, but must be the name of a mesh axis, or None.")
    try:
        size = jax.lax.axis_size(axis)
    except NameError:
        here = jax.sharding.get_abstract_mesh().manual_axes
        axes_here = f"the axes here are {tuple(here)}" if here else "here is none"
        raise ValueError(
            f"{op}: vocab_axis={axis!r} must be an axis of the mesh of a jax.shard_map, and {axes_here}; call {op} "
            "inside jax.shard_map over a mesh with that axis, or leave vocab_axis out."
        ) from None
    if size == 1 or axis not in meshes.varying_axes(jax.lax.axis_index(axis)):
        return
    for name, x in shards.items():
        if x is not None and axis not in meshes.varying_axes(x):
            raise ValueError(
                f"{op}: {name} is the same on all devices of vocab_axis={axis!r}, but each must have its own shard of "
                f"the vocabulary; name {axis!r} in its in_spec where the vocabulary is, or leave vocab_axis out."
            )
    for name, x in same.items():
        if x is not None and axis in meshes.varying_axes(x):
            raise ValueError(
                f"{op}: {name} varies over vocab_axis={axis!r}, but the devices that share a vocabulary must have the "
                f"same tokens; leave {axis!r} out of its in_spec, or gather it by jax.lax.all_gather(…, {axis!r}, "
                "to='invarying')."
            )


def token_terms(
    labels: jax.Array,
    where: jax.Array | None,
    token_weights: jax.Array | None,
    class_weights: jax.Array | None,
    options: loss_terms.LossOptions,
    shard_size: int,
    axis: str | None,
) -> tuple[loss_terms.TokenTerms, jax.Array]:
    """`loss_terms.token_terms`, and labels (N,) for the kernels. `axis` is None where the vocabulary is not split."""
    arrays = labels, where, token_weights, class_weights
    if axis is not None:
        return _sharded_token_terms(*arrays, options, shard_size, axis)
    terms = loss_terms.token_terms(*arrays, options, shard_size)
    return terms, terms.labels


def _sharded_token_terms(
    labels: jax.Array,
    where: jax.Array | None,
    token_weights: jax.Array | None,
    class_weights: jax.Array | None,
    options: loss_terms.LossOptions,
    shard_size: int,
    axis: str,
) -> tuple[loss_terms.TokenTerms, jax.Array]:
    """`token_terms` for the whole vocabulary, and the labels (N,) counted from this shard's first entry."""
    vocab_size = shard_size * jax.lax.axis_size(axis)
    shard = jax.lax.axis_index(axis)
    start = shard.astype(jnp.int32) * shard_size
    if class_weights is not None:
        # These are V numbers, no more than the logits of one token.
        class_weights = _of_all_shards(class_weights, shard=shard, axis=axis).reshape(vocab_size)
    terms = loss_terms.token_terms(labels, where, token_weights, class_weights, options, vocab_size)
    own = terms.labels - start
    is_own = (terms.labels >= 0) & (own >= 0) & (own < shard_size)
    # A label of another shard must match no column of this shard, and no column of padding after them.
    return terms, jnp.where(is_own, own, jnp.where(terms.labels == NO_LABEL, NO_LABEL, IMPOSSIBLE_LABEL))


def merged_over(statistics: Statistics, axis: str, shard_size: int) -> Statistics:
    """Joins the shards' statistics into whole rows', the same on every device of the axis."""
    lse = statistics.log_normalizer
    maximum = jax.lax.pmax(jax.lax.stop_gradient(lse), axis)
    exp_sum = jax.lax.psum(jnp.exp(lse - maximum), axis)
    merged = Statistics(
        log_normalizer=maximum + jnp.log(exp_sum),
        target_logit=jax.lax.psum(statistics.target_logit, axis),
        logit_sum=None if statistics.logit_sum is None else jax.lax.psum(statistics.logit_sum, axis),
        max_logit=None,
        predicted_token=None,
    )
    if statistics.entropy is not None:
        # A shard has the share exp(lse_shard − M) / exp_sum of the probability, and p is its own times that. One of
        # masked logits alone has no share, and its own entropy is NaN.
        x, is_empty = lse - maximum, (lse < LEAST_MAXIMUM) & (maximum >= LEAST_MAXIMUM)
        own_entropy = jnp.where(is_empty, 0.0, statistics.entropy - jnp.maximum(x, LEAST_EXPONENT))
        log_squares = jax.lax.stop_gradient(statistics.log_sum_of_squares + 2.0 * x)
        own_squares = jnp.where(is_empty, 0.0, jnp.exp(log_squares))
        merged = merged._replace(
            entropy=jnp.log(exp_sum) + jax.lax.psum(jnp.exp(x) * own_entropy, axis) / exp_sum,
            log_sum_of_squares=jnp.log(jax.lax.psum(own_squares, axis)) - 2.0 * jnp.log(exp_sum),
        )
    if statistics.max_logit is None:
        return merged
    shard_max, token = jax.lax.stop_gradient((statistics.max_logit, statistics.predicted_token))
    shard = jax.lax.axis_index(axis)
    of_all = functools.partial(_of_all_shards, shard=shard, axis=axis)
    max_logit, first = first_of_largest(of_all(shard_max), of_all(token + shard.astype(jnp.int32) * shard_size))
    return merged._replace(max_logit=max_logit, predicted_token=first)


def share_of_rows(statistics: Statistics, whole: Statistics) -> jax.Array:
    """(N,) the share of the probability that a shard has: the derivative of the rows' log-normaliser by the shard's."""
    return jnp.exp(statistics.log_normalizer - whole.log_normalizer)


def _of_all_shards(x: jax.Array, *, shard: jax.Array, axis: str) -> jax.Array:
    """x (n,) of every shard, (shards, n): a sum, which JAX knows to be the same on every device."""
    others = full_like(x, (jax.lax.axis_size(axis), x.size), 0, x.dtype)
    return jax.lax.psum(jax.lax.dynamic_update_slice_in_dim(others, x[None], shard, axis=0), axis)
