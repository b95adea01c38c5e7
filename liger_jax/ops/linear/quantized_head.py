"""Log-probabilities by a quantised head, one slice of the vocabulary after another: the whole head is never dense.

Each slice is dequantised, its logits are reduced to statistics, and it is freed; the backward repeats this. The slices'
statistics are merged in the same way as those of several devices' shards.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from liger_jax.ops import _vocab_shards, checks, loss_terms
from liger_jax.ops.block_quantized import BlockQuantized
from liger_jax.ops.eager import compiled_once
from liger_jax.ops.linear._statistics import linear_statistics, problem_on_device
from liger_jax.ops.linear.fused_linear_log_probs import TokenLogProbs, token_log_probs
from liger_jax.ops.linear.selected_tokens import logits_of_quantized
from liger_jax.pallas_kernels.cross_entropy import formulas
from liger_jax.pallas_kernels.cross_entropy.formulas import IMPOSSIBLE_LABEL, NO_LABEL, Statistics
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import LinearOptions

OP = "quantized_log_probs"
MOST_IN_A_SLICE = 2**14  # 128 MiB of a bfloat16 head of width 4,096
_SLICES = "slices"


def quantized_log_probs(
    hidden: Float[Array, "*tokens D"],
    head: BlockQuantized,
    labels: Integer[Array, "*tokens"],
    *,
    ignore_index: int | None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    entropy: bool = False,
    metrics: bool = True,
    selected_token_ids: Integer[Array, " K"] | None = None,
    vocab_axis: str | None = None,
    **limits: Any,
) -> TokenLogProbs:
    """What `fused_linear_log_probs` gives with the dense head, which is frozen here.

    The head's blocks run along D. `metrics` says whether largest logits and their tokens are made. Inside
    `jax.shard_map`, `vocab_axis` is the mesh axis that splits the head's vocabulary. `limits` are the
    `memory_budget_bytes` and the `implementation` of a slice's products; all else is as in `fused_linear_log_probs`.
    """
    options = loss_terms.LossOptions(OP, ignore_index, 0.0, 0.0, logit_scale / temperature, logit_softcap, "none")
    logit_options = dataclasses.replace(options.logit_options(metrics), entropy=entropy)
    linear = LinearOptions(logit_options, "vd", checks.current_precision(OP, None), "lean", 0)
    flat, vocab_size, dtype = labels.reshape(-1), head.shape[0], hidden.dtype
    terms, labels_here = _vocab_shards.token_terms(flat, None, None, None, options, vocab_size, vocab_axis)
    # The slices' gradients of the hidden states are summed in float32.
    x = hidden.reshape(-1, hidden.shape[-1]).astype(jnp.float32)
    merged = _of_slices(linear, dtype, tuple(limits.items()), x, head, labels_here, terms.counts)
    if vocab_axis is not None:
        merged = _vocab_shards.merged_over(merged, vocab_axis, vocab_size)
    selected = None
    if selected_token_ids is not None:
        selected = logits_of_quantized(x.astype(dtype), head, selected_token_ids, terms.counts, linear, vocab_axis)
    return token_log_probs(formulas.where(terms.counts, merged), terms, labels.shape, selected)


@functools.partial(compiled_once, static_argnums=(0, 1, 2))
def _of_slices(
    linear: LinearOptions,
    dtype: Any,
    limits: tuple[tuple[str, Any], ...],
    x: jax.Array,
    head: BlockQuantized,
    labels: jax.Array,
    counts: jax.Array,
) -> Statistics:
    """The statistics (N,) of float32 hidden states (N, D) by a head (V, D); the products are in `dtype`."""
    vocab_size = head.shape[0]
    slices = math.ceil(vocab_size / MOST_IN_A_SLICE)
    size = math.ceil(vocab_size / slices)

    @jax.checkpoint
    def statistics_of(rows: BlockQuantized, start: jax.Array, x: jax.Array) -> Statistics:
        x, weight = x.astype(dtype), rows.astype(dtype)
        own = labels - start
        is_own = (labels >= 0) & (own >= 0) & (own < weight.shape[0])
        y = jnp.where(is_own, own, jnp.where(labels == NO_LABEL, NO_LABEL, IMPOSSIBLE_LABEL))
        problem = problem_on_device(
            OP, x, weight, y, None, options=linear, reduction="none", vocab_axis=None, **dict(limits)
        )  # fmt: skip
        # Before slices are merged, where a gradient of 0 would be multiplied by the NaN of an ignored row.
        return formulas.where(counts, linear_statistics(x, weight, None, None, y, problem, linear))

    starts = jnp.arange(slices, dtype=jnp.int32) * size
    full = head[: (slices - 1) * size]
    stacked = jax.tree.map(lambda leaf: leaf.reshape(slices - 1, size, *leaf.shape[1:]), full)
    statistics = jax.lax.map(lambda of_slice: statistics_of(*of_slice, x), (stacked, starts[:-1]))
    last = statistics_of(head[(slices - 1) * size :], starts[-1], x)
    statistics = jax.tree.map(lambda slices, last: jnp.concatenate([slices, last[None]]), statistics, last)
    merge = functools.partial(_vocab_shards.merged_over, axis=_SLICES, shard_size=size)
    return jax.tree.map(lambda leaf: leaf[0], jax.vmap(merge, axis_name=_SLICES)(statistics))
