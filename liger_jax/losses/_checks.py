"""The checks that losses on log-probabilities share. Each message names argument, value, rule and cure."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from liger_jax.ops import checks
from liger_jax.ops.checks import check_number as check_python_numbers

# exp of more than this is near float32's end, 3.4e38 = exp(88.7); with it a ratio times an advantage stays finite.
EXPONENT_LIMIT = 80.0


def clamp_exponent(x: jax.Array) -> jax.Array:
    """x, at most the limit. Beyond it the gradient is 0, even where the cotangent is inf; `minimum` would give NaN."""
    return jnp.where(x > EXPONENT_LIMIT, EXPONENT_LIMIT, x)


def check_number(op: str, name: str, value: Any, holds: bool, law: str) -> None:
    """Raises a ValueError that states `law` unless it `holds`."""
    if not holds:
        raise ValueError(f"{op}: {name}={value!r} must be {law}.")


def check_positive(op: str, **numbers: Any) -> None:
    """Raises a TypeError or ValueError for the first option that is no Python number above 0."""
    check_python_numbers(op, **numbers)
    for name, value in numbers.items():
        check_number(op, name, value, 0 < value < float("inf"), "a finite number > 0")


def check_denominator(op: str, **values: Any) -> None:
    """Raises a ValueError for the first Python number that is not above 0, and a TypeError for what is no number.

    Arrays of one number pass, since they may be traced; None passes.
    """
    for name, value in values.items():
        if value is not None and not isinstance(value, (int, float)):
            checks.check_shape(op, name, checks.as_real(op, name, value), (), "one number")
    check_positive(op, **{name: value for name, value in values.items() if isinstance(value, (int, float))})


def check_label_smoothing(op: str, label_smoothing: Any) -> None:
    """Raises a TypeError or ValueError unless `label_smoothing`, the share of wrong labels, is in [0, 0.5)."""
    check_python_numbers(op, label_smoothing=label_smoothing)
    law = "in [0, 0.5), the share of pairs whose labels are exchanged; 0.0 switches it off"
    check_number(op, "label_smoothing", label_smoothing, 0 <= label_smoothing < 0.5, law)


def check_is_read(op: str, name: str, is_set: bool, loss_type: Any, readers: tuple[str, ...]) -> None:
    """Raises a ValueError if an option is set that `loss_type`, a name or several, does not read."""
    types = (loss_type,) if isinstance(loss_type, str) else loss_type
    if is_set and not set(types) & set(readers):
        raise ValueError(
            f"{op}: {name} is given, but loss_type={loss_type!r} does not read it; leave it out, or use one of "
            f"{readers}."
        )


def as_float32(op: str, *optional: str, **arrays: Any) -> list[Any]:
    """Floating arrays in float32; another dtype is a TypeError. Those that are `optional` may be None."""
    return [None if x is None else x.astype(jnp.float32) for x in checks.floating(op, *optional, **arrays)]


def as_sequences(op: str, *optional: str, **arrays: Any) -> list[Any]:
    """Arrays (P,) with a number for each sequence, in float32, as `as_float32`. The first array decides P."""
    results = as_float32(op, *optional, **arrays)
    name, first = next(iter(arrays)), results[0]
    if first.ndim != 1:
        raise ValueError(
            f"{op}: {name} has shape {first.shape}, but must have one axis, with a number for each sequence; "
            "sequence_log_probs makes it from the tokens' log-probabilities."
        )
    for other, x in zip(arrays, results, strict=True):
        checks.check_shape(op, other, x, first.shape, f"one number for each sequence of {name}")
    return results


def as_mask(op: str, name: str, mask: Any, shape: tuple[int, ...], rule: str = "one entry for each token") -> jax.Array:
    """A bool mask of `shape`, or an error."""
    mask = checks.as_array(op, name, mask, "a bool mask, of JAX or NumPy")
    checks.check_bool(op, name, mask)
    checks.check_shape(op, name, mask, shape, rule)
    return mask


def as_where(op: str, where: Any, shape: tuple[int, ...]) -> jax.Array:
    """The argument `where` as a mask; None is true everywhere."""
    return jnp.ones(shape, bool) if where is None else as_mask(op, "where", where, shape)


def check_counts(op: str, name: str, counts: jax.Array, cure: str) -> None:
    """Raises a ValueError where a concrete number of tokens is 0. A traced number has no value to check."""
    if isinstance(counts, Tracer) or not counts.is_fully_addressable:
        return
    empty = np.flatnonzero(np.asarray(counts) == 0)
    if empty.size:
        place = np.unravel_index(empty[0], counts.shape) if counts.ndim == 2 else (empty[0],)
        where = " for row {} and segment {}".format(*place) if len(place) == 2 else f" for sequence {empty[0]}"
        where = "" if counts.ndim == 0 else where
        raise ValueError(f"{op}: {name} counts no token{where}; {cure}.")
