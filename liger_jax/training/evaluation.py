"""Scores of rows that are held out: loss, perplexity and accuracy, as means over all scored tokens."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from liger_jax.models.core.experts import without_router_loss
from liger_jax.training.rows import Rows


def loss_and_accuracy(
    model: nnx.Module, batch: Mapping[str, Any], normalizer: Any = None, *, token_scaling: bool = False
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """A loss function for `make_step` with `has_aux=True`. The accuracy adds no cost to the loss.

    Args:
        model: a causal language model.
        batch: its arguments.
        normalizer: the denominator of both means; `None` for the batch's number of scored tokens.
        token_scaling: whether each token's loss is multiplied by its probability, as in a model's call.

    Returns:
        The mean loss, and `token_accuracy`, the fraction of tokens that the model predicts. Both are float32 scalars
        that add up over micro-batches.

    Example:
        >>> from liger_jax.models import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_attention_heads=2)
        >>> rows = {name: jnp.ones((2, 8), jnp.int32) for name in ("input_ids", "labels")}
        >>> list(loss_and_accuracy(LlamaForCausalLM(config, rngs=nnx.Rngs(0)), rows)[1])
        ['token_accuracy']
    """
    out: Any = model(**batch, loss_normalizer=normalizer, token_scaling=token_scaling, return_metrics=True)
    share = 1.0 if normalizer is None else out.metrics.num_tokens / normalizer
    return out.loss, {"token_accuracy": jnp.asarray(share * out.metrics.accuracy)}


def score_sums(graph: nnx.GraphDef) -> Any:
    """Makes a jitted function that computes the sums over rows from which scores are computed.

    Args:
        graph: the model's structure.

    Returns:
        A jitted function of parameters, frozen variables and rows. It returns the sum of cross-entropies, without the
        losses of a mixture's routers, the number of tokens that the model predicts, and the number of scored tokens.

    Example:
        >>> from liger_jax.models import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_attention_heads=2)
        >>> graph, params, frozen = nnx.split(LlamaForCausalLM(config, rngs=nnx.Rngs(0)), nnx.Param, ...)
        >>> rows = {name: jnp.ones((2, 8), jnp.int32) for name in ("input_ids", "labels")}
        >>> score_sums(graph)(params, frozen, rows)[2].item()
        14.0
    """

    @jax.jit
    def sums(params, frozen, batch):
        model = without_router_loss(nnx.merge(graph, params, frozen))
        out = model(**batch, loss_normalizer=1.0, return_metrics=True)
        return jnp.stack([out.loss, out.metrics.num_tokens * out.metrics.accuracy, out.metrics.num_tokens])

    return sums


def mean_scores(totals: Sequence[float]) -> dict[str, float]:
    """The scores of a language model."""
    loss, right, tokens = totals
    mean = loss / tokens
    perplexity = math.exp(min(mean, 700.0))  # beyond it, exp is more than a float holds
    return {"eval_loss": mean, "eval_perplexity": perplexity, "eval_token_accuracy": right / tokens}


def scoring(
    sums: Any, frozen: Any, scores: Callable[[Sequence[float]], dict[str, float]] = mean_scores
) -> Callable[[Any, Sequence[Rows]], dict[str, float]]:
    """Makes a function that scores parameters, for `evaluate` of `Loop`.

    Args:
        sums: the result of `score_sums`, perhaps compiled; or another function of parameters, frozen variables and rows
            that returns an array of sums.
        frozen: the variables that are not trained.
        scores: a function of the sums over all rows, which returns the scores by name.

    Returns:
        A function of parameters and batches of one shape, which returns the scores of all batches by name.

    Example:
        >>> sums = lambda params, frozen, batch: np.array([batch, 1.0, 2.0])
        >>> scoring(sums, None)(None, [1.0, 3.0])["eval_loss"]
        1.0
    """

    def score(params, batches):
        # One program at a time, as in `digests.of_leaves`.
        each = [jax.block_until_ready(sums(params, frozen, batch)) for batch in batches]
        totals: Any = np.sum(each, axis=0, dtype=np.float64)
        return scores(totals.tolist())

    return score
