"""The result of a model's call."""

import jax

from liger_jax._tree import tree_dataclass
from liger_jax.models.core.cache import KVCache
from liger_jax.ops import LossMetrics


@tree_dataclass
class CausalLMOutput:
    """The result of a causal language model; `None` where a call does not ask for a part.

    Attributes:
        loss: float32 scalar.
        logits: (B, kept positions, V) float32.
        metrics: of the kept positions; without labels no token is scored, so `num_tokens` and `accuracy` are 0.
        cache: the call's, with its tokens.
    """

    loss: jax.Array | None = None
    logits: jax.Array | None = None
    metrics: LossMetrics | None = None
    cache: KVCache | None = None
