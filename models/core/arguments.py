"""The arguments of a model's call: their checks, the cut to the positions that are kept, and random keys."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Key

from liger_jax.pallas_kernels.tiles import is_symbolic


def keep(logits_to_keep: Any, hidden: jax.Array, *per_token: jax.Array | None) -> tuple[Any, ...]:
    """Cuts the T axis of hidden states and of per-token arrays down to the kept positions.

    `logits_to_keep`: k for the last k positions, 0 for all; or a one-dimensional integer array of positions. Returns
    the arrays, in the order given. Under jit a position outside the sequence gets NaN as its hidden state.
    """
    length = hidden.shape[1]
    if isinstance(logits_to_keep, jax.Array) or getattr(logits_to_keep, "ndim", 0):
        index = jnp.asarray(logits_to_keep)
        if index.ndim != 1 or not jnp.issubdtype(index.dtype, jnp.integer):
            raise ValueError(
                f"logits_to_keep has shape {index.shape} and dtype {index.dtype}; pass an int k for the last k "
                "positions, or a one-dimensional integer array of positions."
            )
        if not isinstance(index, Tracer):
            wrong = index[(index < -length) | (index >= length)]
            if wrong.size:
                raise ValueError(f"logits_to_keep holds {wrong[0]}, which is not a position in [-{length}, {length}).")
        # Under jit, hidden states out of range become NaN, and so do logits and loss.
        return tuple(None if x is None else jnp.take(x, index, axis=1) for x in (hidden, *per_token))
    try:
        count = operator.index(logits_to_keep)
    except TypeError:
        raise TypeError(
            f"logits_to_keep={logits_to_keep!r} must be an int or a one-dimensional integer array of positions."
        ) from None
    if not 0 <= count <= length:
        raise ValueError(f"logits_to_keep={count} must be in [0, {length}], the sequence's length; 0 keeps all.")
    return tuple(None if x is None else x[:, length - count if count else 0 :] for x in (hidden, *per_token))


def check_call(
    input_ids: Any,
    labels: Any,
    shift_labels: Any,
    loss_weights: Any = None,
    loss_normalizer: Any = None,
    token_scaling: Any = None,
) -> None:
    """Raises an error if arguments of `CausalLM.__call__` exclude each other, are ignored, or have a wrong type."""
    if input_ids.ndim != 2:
        raise ValueError(f"input_ids has shape {input_ids.shape}; it must be (batch, length). Add the missing axis.")
    if input_ids.shape[1] == 0:
        raise ValueError(f"input_ids has shape {input_ids.shape}; a sequence must have at least one token.")
    if is_symbolic(input_ids.shape[1]):
        raise ValueError(
            f"input_ids has the symbolic length {input_ids.shape[1]}; only the batch may be symbolic. Export the model "
            "for one length, and pad shorter sequences with attention_mask."
        )
    if labels is not None and shift_labels is not None:
        raise ValueError("labels and shift_labels exclude each other: pass the unshifted or the shifted ones.")
    if labels is None and shift_labels is None:
        of_loss = dict(loss_weights=loss_weights, loss_normalizer=loss_normalizer, token_scaling=token_scaling)
        for name, value in of_loss.items():
            if value is not None:
                raise ValueError(f"{name} is given without labels, so there is no loss that would use it. Pass labels.")
    if jnp.ndim(loss_normalizer if loss_normalizer is not None else 0):
        raise ValueError(f"loss_normalizer has shape {jnp.shape(loss_normalizer)}; it must be a scalar.")
    for name, value in (("input_ids", input_ids), ("labels", labels), ("shift_labels", shift_labels)):
        if value is not None and not jnp.issubdtype(value.dtype, jnp.integer):
            raise TypeError(f"{name} has dtype {value.dtype}; it must be an integer array.")


def check_shapes(shape: tuple[int, ...], **arrays: Any) -> None:
    """Raises an error unless arrays have the tokens' shape."""
    for name, array in arrays.items():
        if array is not None and array.shape != shape:
            cure = "Labels are not shifted by the caller: pass as many as tokens." if name == "labels" else ""
            raise ValueError(f"{name} has shape {array.shape}; it must be {shape}, like input_ids. {cure}".strip())


def check_rows(shape: tuple[int, ...], positions: Any, cache: Any, **masks: Any) -> None:
    """Raises an error if per-token arguments do not have the tokens' shape, or cannot be combined with a cache."""
    check_shapes(shape, **masks)
    if cache is not None and masks["segment_ids"] is not None:
        raise ValueError("segment_ids is given with a cache, but a row of a cache holds one sequence. Unpack the rows.")
    if positions is not None and positions.shape not in (shape, (1, shape[1])):
        raise ValueError(f"positions has shape {positions.shape}; it must be {shape} or {(1, shape[1])}.")


def as_key(caller: str, key: Any) -> Key[Array, ""]:
    """A typed key, of `jax.random.key` or of the numbers that `jax.random.PRNGKey` makes.

    Returns the key; one of numbers is of the kind that `jax_default_prng_impl` names.
    """
    key = jnp.asarray(key)
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        of_one_key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
        if key.dtype != of_one_key.dtype or key.shape[-1:] != of_one_key.shape:
            raise TypeError(
                f"{caller}: key has shape {key.shape} and dtype {key.dtype}, and is not a key of `jax.random`. Pass "
                "jax.random.key(0)."
            )
        key = jax.random.wrap_key_data(key)
    if key.ndim:
        raise ValueError(f"{caller}: key holds {key.shape} keys, and must be one. Pass key[0].")
    return key
