"""The result of a model's call."""

from typing import ClassVar

import jax

from liger_jax._tree import tree_dataclass
from liger_jax.models.core.cache import KVCache
from liger_jax.models.core.experts import ExpertMetrics
from liger_jax.models.core.feed_forward import Aux
from liger_jax.ops import LossMetrics


@tree_dataclass
class CausalLMOutput:
    """The result of a causal language model; parts that a call does not ask for are `None`.

    Attributes:
        loss: float32 scalar.
        logits: (B, kept positions, V) float32.
        metrics: metrics of the kept positions. Without labels no token is scored: `num_tokens` and `accuracy` are 0.
        cache: the call's cache, with the call's tokens added.
        aux: sums over tokens that the feed-forwards of a kind return, such as those of experts: for each such kind a
            tree of arrays with a leading axis of layers. Dense models have none.
        experts: where metrics are asked for, what the routers of a mixture of experts did. Dense models have none.
    """

    # The fields whose arrays have no batch axis, of whatever rank they are. The other fields' arrays begin with it.
    sums_over_tokens: ClassVar[tuple[str, ...]] = ("aux", "experts")

    loss: jax.Array | None = None
    logits: jax.Array | None = None
    metrics: LossMetrics | None = None
    cache: KVCache | None = None
    aux: Aux | None = None
    experts: ExpertMetrics | None = None
