"""Small programs of a step of GRPO. Each operation of eager JAX would be one, which a start compiles or reads."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from liger_jax import losses
from liger_jax.ops.labels import IGNORE_INDEX


@jax.jit
def sampler_inputs(prompts: Any, mask: Any, seed: Any, number: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Prompts and mask on the devices, and the key of a step's random numbers."""
    return prompts, mask.astype(bool), jax.random.fold_in(jax.random.key(seed), number)


@functools.partial(jax.jit, static_argnums=1)
def advantages(rewards: Any, method: str) -> jax.Array:
    """The advantages of rewards (prompts, group), of which NaN count for nothing."""
    where = ~jnp.isnan(rewards)
    if method.startswith("reinforce"):
        return losses.reinforce_advantages(rewards, group_baseline=method == "reinforce_baseline", where=where)
    return losses.group_advantages(rewards, method, where=where)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def denominator(labels: Any, segment_ids: Any, loss_type: str, max_length: int | None, segments: int) -> jax.Array:
    """The denominator of the policy loss of packed rows."""
    mask = losses.shifted_labels(labels, segment_ids) != IGNORE_INDEX
    options = dict(segment_ids=segment_ids, num_segments=segments)
    return losses.policy_weights(mask, loss_type, max_length, **options)[1]
