"""The checks of the arguments of `generate` and `stream`."""

from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer

from liger_jax.ops import DynamicRope, LongRope

_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)  # XLA takes a smaller number for 0


def check_choice(max_new_tokens: int, temperature: float, top_p: float, top_k: int | None, key: Any) -> None:
    """Raises a ValueError unless tokens can be chosen with these options."""
    if max_new_tokens < 1:
        raise ValueError(f"generate: max_new_tokens={max_new_tokens} must be at least 1.")
    if not (temperature == 0 or _LEAST <= temperature <= _MOST):
        raise ValueError(
            f"generate: temperature={temperature} must be 0, for the most likely token, or positive and finite in "
            f"float32, from {_LEAST:.2g} to {_MOST:.2g}, since logits are divided by it."
        )
    if not _LEAST <= top_p <= 1:
        raise ValueError(
            f"generate: top_p={top_p} must be in (0, 1], and at least {_LEAST:.2g}, the smallest number in float32; "
            "pass 1.0 to sample from all tokens."
        )
    if top_k is not None and top_k < 1:
        raise ValueError(f"generate: top_k={top_k} must be at least 1; pass None to sample from all tokens.")
    if temperature == 0 and (top_p != 1 or top_k is not None or key is not None):
        raise ValueError(
            "generate: temperature=0 takes the most likely token, so key, top_p and top_k would be ignored. "
            "Leave them out, or pass a positive temperature."
        )
    if temperature > 0 and key is None:
        raise ValueError(
            f"generate: temperature={temperature} samples tokens, and key is None. "
            "Pass key=jax.random.key(0), or temperature=0 for the most likely token."
        )


def check_ends(vocab_size: int, stops: tuple[int, ...], pad: int, pad_token_id: int | None) -> None:
    """Raises a ValueError unless rows can end with these tokens, and be filled up with that one."""
    if pad_token_id is not None and not stops:
        raise ValueError(
            f"generate: pad_token_id={pad_token_id} is given without eos_token_id, and the model has none: "
            "no row ends early, so nothing is padded. Padding in input_ids is marked by attention_mask."
        )
    wrong = [token for token in (*stops, pad) if not 0 <= token < vocab_size]
    if wrong:
        raise ValueError(f"generate: eos_token_id or pad_token_id is {wrong[0]}, and must be in [0, {vocab_size}).")


def check_prompts(config: Any, input_ids: jax.Array, mask: jax.Array, max_new_tokens: int) -> None:
    """Raises a ValueError unless the model can continue these rows by so many tokens."""
    if mask.shape != input_ids.shape or 0 in mask.shape:
        raise ValueError(
            f"generate: input_ids has shape {input_ids.shape} and attention_mask {mask.shape}; both must be (batch, "
            "length), with at least one row and one token."
        )
    total = input_ids.shape[1] + max_new_tokens
    if total > config.longest_sequence:
        raise ValueError(
            f"generate: {input_ids.shape[1]} positions of input_ids and max_new_tokens={max_new_tokens} are more than "
            f"the {config.longest_sequence} that the model accepts (max_position_embeddings and rope_scaling). "
            "Generate fewer tokens, or shorten the prompts."
        )
    if any(isinstance(x, Tracer) or not x.is_fully_addressable for x in (input_ids, mask)):
        return  # a wrong id then makes logits NaN, and tokens −1
    ids, is_token = np.asarray(input_ids), np.asarray(mask)
    if not is_token.any(axis=1).all():
        raise ValueError(
            f"generate: attention_mask hides all tokens of row {is_token.any(axis=1).argmin()}. Keep at least one."
        )
    wrong = ids[is_token & ((ids < 0) | (ids >= config.vocab_size))]
    if wrong.size:
        raise ValueError(
            f"generate: input_ids holds {wrong[0]}, which is not a token in [0, {config.vocab_size}). "
            "Mask padding with attention_mask."
        )


def why_rows_stay(model: Any, input_ids: Any, max_new_tokens: int) -> str | None:
    """The reason why rows that have ended cannot leave the batch, as the end of a sentence; None if they can."""
    leaves = [input_ids, *jax.tree.leaves(nnx.state(model))]
    if any(isinstance(x, Tracer) for x in leaves):
        return "generate is called inside a jitted function, in which no shape can depend on tokens."
    if any(isinstance(x, jax.Array) and len(x.sharding.device_set) > 1 for x in leaves):
        return "the model or input_ids are sharded over several devices, each of which has its own rows."
    scaling, total = model.config.rope_scaling, input_ids.shape[1] + max_new_tokens
    if isinstance(scaling, DynamicRope | LongRope) and total > (most := scaling.original_max_position_embeddings):
        return (
            f"with up to {total} positions, more than original_max_position_embeddings={most}, rope_scaling turns all "
            "rows by the longest one."
        )
    return None
