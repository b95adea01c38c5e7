"""Numbers of sequences between their two layouts: in a vector, and (rows, segments) as packed rows hold them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Integer

from liger_jax.losses import _checks
from liger_jax.losses._sequences import sequences_of
from liger_jax.ops.checks import ArrayLike, as_array, check_int


def take_segments(values: Float[Array, "R S"], places: Integer[ArrayLike, "P 2"]) -> Float[Array, "P"]:
    """Selects the values of P segments from an array (rows, segments), as `sequence_log_probs` returns for packed rows.

    Args:
        values: a number for each segment of each row, any float dtype.
        places: row and segment of each sequence, counted from 0, as returned by `pack_pairs` and `pack_completions`.

    Returns:
        float32. Under jit, a place outside of `values` gives NaN.

    Raises:
        ValueError: without jit, a place is outside of `values`.

    Example:
        >>> sums = jnp.array([[-1.0, -2.0, -3.0, 0.0], [-5.0, -6.0, 0.0, 0.0]])
        >>> take_segments(sums, jnp.array([[1, 0], [0, 2]])).tolist()
        [-5.0, -3.0]
    """
    op = "take_segments"
    (values,) = _checks.as_float32(op, values=values)
    if values.ndim != 2:
        raise ValueError(f"{op}: values has shape {values.shape}, but must be (rows, segments).")
    places = _as_places(op, places, values.shape)
    is_inside = _is_inside(places, values.shape)
    taken = values[jnp.where(is_inside, places[:, 0], 0), jnp.where(is_inside, places[:, 1], 0)]
    return jnp.where(is_inside, taken, jnp.nan)


def place_segments(
    values: Float[Array, "P"], places: Integer[ArrayLike, "P 2"], shape: tuple[int, int]
) -> Float[Array, "R S"]:
    """Puts the values of P sequences into an array (rows, segments); the inverse of `take_segments`.

    Use it for the advantages, importance ratios and counts that the losses take for packed rows.

    Args:
        values: a number for each sequence, any float dtype.
        places: row and segment of each sequence, counted from 0.
        shape: the numbers of rows and of segments in a row.

    Returns:
        float32, 0 where a row has no such segment. Under jit, everything is NaN if any place is outside of `shape`.

    Raises:
        ValueError: without jit, a place is outside of `shape`.

    Example:
        >>> place_segments(jnp.array([1.0, -1.0]), jnp.array([[1, 0], [0, 1]]), (2, 2)).tolist()
        [[0.0, -1.0], [1.0, 0.0]]
    """
    op = "place_segments"
    (values,) = _checks.as_sequences(op, values=values)
    if not isinstance(shape, (tuple, list)) or len(shape) != 2:
        raise TypeError(f"{op}: shape={shape!r} must be two Python ints, the numbers of rows and of segments.")
    check_int(op, **{f"shape[{i}]": size for i, size in enumerate(shape)})
    places = _as_places(op, places, shape)
    if len(places) != len(values):
        raise ValueError(f"{op}: there are {len(values)} values and {len(places)} places; pass one for each.")
    is_inside = _is_inside(places, shape)
    laid = jnp.zeros(shape, jnp.float32).at[
        jnp.where(is_inside, places[:, 0], 0), jnp.where(is_inside, places[:, 1], 0)
    ].set(values)  # fmt: skip
    return jnp.where(jnp.all(is_inside), laid, jnp.nan)


def spread_segments(values: Float[Array, "*R S"], segment_ids: Integer[ArrayLike, "*R T"]) -> Float[Array, "*R T"]:
    """Gives each token the value of its segment: for packed rows, it replaces `x[:, None]` in a loss by token.

    Args:
        values: a number for each segment of each row, any float dtype.
        segment_ids: integers that number a row's segments from 1, and are 0 at padding.

    Returns:
        float32, 0 at padding. Under jit, a row with a segment for which `values` has no number is NaN.

    Raises:
        ValueError: without jit, a segment has no number.

    Example:
        >>> spread_segments(jnp.array([[0.5, -1.0]]), jnp.array([[1, 1, 2, 0]])).tolist()
        [[0.5, 0.5, -1.0, 0.0]]
    """
    op = "spread_segments"
    (values,) = _checks.as_float32(op, values=values)
    segment_ids = as_array(op, "segment_ids", segment_ids)
    if values.ndim == 0 or segment_ids.ndim != values.ndim or segment_ids.shape[:-1] != values.shape[:-1]:
        raise ValueError(
            f"{op}: values has shape {values.shape} and segment_ids {segment_ids.shape}, but they must be (..., "
            "segments) and (..., tokens) of the same rows."
        )
    return sequences_of(op, segment_ids, values.shape[-1], segment_ids.shape).spread(values)


def _as_places(op: str, places: Any, shape: tuple[int, ...]) -> jax.Array:
    places = as_array(op, "places", places)
    if not jnp.issubdtype(places.dtype, jnp.integer):
        raise TypeError(f"{op}: places have dtype {places.dtype}, but must be integers: row and segment, from 0.")
    if places.ndim != 2 or places.shape[1] != 2:
        raise ValueError(f"{op}: places has shape {places.shape}, but must be (sequences, 2): row and segment.")
    if not isinstance(places, Tracer) and places.is_fully_addressable:
        values = np.asarray(places)  # NumPy's own comparisons, which jit does not trace
        wrong = values[~_is_inside(values, shape)]
        if len(wrong):
            raise ValueError(
                f"{op}: places hold {wrong[0].tolist()}, but rows and segments count from 0 in {tuple(shape)}; pass "
                "the places of this batch, and num_segments as large as its fullest row."
            )
    return places


def _is_inside(places: Any, shape: tuple[int, ...]) -> Any:
    rows, segments = places[:, 0], places[:, 1]
    return (rows >= 0) & (rows < shape[0]) & (segments >= 0) & (segments < shape[1])
