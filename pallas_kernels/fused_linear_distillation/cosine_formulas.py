"""The formulas of the cosine distance of a student's and a teacher's logits. All arithmetic is float32.

With s the student's logits and t the teacher's, ŝ = s / |s| and t̂ = t / |t|:

    D = 1 − ŝ · t̂,        ∂D/∂s_v = ((ŝ · t̂) ŝ_v − t̂_v) / |s|.

So three sums over a row are enough: s · t, s · s and t · t. Rows are first divided by their largest entry, so that no
square overflows. Logits of zeros have distance 1 from all, and no gradient. An entry that is −inf in both models, such
as the padding of a vocabulary, is left out; an infinite one in one of them makes the distance NaN.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels.cross_entropy.formulas import transform
from liger_jax.pallas_kernels.fused_linear_distillation.config import DivergenceOptions
from liger_jax.pallas_kernels.fused_linear_distillation.formulas import (
    in_one_shard,
    is_label,
    log_normalizer,
    over_shards,
    raw_gradient,
    with_cross_entropy,
)


class Statistics(NamedTuple):
    """What a token's rows of logits are reduced to; each field is (N,) float32."""

    student_length: jax.Array  # |s|, infinite for zeros
    teacher_length: jax.Array
    cosine: jax.Array
    hard_normalizer: jax.Array  # that of the cross-entropy's logits; 0 where there is no cross-entropy


def reduced(
    raw: jax.Array,
    teacher_raw: jax.Array,
    labels: jax.Array,
    options: DivergenceOptions,
    normalizers: tuple[jax.Array | None, jax.Array | None],
) -> tuple[jax.Array, Statistics]:
    """Each token's loss (N,), and its statistics, from raw logits (N, V); `normalizers` where they are known.

    If the vocabulary is sharded, the loss is this shard's term, and the statistics are those of all shards.
    """
    axis = options.vocab_axis
    s, t = _logits(raw, teacher_raw, options)
    largest = [_largest(x, axis) for x in (s, t)]
    s, t = (x / size[:, None] for x, size in zip((s, t), largest, strict=True))
    # In one pass: as three sums, XLA would write in float32 what they have in common.
    zeros = (jnp.zeros((), jnp.float32),) * 3
    sums = jax.lax.reduce((s * t, s * s, t * t), zeros, lambda x, y: tuple(map(jnp.add, x, y)), (1,))
    dot, *squares = (over_shards(x, axis) for x in sums)
    length, teacher_length = (
        jnp.where(square == 0, jnp.inf, size * jnp.sqrt(square)) for size, square in zip(largest, squares, strict=True)
    )
    product = jnp.sqrt(squares[0] * squares[1])
    cosine = jnp.where(product == 0, 0.0, dot / jnp.where(product == 0, 1.0, product))
    raw, lse = raw.astype(jnp.float32), jnp.zeros_like(cosine)
    if options.hard_weight:  # its logits are the student's: the temperature is 1
        lse = log_normalizer(transform(raw, options.hard), axis) if normalizers[0] is None else normalizers[0]
    loss, hard_lse = with_cross_entropy(in_one_shard(1.0 - cosine, axis), raw, lse, labels, options)
    return loss, Statistics(length, teacher_length, cosine, hard_lse)


def logit_gradient(
    raw: jax.Array,
    teacher_raw: jax.Array,
    labels: jax.Array,
    statistics: Statistics,
    scale: jax.Array,
    start: jax.Array | int,
    options: DivergenceOptions,
    dtype: jax.typing.DTypeLike,
) -> tuple[jax.Array, None]:
    """The gradient of Σ scale · loss by raw logits (N, v), the vocabulary entries from `start` on, in `dtype`."""
    s, t = _logits(raw, teacher_raw, options)
    length = statistics.student_length[:, None]
    dz = (statistics.cosine[:, None] * (s / length) - t / statistics.teacher_length[:, None]) / length
    hits = is_label(labels, start, raw.shape[1])
    raw = raw.astype(jnp.float32)
    return raw_gradient(dz, raw, hits, statistics.hard_normalizer, scale, options).astype(dtype), None


def _logits(raw: jax.Array, teacher_raw: jax.Array, options: DivergenceOptions) -> tuple[jax.Array, jax.Array]:
    """Both models' logits (N, v), with zeros where both are −inf."""
    s, t = (
        transform(u.astype(jnp.float32), head.logit)
        for u, head in ((raw, options.student), (teacher_raw, options.teacher))
    )
    are_left_out = (s == -jnp.inf) & (t == -jnp.inf)
    return jnp.where(are_left_out, 0.0, s), jnp.where(are_left_out, 0.0, t)


def _largest(x: jax.Array, axis: str | None) -> jax.Array:
    """The largest magnitude of each row (N,), over all shards; 1 for zeros."""
    largest = jnp.max(jnp.abs(x), axis=1)
    largest = largest if axis is None else jax.lax.pmax(largest, axis)
    return jnp.where(largest == 0, 1.0, largest)
