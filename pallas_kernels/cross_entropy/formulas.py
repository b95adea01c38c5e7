"""The formulas of cross-entropy, which every backend applies to a row of logits. All arithmetic is float32.

A row of logits z is reduced to a few statistics: lse = log Σ_v exp(z_v), the target logit z_y, and on
request Σ_v c_v·z_v, max_v z_v and its first index, and for p = exp(z − lse) the entropy H = −Σ_v p_v·log p_v and
log Σ_v p_v². Every loss of this package is a function of these. So a backend needs two kernels only. One makes the
statistics. The other makes the gradient by the logits, from the statistics' cotangents:

    dz_v = g_lse · p_v + g_target · 1[v = y] + g_sum · c_v − g_entropy · p_v · (log p_v + H).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels.cross_entropy.config import LogitOptions

NO_LABEL = -1  # the label of an ignored row
IMPOSSIBLE_LABEL = -2  # the label of a row that counts and has no valid label. No column matches -1 or -2.
_NO_INDEX = 2**31 - 1
# In x·exp(x), a smaller x, such as −inf, is replaced by this one: its exp is 0 in float32, and 0 · −inf would be NaN.
LEAST_EXPONENT = -128.0
# Below −2³⁰ float32 has steps of 128 or more, so that log Σ exp(z) of a row is its largest z. There z − max z is not 0
# where it should be, if a fused multiply-add keeps of scale·u what the maximum's rounding dropped; its exp may be
# infinite. Such rows are masked logits, like −1e30.
LEAST_MAXIMUM = -(2.0**30)


class Statistics(NamedTuple):
    """What a row of logits is reduced to; each field is (N,), or (N, 1) inside kernels."""

    log_normalizer: jax.Array  # float32
    target_logit: jax.Array  # float32; 0 where no column is the label's
    logit_sum: jax.Array | None  # float32, Σ_v c_v·z_v
    max_logit: jax.Array | None  # float32
    predicted_token: jax.Array | None  # int32
    entropy: jax.Array | None = None  # float32
    log_sum_of_squares: jax.Array | None = None  # float32, log Σ_v p_v²


class Cotangents(NamedTuple):
    """The cotangents of the first three statistics; each is (N,) float32, or (N, 1) inside kernels.

    The entropy's cotangent is added to the others: `log_normalizer` is g_lse − g_entropy·H, the factor of p_v,
    and `log_probability` is −g_entropy, the factor of p_v·log p_v (`with_entropy`).
    """

    log_normalizer: jax.Array
    target_logit: jax.Array
    logit_sum: jax.Array | None
    log_probability: jax.Array | None = None


class OnlineState(NamedTuple):
    """The statistics of the columns that were seen; each is (N, 1). Sums are of x = z − maximum."""

    maximum: jax.Array
    exp_sum: jax.Array  # Σ exp(x)
    target_logit: jax.Array
    logit_sum: jax.Array | None
    predicted_token: jax.Array | None
    weighted_sum: jax.Array | None = None  # Σ x·exp(x)
    square_sum: jax.Array | None = None  # Σ exp(2x)


def where(counts: jax.Array, statistics: Statistics) -> Statistics:
    """The statistics of counted rows. Other rows get zeros, whatever they hold."""
    return jax.tree.map(lambda x: jnp.where(counts, x, jnp.zeros((), x.dtype)), statistics)


def is_live(cotangents: Cotangents) -> jax.Array:
    """Whether anything depends on a row's loss. Other rows must not reach a product, because 0 · NaN is NaN."""
    live = (cotangents.log_normalizer != 0) | (cotangents.target_logit != 0)
    for more in (cotangents.logit_sum, cotangents.log_probability):
        live = live if more is None else live | (more != 0)
    return live


def with_entropy(cotangents: Cotangents, entropy: jax.Array, entropy_cotangent: jax.Array) -> Cotangents:
    """The cotangents, with the entropy's among them."""
    # Where nothing depends on the entropy, it may be NaN.
    shift = jnp.where(entropy_cotangent == 0, 0.0, entropy_cotangent * entropy)
    return cotangents._replace(log_normalizer=cotangents.log_normalizer - shift, log_probability=-entropy_cotangent)


def transform(u: jax.Array, options: LogitOptions, tanh: Callable[[jax.Array], jax.Array] = jnp.tanh) -> jax.Array:
    """z = scale · softcap · tanh(u / softcap), with a backend's own tanh where it has one."""
    if options.softcap is not None:
        u = options.softcap * tanh(u / options.softcap)
    return u if options.scale == 1.0 else options.scale * u


def slope(u: jax.Array, options: LogitOptions) -> jax.Array | float:
    """dz/du = scale · (1 − tanh²(u / softcap))."""
    if options.softcap is None:
        return options.scale
    return options.scale * (1.0 - jnp.square(jnp.tanh(u / options.softcap)))


def slope_of_logit(z: jax.Array | None, options: LogitOptions) -> jax.Array | float:
    """`slope`, from z instead of u; without a softcap z is not read."""
    if options.softcap is None:
        return options.scale
    most = options.scale * options.softcap
    if abs(most) < jnp.finfo(jnp.float32).tiny:
        return 0.0  # every z is 0, and 0 / 0 would be NaN
    assert z is not None  # it is there where there is a softcap
    return options.scale * (1.0 - jnp.square(z / most))


def online_start(n: int, options: LogitOptions) -> OnlineState:
    """The state before any column was seen."""
    zeros = jnp.zeros((n, 1), jnp.float32)
    return OnlineState(
        maximum=jnp.full((n, 1), -jnp.inf, jnp.float32),
        exp_sum=zeros,
        target_logit=zeros,
        logit_sum=zeros if options.logit_sum else None,
        predicted_token=jnp.zeros((n, 1), jnp.int32) if options.metrics else None,
        weighted_sum=zeros if options.entropy else None,
        square_sum=zeros if options.entropy else None,
    )


def shift_of(maximum: jax.Array) -> jax.Array:
    """What to subtract from logits before exp, given their maximum: 0 if they are masked, so that every exp is 0."""
    return jnp.where(maximum < LEAST_MAXIMUM, 0.0, maximum)  # exp(−inf − (−inf)) would be NaN, too


def log_normalizer(maximum: jax.Array, exp_sum: jax.Array) -> jax.Array:
    """log Σ exp(z), given the maximum of the logits and Σ exp(z − shift_of(maximum))."""
    return jnp.where(maximum < LEAST_MAXIMUM, maximum, maximum + jnp.log(exp_sum))


def log_sum_exp(z: jax.Array, axis: int = 1) -> jax.Array:
    """log Σ exp(z) over an axis, where z may be the product of logits and a factor."""
    maximum = jnp.max(z, axis)
    return jnp.where(maximum < LEAST_MAXIMUM, maximum, jax.nn.logsumexp(z, axis))


def _entropy_sums(state: OnlineState, maximum: jax.Array) -> tuple[jax.Array | None, jax.Array | None]:
    """The state's `weighted_sum` and `square_sum`, of x = z − this maximum, which is no less than the state's."""
    if state.weighted_sum is None or state.square_sum is None:
        return None, None
    moved = jnp.maximum(state.maximum - maximum, LEAST_EXPONENT)
    factor = jnp.exp(moved)
    return factor * (state.weighted_sum + moved * state.exp_sum), jnp.square(factor) * state.square_sum


def _first_equal(z: jax.Array, maximum: jax.Array, columns: jax.Array, axis: int) -> jax.Array:
    """The first of the columns whose z is the maximum; in a kernel both come from the same registers."""
    return jnp.min(jnp.where(z == maximum, columns, _NO_INDEX), axis, keepdims=True)


def online_update(
    state: OnlineState,
    z: jax.Array,
    columns: jax.Array,
    in_vocab: jax.Array | None,
    labels: jax.Array,
    class_weights: jax.Array | None,
    axis: int = 1,
    one_maximum: bool = False,
    first_of: Callable[[jax.Array, jax.Array, jax.Array, int], jax.Array] = _first_equal,
) -> OnlineState:
    """Adds a tile of logits z (N, v); columns and in_vocab (1, v), labels (N, 1), class_weights (1, v).

    If in_vocab is None, all columns are in the vocabulary. With axis 0 the tile is (pieces, N, lanes), and it is
    reduced to a state (1, N, lanes). With `one_maximum` all lanes of a row then have the row's maximum. `first_of`
    finds the first column (N, 1) of the maximum, from z, the maximum, the columns and the axis.
    """
    masked = z if in_vocab is None else jnp.where(in_vocab, z, -jnp.inf)
    tile_maximum = jnp.max(masked, axis, keepdims=True)
    if one_maximum:
        tile_maximum = jnp.max(tile_maximum, axis=-1, keepdims=True)
    maximum = jnp.maximum(state.maximum, tile_maximum)
    shift = shift_of(maximum)
    exp_sum = state.exp_sum * jnp.exp(state.maximum - shift)
    exp_sum += jnp.sum(jnp.exp(masked - shift), axis, keepdims=True)
    if axis == 0:
        # At most one column of a row is its label's, so nothing need be summed: two operations an element, not three.
        target_logit = state.target_logit
        for piece_columns, piece in zip(columns, z, strict=True):
            target_logit = jnp.where(piece_columns == labels, piece, target_logit)
    else:
        target_logit = state.target_logit + jnp.sum(jnp.where(columns == labels, z, 0.0), axis, keepdims=True)
    logit_sum = state.logit_sum
    if logit_sum is not None:
        weighted = z if class_weights is None else z * class_weights
        logit_sum += jnp.sum(weighted if in_vocab is None else jnp.where(in_vocab, weighted, 0.0), axis, keepdims=True)
    predicted_token = state.predicted_token
    if predicted_token is not None:
        first = first_of(masked, tile_maximum, columns, axis)
        predicted_token = jnp.where(tile_maximum > state.maximum, first, predicted_token)
    weighted_sum, square_sum = _entropy_sums(state, shift)
    if weighted_sum is not None and square_sum is not None:
        x = masked - shift
        weighted_sum += jnp.sum(jnp.exp(x) * jnp.maximum(x, LEAST_EXPONENT), axis, keepdims=True)
        square_sum += jnp.sum(jnp.square(jnp.exp(x)), axis, keepdims=True)
    return OnlineState(maximum, exp_sum, target_logit, logit_sum, predicted_token, weighted_sum, square_sum)


def over_lanes(lanes: OnlineState) -> OnlineState:
    """Joins the lanes (N, lanes), which each saw some of a row's columns, into one state (N, 1)."""
    maximum = jnp.max(lanes.maximum, axis=1, keepdims=True)
    shift = shift_of(maximum)

    def total(x):
        return jnp.sum(x, axis=1, keepdims=True)

    predicted_token = lanes.predicted_token
    if predicted_token is not None:
        first = jnp.where(lanes.maximum == maximum, predicted_token, _NO_INDEX)
        predicted_token = jnp.min(first, axis=1, keepdims=True)
    weighted_sum, square_sum = jax.tree.map(total, _entropy_sums(lanes, shift))
    return OnlineState(
        maximum=maximum,
        exp_sum=total(lanes.exp_sum * jnp.exp(lanes.maximum - shift)),
        target_logit=total(lanes.target_logit),
        logit_sum=None if lanes.logit_sum is None else total(lanes.logit_sum),
        predicted_token=predicted_token,
        weighted_sum=weighted_sum,
        square_sum=square_sum,
    )


def first_of_largest(maxima: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """maxima and tokens (tiles, N) → the largest of the maxima, and the first token that has it, (N,) both.

    A maximum and its token go through one reduction. XLA may compute a maximum twice and round it in two ways: where
    the largest is compared with the maxima afterwards, none of them need be equal to it.
    """

    def larger(x, y):
        (maximum, token), (other, other_token) = x, y
        is_other = (other > maximum) | ((other == maximum) & (other_token < token)) | jnp.isnan(other)
        return jnp.where(is_other, other, maximum), jnp.where(is_other, other_token, token)

    start = jnp.array(-jnp.inf, maxima.dtype), jnp.array(_NO_INDEX, tokens.dtype)
    return jax.lax.reduce((maxima, tokens), start, larger, (0,))


def online_merge(states: OnlineState, options: LogitOptions) -> Statistics:
    """The statistics of whole rows from the states of the vocabulary's tiles in order: each field (tiles, N) → (N,)."""
    maximum = jnp.max(states.maximum, axis=0)
    shift = shift_of(maximum)
    exp_sum = jnp.sum(states.exp_sum * jnp.exp(states.maximum - shift[None, :]), axis=0)
    predicted_token = None
    if options.metrics:
        first = jnp.argmax(states.maximum, axis=0)
        predicted_token = jnp.take_along_axis(states.predicted_token, first[None, :], axis=0)[0]
    entropy = log_sum_of_squares = None
    if options.entropy:
        # A tile of masked logits has no share, and its own sums may be NaN: they are divided by its exp_sum.
        is_empty = states.maximum < LEAST_MAXIMUM
        sums = _entropy_sums(states, shift[None, :])
        weighted_sum, square_sum = (jnp.sum(jnp.where(is_empty, 0.0, x), axis=0) for x in sums)
        entropy = jnp.log(exp_sum) - weighted_sum / exp_sum
        log_sum_of_squares = jnp.log(square_sum) - 2.0 * jnp.log(exp_sum)
    return Statistics(
        log_normalizer=log_normalizer(maximum, exp_sum),
        target_logit=jnp.sum(states.target_logit, axis=0),
        logit_sum=jnp.sum(states.logit_sum, axis=0) if options.logit_sum else None,
        max_logit=maximum if options.metrics else None,
        predicted_token=predicted_token,
        entropy=entropy,
        log_sum_of_squares=log_sum_of_squares,
    )


def logit_gradient(
    u: jax.Array,
    columns: jax.Array,
    labels: jax.Array,
    log_normalizer: jax.Array,
    cotangents: Cotangents,
    class_weights: jax.Array | None,
    options: LogitOptions,
) -> jax.Array:
    """du of a tile of raw float32 logits u (N, v); what belongs to rows is (N, 1), columns and class_weights (1, v)."""
    log_p = transform(u, options) - log_normalizer
    return scaled_logit_gradient(jnp.exp(log_p), log_p, columns, labels, cotangents, class_weights) * slope(u, options)


def scaled_logit_gradient(
    p: jax.Array,
    log_p: jax.Array | None,
    columns: jax.Array,
    labels: jax.Array,
    cotangents: Cotangents,
    class_weights: jax.Array | None,
) -> jax.Array:
    """dz of a tile of probabilities p (N, v), for logits z after scale and softcap; log_p is for the entropy alone."""
    # dz_v = g_lse · p_v + g_target · 1[v = y] + g_sum · c_v
    factor = cotangents.log_normalizer
    if cotangents.log_probability is not None:
        assert log_p is not None  # it is there where an entropy was asked for
        factor += cotangents.log_probability * jnp.maximum(log_p, LEAST_EXPONENT)
    dz = factor * p
    dz += jnp.where(columns == labels, cotangents.target_logit, 0.0)
    if cotangents.logit_sum is not None:
        dz += cotangents.logit_sum if class_weights is None else cotangents.logit_sum * class_weights
    return dz


def column_indices(v: int) -> jax.Array:
    """0 … v − 1, as (1, v)."""
    return jnp.arange(v, dtype=jnp.int32)[None, :]


def gradient(
    logits: jax.Array,
    labels: jax.Array,
    log_normalizer: jax.Array,
    cotangents: Cotangents,
    class_weights: jax.Array | None,
    *,
    options: LogitOptions,
) -> jax.Array:
    """The logits' gradient (N, V) in their dtype; exactly 0 in rows without a label, whatever they hold."""
    weights = None if class_weights is None else class_weights[None, :]
    du = logit_gradient(
        logits.astype(jnp.float32),
        column_indices(logits.shape[1]),
        labels[:, None],
        log_normalizer[:, None],
        jax.tree.map(lambda g: g[:, None], cotangents),
        weights,
        options,
    )
    return jnp.where(labels[:, None] == NO_LABEL, 0.0, du).astype(logits.dtype)


def tangent(
    logits: jax.Array,
    labels: jax.Array,
    log_normalizer: jax.Array,
    class_weights: jax.Array | None,
    logits_tangent: jax.Array,
    *,
    options: LogitOptions,
) -> list[jax.Array]:
    """The tangents (N,) of lse, z_y and, where it is asked for, Σ_v c_v·z_v; exactly 0 in rows without a label."""
    logits, log_normalizer = without_rows(labels, logits, log_normalizer)
    u = logits.astype(jnp.float32)
    dz = slope(u, options) * jnp.where(labels[:, None] == NO_LABEL, 0.0, logits_tangent.astype(jnp.float32))
    p = jnp.exp(transform(u, options) - log_normalizer[:, None])
    is_target = column_indices(u.shape[1]) == labels[:, None]
    tangents = [jnp.sum(p * dz, axis=1), jnp.sum(jnp.where(is_target, dz, 0.0), axis=1)]
    if options.logit_sum:
        tangents.append(jnp.sum(dz if class_weights is None else dz * class_weights[None, :], axis=1))
    return tangents


def without_rows(labels: jax.Array, logits: jax.Array, log_normalizer: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits and lse with zeros in rows without a label, which may hold NaN: 0 · NaN would be in a derivative."""
    has_none = labels == NO_LABEL
    zero = jnp.zeros((), logits.dtype)
    return jnp.where(has_none[:, None], zero, logits), jnp.where(has_none, 0.0, log_normalizer)
