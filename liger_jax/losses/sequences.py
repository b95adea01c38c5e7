"""One number for each sequence, from the log-probabilities of its tokens."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Integer

from liger_jax.losses import _checks
from liger_jax.losses._sequences import Sequences, sequences_of
from liger_jax.ops.checks import ArrayLike, as_array, check_shape

_NO_TOKEN = "leave such sequences out, or look whether truncation cut their completions off"


def sequence_log_probs(
    log_probs: Float[Array, "*B T"],
    where: Bool[Array, "*B T"] | None = None,
    average: bool = False,
    *,
    segment_ids: Integer[ArrayLike, "*B T"] | None = None,
    num_segments: int | None = None,
    ld_alpha: float | None = None,
    shared_tokens: Integer[Array, "*S"] | None = None,
) -> Float[Array, "*S"]:
    """The log-probability of each sequence, or its mean over the tokens that count.

    sum = Σ_t where_t · w_t · log_probs_t; with `average` it is divided by n = Σ_t where_t.

    The weight w_t is 1. With LD-DPO's `ld_alpha` it is `ld_alpha` for the counted tokens after the first
    `shared_tokens`, so that the longer response of a pair does not win or lose by its length alone.

    A row is a sequence. With `segment_ids` rows are packed: each segment is a sequence, and results have the shape
    (..., num_segments), with 0 where a row has fewer segments. `take_segments` selects those of a batch's pairs.

    Args:
        log_probs: the tokens' log-probabilities, any float dtype. Tokens that do not count have no effect.
        where: bool, which tokens count; None counts all.
        average: whether to divide by the number of tokens that count.
        segment_ids: integers that number a row's segments from 1, and are 0 at padding, which never counts.
        num_segments: the largest number of segments in a row, a Python int; with `segment_ids` only.
        ld_alpha: weight in [0, 1] of the tokens beyond the shared length; None for equal weights.
        shared_tokens: integers, for each sequence the number of counted tokens of the shorter response of its pair;
            with `ld_alpha` only.

    Returns:
        float32. A sequence without a counted token has 0, and gradient 0. Under jit, a row with more segments than
        `num_segments` has NaN, and so has its gradient.

    Raises:
        ValueError: outside of jit, the mean of a sequence without a counted token is asked for.

    Example:
        >>> log_probs = jnp.log(jnp.array([[0.5, 0.5, 0.25], [0.5, 0.125, 1.0]]))
        >>> where = jnp.array([[True, True, True], [True, True, False]])
        >>> sequence_log_probs(log_probs, where).tolist()
        [-2.772, -2.772]
        >>> sequence_log_probs(log_probs, where, average=True).tolist()
        [-0.924, -1.386]
        >>> sequence_log_probs(log_probs, where, ld_alpha=0.5, shared_tokens=jnp.array([2, 2])).tolist()
        [-2.079, -2.772]
        >>> sequence_log_probs(log_probs, segment_ids=jnp.array([[1, 1, 2], [1, 1, 0]]), num_segments=2).tolist()
        [[-1.386, -1.386], [-2.772, 0.0]]

    References:
        Liu et al., Length Desensitization in Direct Preference Optimization, arXiv:2409.06411.
    """
    op = "sequence_log_probs"
    if not isinstance(average, bool | np.bool_):
        given = type(average).__name__
        raise TypeError(f"{op}: average is a {given}, but must be True or False; pass segment_ids by their name.")
    (log_probs,) = _checks.as_float32(op, log_probs=log_probs)
    where = _checks.as_where(op, where, log_probs.shape)
    sequences = sequences_of(op, segment_ids, num_segments, log_probs.shape)
    if (ld_alpha is None) != (shared_tokens is None):
        raise ValueError(f"{op}: ld_alpha and shared_tokens belong together; pass both, or neither.")
    where = sequences.tokens(where)
    counted = jnp.where(where, log_probs, 0.0)
    if ld_alpha is not None:
        _checks.check_python_numbers(op, ld_alpha=ld_alpha)
        _checks.check_number(op, "ld_alpha", ld_alpha, 0 <= ld_alpha <= 1, "in [0, 1]; None weights all tokens equally")
        shared_tokens = as_array(op, "shared_tokens", shared_tokens)
        shape = log_probs.shape[:-1] if sequences.ids is None else (*log_probs.shape[:-1], sequences.count)
        check_shape(op, "shared_tokens", shared_tokens, shape, "one count for each sequence")
        shared_tokens = (shared_tokens[..., None] if sequences.ids is None else shared_tokens).astype(jnp.int32)
        is_tail = sequences.rank(where) > sequences.spread(shared_tokens)
        # A weight of 0 leaves a token out: 0 · −inf would be NaN.
        counted = jnp.where(is_tail, ld_alpha * counted if ld_alpha else 0.0, counted)
    if average:
        _check_counts(op, sequences, where)
    result = sequences.mean(counted, where) if average else sequences.sum(counted)
    return result[..., 0] if sequences.ids is None else result


def _check_counts(op: str, sequences: Sequences, where: jax.Array) -> None:
    """Raises a ValueError where a concrete sequence counts no token. A segment that a row does not have is none."""
    cure = f"its mean is undefined: {_NO_TOKEN}"
    counts = sequences.sum(where.astype(jnp.int32))
    if sequences.ids is None:
        return _checks.check_counts(op, "where", counts[..., 0], cure)
    counts = jnp.where(sequences.exist(), counts, 1)
    rows = counts.reshape(-1, sequences.count)
    return _checks.check_counts(op, "where", rows, cure)


def wpo_weights(
    log_probs: Float[Array, "*B T"],
    log_sum_of_squares: Float[Array, "*B T"],
    where: Bool[Array, "*B T"],
    *,
    segment_ids: Integer[ArrayLike, "*B T"] | None = None,
    num_segments: int | None = None,
) -> Float[Array, "*S"]:
    """WPO's weight of each sequence, by how much it looks like the policy's own output; it has no gradient.

    weight = exp(mean over counted t of log_probs_t − log_sum_of_squares_t), where log_sum_of_squares is log Σ_v p_v².
    The weight of a pair is the product of its two weights: pass `pair_weights = weights_of_chosen *
    weights_of_rejected` to `dpo_loss`. `segment_ids` and `num_segments` are those of `sequence_log_probs`.

    Args:
        log_probs: the tokens' log-probabilities under the policy, any float dtype.
        log_sum_of_squares: log Σ_v p_v² at each token, any float dtype.
        where: bool, which tokens count.

    Returns:
        float32, positive: (...), or (..., num_segments) for packed rows. It is 1 for a sequence without a counted
            token, and under jit NaN in a row with more segments.

    Example:
        >>> p = jnp.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]])  # at two positions, where tokens 0 and 1 were sampled
        >>> log_probs = jnp.log(p[jnp.arange(2), jnp.arange(2)])[None]
        >>> log_sum_of_squares = jnp.log(jnp.sum(p**2, axis=-1))[None]
        >>> wpo_weights(log_probs, log_sum_of_squares, jnp.ones((1, 2), bool)).tolist()
        [1.271]

    References:
        Zhou et al., WPO: Enhancing RLHF with Weighted Preference Optimization, arXiv:2406.11827.
    """
    op = "wpo_weights"
    log_probs, log_sum_of_squares = jax.lax.stop_gradient(
        _checks.as_float32(op, log_probs=log_probs, log_sum_of_squares=log_sum_of_squares)
    )
    where = _checks.as_mask(op, "where", where, log_probs.shape)
    check_shape(op, "log_sum_of_squares", log_sum_of_squares, log_probs.shape, "one entry for each token")
    sequences = sequences_of(op, segment_ids, num_segments, log_probs.shape)
    where = sequences.tokens(where)
    weights = jnp.exp(sequences.mean(jnp.where(where, log_probs - log_sum_of_squares, 0.0), where))
    return weights[..., 0] if sequences.ids is None else weights
