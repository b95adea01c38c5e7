"""From hidden states to the result of a model's call: logits, loss and metrics, each only if it is requested."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from liger_jax._tree import tree_dataclass
from liger_jax.models.core.cache import KVCache
from liger_jax.models.core.embedding import head_logits
from liger_jax.models.core.experts import ExpertMetrics
from liger_jax.models.core.feed_forward import Aux
from liger_jax.models.core.lm_loss import LanguageModelLoss
from liger_jax.models.core.parallel.vocabulary_shards import logits_shards, without_padding
from liger_jax.models.quantized import is_quantized
from liger_jax.ops import LossMetrics


@tree_dataclass
class CausalLMOutput:
    """The result of a causal language model; what a call does not request is `None`.

    Attributes:
        loss: float32 scalar.
        logits: (B, kept positions, V) float32.
        metrics: metrics of the kept positions. Without labels no token is scored: `num_tokens` and `accuracy` are 0.
        cache: the cache that the call was given, with its tokens added.
        aux: sums over tokens that feed-forwards of some kinds return, such as those with experts: for each kind, a tree
            of arrays with a leading axis of layers. Dense models have none.
        experts: metrics of the routers of a mixture of experts, if metrics are requested. Dense models have none.
    """

    # The fields whose arrays have no batch axis, of whatever rank they are. The other fields' arrays begin with it.
    sums_over_tokens: ClassVar[tuple[str, ...]] = ("aux", "experts")

    loss: jax.Array | None = None
    logits: jax.Array | None = None
    metrics: LossMetrics | None = None
    cache: KVCache | None = None
    aux: Aux | None = None
    experts: ExpertMetrics | None = None


def predicted(
    loss: LanguageModelLoss, hidden: Float[Array, "B T D"], head: Any, *, return_logits: bool, return_metrics: bool
) -> CausalLMOutput:
    """The result of a call without labels."""
    logits = _logits(loss, hidden, head) if return_logits else None
    metrics = None
    if return_metrics:
        labels = jnp.zeros(hidden.shape[:-1], jnp.int32)
        _, metrics = loss(hidden, head, logits, labels, None, reduction="mean", return_metrics=True)
        nothing = jnp.zeros((), jnp.float32)
        metrics = dataclasses.replace(metrics, accuracy=nothing, num_tokens=nothing)
    return CausalLMOutput(logits=_of_vocabulary(loss, logits), metrics=metrics)


def scored(
    loss: LanguageModelLoss,
    hidden: Float[Array, "B T D"],
    head: Any,
    targets: Int[Array, "B T"],
    loss_weights: Float[Array, "B T"] | None,
    loss_normalizer: Any,
    *,
    return_logits: bool,
    return_metrics: bool,
) -> CausalLMOutput:
    """The result of a call with labels."""
    with_logits = return_logits or not loss.kernels.fused_linear_cross_entropy
    logits = _logits(loss, hidden, head) if with_logits else None
    reduction = "mean" if loss_normalizer is None else "sum"
    value, metrics = loss(
        hidden, head, logits, targets, loss_weights, reduction=reduction, return_metrics=return_metrics
    )
    if loss_normalizer is not None:
        value = value / jnp.asarray(loss_normalizer, jnp.float32)
    logits = _of_vocabulary(loss, logits) if return_logits else None
    return CausalLMOutput(loss=value, logits=logits, metrics=metrics)


def _logits(loss, hidden, head):
    """Logits (B, T, V), with padding after them if a mesh axis does not divide the vocabulary."""
    config, layout = loss.config, loss.kernels.mesh_layout
    head = head.astype(hidden.dtype) if is_quantized(head) else head
    if (tensor := layout.tensor_shards()) is not None:
        logits = logits_shards(tensor, hidden, head)
    else:
        logits = layout.run(head_logits, (hidden,), (head,), spec=layout.in_loss)
    softcap, scale = config.final_logit_softcapping, config.logit_scale
    logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    return without_padding(logits if scale == 1.0 else scale * logits, config.vocab_size)


def _of_vocabulary(loss, logits):
    """The logits without their padding."""
    vocab_size = loss.config.vocab_size
    return logits if logits is None or logits.shape[-1] == vocab_size else logits[..., :vocab_size]
