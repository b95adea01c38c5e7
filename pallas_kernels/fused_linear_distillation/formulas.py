"""The formulas of a divergence and of its gradient by the student's logits. All arithmetic is float32.

With p the student's distribution and q the teacher's, each divergence is a sum over the vocabulary. Its derivative by
p_v is a_v, up to what is the same for all v. Since p = softmax(z), the gradient is

    ∂D/∂z_v = p_v · a_v − p_v · A,    A = Σ_v p_v · a_v.

So two sums over a row are enough: A, and Σ_v t_v.

| divergence | D | t | p · a |
|---|---|---|---|
| forward KL, KL(q ‖ p) | Σ t | q (log q − log p) | −q |
| reverse KL, KL(p ‖ q) | A | 0 | p (log p − log q) |
| JSD, m = (1 − β) p + β q | Σ t + A | β q (log q − log m) | (1 − β) p (log p − log m) |
| TVD | Σ t | ½ |p − q| | ½ p · sign(p − q) |

Where p and q agree to the last bit, the gradient is exactly 0. For TVD no entry exceeds p (1 − p), as |a| ≤ ½.

References:
    Agarwal et al., On-Policy Distillation of Language Models, arXiv:2306.13649.
    Wen et al., f-Divergence Minimization for Sequence-Level Knowledge Distillation, arXiv:2307.15190.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels.cross_entropy import formulas as row_formulas
from liger_jax.pallas_kernels.cross_entropy.formulas import slope, transform
from liger_jax.pallas_kernels.fused_linear_distillation.config import DivergenceOptions, Options


class Entries(NamedTuple):
    """Entries of a gradient by logits that are computed by themselves."""

    columns: jax.Array  # (N, K) int32; one past the end is none
    values: jax.Array  # (N, K)


class Statistics(NamedTuple):
    """What a token's rows of logits are reduced to; each field is (N,) float32."""

    student_normalizer: jax.Array  # log Σ_v exp(z_v)
    teacher_normalizer: jax.Array
    hard_normalizer: jax.Array  # that of the cross-entropy's logits; the student's where they are the same
    slope_sum: jax.Array  # A


def terms(
    log_p: jax.Array, log_q: jax.Array, options: DivergenceOptions, are_rounded: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """t and p · a of the table, and p; a probability of 0 times an infinite logarithm is 0.

    Logits that were rounded to 16 bits take log and exp for log1p and expm1, which cost a GPU twice as much: an error
    of 10⁻⁷ is far below their own.
    """
    if options.divergence == "jsd":
        return _jensen_shannon_terms(log_p, log_q, options.beta, are_rounded)
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    d = jnp.where((p == 0) & (q == 0), 0.0, log_q - log_p)
    if options.divergence == "forward_kl":
        return jnp.where(q == 0, 0.0, q * d), -q, p  # and not q > 0, which would take NaN for 0
    if options.divergence == "reverse_kl":
        return jnp.zeros_like(p), jnp.where(p == 0, 0.0, p * -d), p
    return 0.5 * jnp.abs(p - q), 0.5 * p * jnp.sign(p - q), p


def _jensen_shannon_terms(
    log_p: jax.Array, log_q: jax.Array, beta: float, are_rounded: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """β q (log q − log m), (1 − β) p (log p − log m) and p, with m = (1 − β) p + β q.

    With h the higher of p and q, d = log q − log p, and w the weight of the lower one in m, which is h · e^−|d|:
    m / h = 1 + w (e^−|d| − 1). So three transcendental functions are enough, and none of them overflows.
    """
    # e^−1000 is 0 in float32, and a finite logarithm keeps 0 · ∞ away.
    log_p, log_q = jnp.maximum(log_p, -1000.0), jnp.maximum(log_q, -1000.0)
    higher, d = jnp.exp(jnp.maximum(log_p, log_q)), log_q - log_p
    is_teacher_higher = d > 0
    weight = jnp.where(is_teacher_higher, 1.0 - beta, beta)
    if are_rounded:
        lower_share = jnp.exp(-jnp.abs(d))
        log_m = jnp.log(1.0 + weight * (lower_share - 1.0))  # log (m / h)
    else:
        less = jnp.expm1(-jnp.abs(d))
        lower_share, log_m = less + 1.0, jnp.log1p(weight * less)
    p = higher * jnp.where(is_teacher_higher, lower_share, 1.0)
    q = higher * jnp.where(is_teacher_higher, 1.0, lower_share)
    of_teacher = q * (jnp.minimum(d, 0.0) - log_m)
    of_student = p * (-jnp.maximum(d, 0.0) - log_m)
    return beta * of_teacher, (1.0 - beta) * of_student, p


def reduced(
    raw: jax.Array,
    teacher_raw: jax.Array,
    labels: jax.Array,
    options: DivergenceOptions,
    normalizers: tuple[jax.Array | None, jax.Array | None],
) -> tuple[jax.Array, Statistics]:
    """Each token's loss (N,), and its statistics, from raw logits (N, V); `normalizers` where they are known.

    Over a split vocabulary the loss is this shard's share, and the statistics are those of all shards.
    """
    axis = options.vocab_axis

    z, teacher_z = (
        transform(u.astype(jnp.float32), head.logit)
        for u, head in ((raw, options.student), (teacher_raw, options.teacher))
    )
    lse, teacher_lse = normalizers
    lse = log_normalizer(z, axis) if lse is None else lse
    teacher_lse = log_normalizer(teacher_z, axis) if teacher_lse is None else teacher_lse
    value, weighted, _ = terms(z - lse[:, None], teacher_z - teacher_lse[:, None], options, raw.dtype.itemsize < 4)
    if options.divergence == "forward_kl":
        divergence = jnp.sum(value, axis=1)
        slope_sum = jnp.full_like(divergence, -1.0)  # −Σ q, without its rounding
    else:
        divergence, own_slope_sum = _sums(value, weighted)
        if options.divergence in ("reverse_kl", "jsd"):
            divergence += own_slope_sum
        slope_sum = over_shards(own_slope_sum, axis)
    raw = raw.astype(jnp.float32)
    loss, hard_lse = with_cross_entropy(divergence, raw, lse, labels, options)
    return loss, Statistics(lse, teacher_lse, hard_lse, slope_sum)


def _sums(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sums of both over rows, in one pass: as two sums, XLA would write in float32 what both have in common."""
    sums = jnp.sum(jax.lax.complex(a, b), axis=1)
    return jnp.real(sums), jnp.imag(sums)


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
    are_rounded = raw.dtype.itemsize < 4
    raw, teacher_raw = raw.astype(jnp.float32), teacher_raw.astype(jnp.float32)
    log_p = transform(raw, options.student.logit) - statistics.student_normalizer[:, None]
    log_q = transform(teacher_raw, options.teacher.logit) - statistics.teacher_normalizer[:, None]
    _, weighted, p = terms(log_p, log_q, options, are_rounded)
    dz = weighted - p * statistics.slope_sum[:, None]
    if options.divergence == "tvd":
        # The sign of p − q is noise where both round to 1, and A has the sign of another pass. |∂D/∂z| ≤ p (1 − p).
        bound = p * jnp.abs(1.0 - p)
        dz = jnp.clip(dz, -bound, bound)
    hits = is_label(labels, start, raw.shape[1])
    return raw_gradient(dz, raw, hits, statistics.hard_normalizer, scale, options).astype(dtype), None


# --- what the divergences share with the top-k loss -------------------------------------------------------------------


def with_entries(du: jax.Array, entries: Entries | None, first: jax.Array | int = 0) -> jax.Array:
    """A gradient by logits (N, V) with the entries of the rows from `first` on in their places."""
    if entries is None:
        return du
    rows = first + jnp.arange(entries.columns.shape[0])[:, None]
    return du.at[rows, entries.columns].set(entries.values, mode="drop")


def over_shards(x: jax.Array, vocab_axis: str | None) -> jax.Array:
    """The sum over all shards of the vocabulary."""
    return x if vocab_axis is None else jax.lax.psum(x, vocab_axis)


def log_normalizer(z: jax.Array, vocab_axis: str | None) -> jax.Array:
    """log Σ_v exp(z_v) of rows (N, V), over all shards of the vocabulary."""
    lse = row_formulas.log_sum_exp(z)
    if vocab_axis is None:
        return lse
    maximum = jax.lax.pmax(lse, vocab_axis)
    return row_formulas.log_normalizer(maximum, jax.lax.psum(jnp.exp(lse - row_formulas.shift_of(maximum)), vocab_axis))


def in_one_shard(x: jax.Array, vocab_axis: str | None) -> jax.Array:
    """x in one shard of the vocabulary and 0 in the others, where all hold the same x and sums go over shards."""
    return x if vocab_axis is None else jnp.where(jax.lax.axis_index(vocab_axis) == 0, x, 0.0)


def with_cross_entropy(
    divergence: jax.Array, raw: jax.Array, lse: jax.Array, labels: jax.Array, options: Options
) -> tuple[jax.Array, jax.Array]:
    """(1 − w) · divergence + w · cross-entropy (N,), and the normaliser of the latter; `lse` is the divergence's."""
    w, axis = options.hard_weight, options.vocab_axis
    if not w:
        return divergence, lse
    z = transform(raw, options.hard)
    hard_lse = lse if options.hard == options.student.logit else log_normalizer(z, axis)
    target = jnp.sum(jnp.where(is_label(labels, 0, z.shape[1]), z, 0.0), axis=1)
    return (1.0 - w) * divergence + w * (in_one_shard(hard_lse, axis) - target), hard_lse


def raw_gradient(
    dz: jax.Array, raw: jax.Array, is_label: jax.Array, hard_normalizer: jax.Array, scale: jax.Array, options: Options
) -> jax.Array:
    """The gradient of Σ scale · loss by raw logits (N, v), from that of the divergence by the student's logits.

    `is_label` (N, v) says where a logit is that of its token's label.
    """
    du = dz * slope(raw, options.student.logit)
    if options.hard_weight:
        p = jnp.exp(transform(raw, options.hard) - hard_normalizer[:, None])
        hard = jnp.where(is_label, p - 1.0, p) * slope(raw, options.hard)
        du = (1.0 - options.hard_weight) * du + options.hard_weight * hard
    return jnp.where(scale[:, None] == 0, 0.0, scale[:, None] * du)


def is_label(labels: jax.Array, start: jax.Array | int, size: int) -> jax.Array:
    """(N, size): whether a column, counted from `start`, is the row's label."""
    return start + jnp.arange(size, dtype=jnp.int32)[None, :] == labels[:, None]
