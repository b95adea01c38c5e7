"""The log-probabilities of whole answers, in rows in which several stand side by side."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from liger_jax import losses
from liger_jax.ops.labels import IGNORE_INDEX
from liger_jax.training.rows import ARGUMENTS


class Responses(NamedTuple):
    """Numbers of each segment, (B, S) float32, and 0 where a row has fewer."""

    log_probs: jax.Array  # the answer's log-probability, summed over its tokens
    tokens: jax.Array  # how many they are
    nll: jax.Array  # the negative log-likelihood of the answer, or of prompt and answer


def responses(
    model: Any, batch: Mapping[str, Any], num_segments: int, *, ld_alpha: float | None = None, prompts: bool = False
) -> Responses:
    """What a model makes of the answers of some rows.

    `num_segments`: S, the most segments of a row, which is even: segments 1 and 2 are a pair, and so on. `ld_alpha`:
    weight of an answer's tokens beyond the shorter answer of its pair; `None` weighs all alike.
    """
    segment_ids, labels = batch["segment_ids"], batch["labels"]
    if prompts:
        labels = jnp.where(segment_ids > 0, batch["input_ids"], IGNORE_INDEX)
    rows = {name: batch[name] for name in ARGUMENTS} | {"labels": labels}
    log_probs = model.log_probs(**rows).log_probs
    where = losses.shifted_labels(batch["labels"], segment_ids) != IGNORE_INDEX
    segments: Any = dict(segment_ids=segment_ids, num_segments=num_segments)
    tokens = losses.sequence_log_probs(where.astype(jnp.float32), where, **segments)
    nll = -losses.sequence_log_probs(log_probs, None if prompts else where, **segments)
    if ld_alpha is None:
        return Responses(losses.sequence_log_probs(log_probs, where, **segments), tokens, nll)
    shorter = jnp.minimum(tokens[:, 0::2], tokens[:, 1::2]).astype(jnp.int32)
    segments |= dict(ld_alpha=ld_alpha, shared_tokens=jnp.repeat(shorter, 2, axis=1))
    return Responses(losses.sequence_log_probs(log_probs, where, **segments), tokens, nll)


def sides(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Numbers of segments, (B, S), as those of chosen and of rejected answers, (B·S/2,) each."""
    return x[:, 0::2].ravel(), x[:, 1::2].ravel()
