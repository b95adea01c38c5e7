"""Rows longer than the positions of a model: its rotary embedding is stretched, if that is requested by name."""

import dataclasses
import math
from typing import Any

from liger_jax.ops import DynamicRope, LinearRope, Llama3Rope, YarnRope

ROPE_SCALINGS = {"linear": LinearRope, "dynamic": DynamicRope, "yarn": YarnRope, "llama3": Llama3Rope}
MOST_POSITIONS = 2**24  # which `rope_table` counts exactly in float32


def stretched(config: Any, length: int, rope_scaling: str | None = None) -> Any:
    """A config whose model accepts rows of a given length.

    A model without a RoPE scaling gets one. A model with one gets the same kind with a larger factor, the smallest
    whole multiple with which the length is reached. The model has not seen such positions in training, so this is never
    done without being requested.

    Args:
        config: the architecture, a `LlamaConfig` or one that derives from it.
        length: tokens of a row.
        rope_scaling: "linear", "dynamic", "yarn" or "llama3"; `None` to keep the model's positions.

    Returns:
        The config, unchanged if its positions suffice.

    Raises:
        ValueError: the length is more than the model's positions, and `rope_scaling` is `None`, unknown, or not the
            kind that the model has already; or more than 2²⁴.

    Example:
        >>> from liger_jax.models import LlamaConfig
        >>> longer = stretched(LlamaConfig(max_position_embeddings=4096), 10_000, "yarn")
        >>> longer.rope_scaling.factor, longer.longest_sequence
        (3.0, 12288)
    """
    if rope_scaling is not None and rope_scaling not in ROPE_SCALINGS:
        raise ValueError(f"rope_scaling={rope_scaling!r} must be one of {list(ROPE_SCALINGS)}, or None.")
    longest, own = config.longest_sequence, config.rope_scaling
    if length <= longest:
        return config
    kinds = kinds_for(config)
    cure = f"scale the rotary embedding: rope_scaling={' or '.join(map(repr, kinds))}"
    if rope_scaling is None:
        raise ValueError(
            f"length={length} is more than the {longest} positions that the model accepts. Pass at most {longest}"
            + (f", or {cure}." if kinds else ".")
        )
    if length > MOST_POSITIONS:
        raise ValueError(
            f"length={length} is more than {MOST_POSITIONS}, up to which float32 represents all positions."
        )
    if rope_scaling not in kinds:
        raise ValueError(
            f"rope_scaling={rope_scaling!r} does not fit the model's {type(own).__name__}, which reaches "
            f"{longest} positions. " + (f"To go beyond, {cure}." if kinds else f"Pass a length of at most {longest}.")
        )
    times = math.ceil(length / longest)
    if own is not None:
        scaling = dataclasses.replace(own, factor=own.factor * times)
    elif rope_scaling == "linear":
        scaling = LinearRope(factor=float(times))
    else:
        scaling = ROPE_SCALINGS[rope_scaling](factor=float(times), original_max_position_embeddings=longest)
    scaled = dataclasses.replace(config, rope_scaling=scaling)
    if scaled.longest_sequence >= length:
        return scaled
    # Llama 3.1's factor is half of what its positions are of those in training.
    return dataclasses.replace(scaled, max_position_embeddings=longest * times)


def kinds_for(config: Any) -> list[str]:
    """The rotary embeddings by which a model may be stretched.

    Returns names of `ROPE_SCALINGS`: all, or the kind that the model has already; none for a `LongRope`.
    """
    own = config.rope_scaling
    return [name for name, kind in ROPE_SCALINGS.items() if own is None or type(own) is kind]
