"""What a call of a causal language model may ask for: checks, and the cut to the positions that are kept."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer


def keep(logits_to_keep: Any, hidden: jax.Array, *per_token: jax.Array | None) -> tuple[Any, ...]:
    """Cuts the T axis of hidden states and of per-token arrays down to the kept positions.

    Args:
        logits_to_keep: the last so many positions, 0 for all; or a one-dimensional integer array of positions.
        hidden: (B, T, D).
        *per_token: (B, T) each; `None` entries pass.

    Returns:
        The arrays, in that order. Under jit a position outside of the sequence makes its hidden states NaN.

    Raises:
        ValueError: a position, or their number, is outside of the sequence.
        TypeError: `logits_to_keep` is neither an int nor an array.
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
                raise ValueError(f"logits_to_keep holds {wrong[0]}, which is no position in [-{length}, {length}).")
        # Under jit, hidden states out of range become NaN, and so do logits and loss.
        return tuple(None if x is None else jnp.take(x, index, axis=1) for x in (hidden, *per_token))
    try:
        count = operator.index(logits_to_keep)
    except TypeError:
        raise TypeError(
            f"logits_to_keep={logits_to_keep!r} must be an int or a one-dimensional integer array of positions."
        ) from None
    if not 0 <= count <= length:
        raise ValueError(f"logits_to_keep={count} must lie in [0, {length}], the sequence's length; 0 keeps all.")
    return tuple(None if x is None else x[:, length - count if count else 0 :] for x in (hidden, *per_token))


def check_call(input_ids: Any, labels: Any, shift_labels: Any, loss_weights: Any, loss_normalizer: Any) -> None:
    """Refuses arguments of a call that exclude each other, would be ignored, or are of a wrong kind.

    Args:
        input_ids: as `CausalLM.__call__` takes it.
        labels: likewise.
        shift_labels: likewise.
        loss_weights: likewise.
        loss_normalizer: likewise.

    Raises:
        ValueError: an exclusive pair, an argument without labels, or a shape.
        TypeError: integers are expected and something else comes.
    """
    if input_ids.ndim != 2:
        raise ValueError(f"input_ids has shape {input_ids.shape}; it must be (batch, length). Add the missing axis.")
    if input_ids.shape[1] == 0:
        raise ValueError(f"input_ids has shape {input_ids.shape}; a sequence must have at least one token.")
    if labels is not None and shift_labels is not None:
        raise ValueError("labels and shift_labels exclude each other: pass the unshifted or the shifted ones.")
    if labels is None and shift_labels is None:
        for name, value in (("loss_weights", loss_weights), ("loss_normalizer", loss_normalizer)):
            if value is not None:
                raise ValueError(f"{name} is given without labels, so there is no loss to use it. Pass labels.")
    if jnp.ndim(loss_normalizer if loss_normalizer is not None else 0):
        raise ValueError(f"loss_normalizer has shape {jnp.shape(loss_normalizer)}; it must be a scalar.")
    for name, value in (("input_ids", input_ids), ("labels", labels), ("shift_labels", shift_labels)):
        if value is not None and not jnp.issubdtype(value.dtype, jnp.integer):
            raise TypeError(f"{name} has dtype {value.dtype}; it must be an integer array.")


def check_shapes(shape: tuple[int, ...], **arrays: Any) -> None:
    """Refuses arrays that are not of the tokens' shape.

    Args:
        shape: (B, T).
        **arrays: by argument name; `None` entries pass.

    Raises:
        ValueError: the first that is of another shape.
    """
    for name, array in arrays.items():
        if array is not None and array.shape != shape:
            cure = "Labels are not shifted by the caller: pass as many as tokens." if name == "labels" else ""
            raise ValueError(f"{name} has shape {array.shape}; it must be {shape}, like input_ids. {cure}".strip())
