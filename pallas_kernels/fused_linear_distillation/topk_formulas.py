"""The formulas of the KL divergence from a teacher whose K largest log-probabilities are stored.

With K the set of stored tokens, q the teacher's probabilities, p the student's, Q = Σ_{k ∈ K} q_k:

    D = Σ_{k ∈ K} q_k (log q_k − log p_k)  [+ q_r (log q_r − log p_r)],

where the bucket r holds all other tokens: q_r = 1 − Q and p_r = Σ_{v ∉ K} p_v. The gradient by the student's logits is

    ∂D/∂z_v = (Q + q_r) p_v − q_v           for v in K,
    ∂D/∂z_v = (Q + q_r − q_r / p_r) p_v     for all others,

with q_r = 0 where the tail is ignored, or nothing is left for it. log p_r is a separate log-sum-exp: 1 − Σ p_k would
lose a small tail. The factor of p_v for all others is kept as a sign and a logarithm: q_r / p_r is more than float32
holds where the student is sure of a stored token, although (q_r / p_r) p_v is at most 1.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels.cross_entropy.formulas import transform
from liger_jax.pallas_kernels.fused_linear_distillation.config import TopKOptions
from liger_jax.pallas_kernels.fused_linear_distillation.formulas import (
    Entries,
    in_one_shard,
    is_label,
    log_normalizer,
    over_shards,
    raw_gradient,
    with_cross_entropy,
)


class TopK(NamedTuple):
    """What is stored of the teacher."""

    token_ids: jax.Array  # (N, K) int32, counted from the shard's first entry; those of other shards are out of range
    log_probs: jax.Array  # (N, K) float32; −inf where a place is not used


class Statistics(NamedTuple):
    """What a token's row of logits is reduced to, float32."""

    normalizer: jax.Array  # (N,)
    hard_normalizer: jax.Array  # (N,)
    others_sign: jax.Array  # (N,), for tokens that are not stored ∂D/∂z_v = sign · exp(z_v − normalizer)
    others_normalizer: jax.Array  # (N,)
    stored: jax.Array  # (N, K), ∂D/∂z_v for those that are


def reduced(
    raw: jax.Array, teacher: TopK, labels: jax.Array, options: TopKOptions, normalizers: tuple[jax.Array | None, None]
) -> tuple[jax.Array, Statistics]:
    """Each token's loss (N,), and its statistics, from raw logits (N, V); `normalizers` has theirs where it is known.

    Over a split vocabulary the loss is this shard's share, and the statistics are those of all shards.
    """
    axis, raw = options.vocab_axis, raw.astype(jnp.float32)
    z = transform(raw, options.student.logit)
    lse = log_normalizer(z, axis) if normalizers[0] is None else normalizers[0]
    columns = _columns(teacher, 0, z.shape[1])
    own = columns < z.shape[1]
    z_k = jnp.take_along_axis(z, jnp.where(own, columns, 0), axis=1)
    log_p = over_shards(jnp.where(own, z_k, 0.0), axis) - lse[:, None]
    log_q = teacher.log_probs
    q, used = jnp.exp(log_q), log_q != -jnp.inf  # NaN is used, and makes the loss NaN
    divergence = jnp.sum(jnp.where(used, q * (log_q - log_p), 0.0), axis=1)
    total = jnp.sum(q, axis=1)
    sign, log_factor = jnp.ones_like(total), jnp.log(total)
    if options.has_bucket:
        without = z.at[_rows(columns), columns].set(-jnp.inf, mode="drop")
        log_rest = log_normalizer(without, axis) - lse
        rest = _probability_of_others(q, log_rest, own, z.shape[1], axis)
        log_term = jnp.log(jnp.where(rest == 0, 1.0, rest)) - log_rest
        divergence += jnp.where(rest == 0, 0.0, rest * log_term)
        total = total + rest
        sign, log_factor = _log_difference(jnp.log(total), jnp.where(rest == 0, -jnp.inf, jnp.log(rest) - log_rest))
    stored = total[:, None] * jnp.exp(log_p) - q
    loss, hard_lse = with_cross_entropy(in_one_shard(divergence, axis), raw, lse, labels, options)
    return loss, Statistics(lse, hard_lse, sign, lse - log_factor, stored)


def _log_difference(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sign of exp(a) − exp(b), and log |exp(a) − exp(b)|, where either may be more than float32 holds."""
    larger = jnp.maximum(a, b)
    difference = jnp.exp(a - larger) - jnp.exp(b - larger)
    return jnp.sign(difference), larger + jnp.log(jnp.abs(difference))


def _probability_of_others(
    q: jax.Array, log_p_rest: jax.Array, is_own: jax.Array, v: int, vocab_axis: str | None
) -> jax.Array:
    """q_r = 1 − Q (N,), and 0 where nothing can be left: D would be infinite for a rounding.

    Nothing is left where all of the vocabulary is stored. Where the student forbids all other tokens, as padding, what
    float32 cannot tell from 1 is nothing.
    """
    num_left = over_shards(v - jnp.sum(is_own, axis=1), vocab_axis)
    rest = jnp.maximum(1.0 - jnp.sum(q, axis=1), 0.0)
    rounding = q.shape[1] * jnp.finfo(q.dtype).eps
    is_empty = (num_left == 0) | ((log_p_rest == -jnp.inf) & (rest <= rounding))
    return jnp.where(is_empty, 0.0, rest)


def logit_gradient(
    raw: jax.Array,
    teacher: TopK,
    labels: jax.Array,
    statistics: Statistics,
    scale: jax.Array,
    start: jax.Array | int,
    options: TopKOptions,
    dtype: jax.typing.DTypeLike,
) -> tuple[jax.Array, Entries]:
    """The gradient of Σ scale · loss by raw logits (N, v), the vocabulary entries from `start` on, in `dtype`.

    The stored tokens' entries are returned apart. They are put in their places last, which takes no pass over (N, v).
    """
    columns, size = _columns(teacher, start, raw.shape[1]), raw.shape[1]
    stored_raw = jnp.take_along_axis(raw, jnp.where(columns < size, columns, 0), axis=1).astype(jnp.float32)
    raw = raw.astype(jnp.float32)
    z = transform(raw, options.student.logit)
    dz = statistics.others_sign[:, None] * jnp.exp(z - statistics.others_normalizer[:, None])
    gradient = lambda dz, raw, is_label: raw_gradient(
        dz, raw, is_label, statistics.hard_normalizer, scale, options
    ).astype(dtype)
    du = gradient(dz, raw, is_label(labels, start, size))
    of_stored = gradient(statistics.stored, stored_raw, columns + start == labels[:, None])
    return du, Entries(columns, of_stored)


def _columns(teacher: TopK, start: jax.Array | int, size: int) -> jax.Array:
    """(N, K): the stored tokens' columns from `start` on; `size` where a token is in none of them, or not used."""
    columns = teacher.token_ids - start
    here = (columns >= 0) & (columns < size) & (teacher.log_probs != -jnp.inf)
    return jnp.where(here, columns, size)


def _rows(columns: jax.Array) -> jax.Array:
    return jnp.arange(columns.shape[0])[:, None]
