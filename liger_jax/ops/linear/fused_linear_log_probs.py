"""Log-probabilities, and entropies, of a linear layer's output, without ever holding the logits."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Integer

from liger_jax._tree import tree_dataclass
from liger_jax.ops import _explicit, _vocab_shards, checks, loss_terms, meshes
from liger_jax.ops.checks import ArrayLike
from liger_jax.ops.kernels import Implementation
from liger_jax.ops.labels import as_labels
from liger_jax.ops.layout import are_seen
from liger_jax.ops.linear._shards import shards_of
from liger_jax.ops.linear._statistics import problem_on_device, statistics_of_tokens
from liger_jax.ops.linear.selected_tokens import as_selected, logits_of_selected
from liger_jax.ops.linear.split_head import SplitHead, taken_apart
from liger_jax.pallas_kernels.cross_entropy import formulas
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import LinearOptions

OP = "fused_linear_log_probs"


@tree_dataclass
class TokenLogProbs:
    """Log-probabilities of each token's label; `...` is the labels' shape, p the softmax of a token's logits z.

    A token that does not count has 0 everywhere, and −1 as its predicted token.

    Attributes:
        log_probs: (...) float32, log p_y = z_y − log Σ_v exp(z_v) of the label y; differentiable.
        log_normalizer: (...) float32, log Σ_v exp(z_v), without gradient.
        max_logit: (...) float32, the largest logit, without gradient; None with `metrics=False`.
        predicted_tokens: (...) int32, the first index of the largest logit; None with `metrics=False`.
        entropy: (...) float32, −Σ_v p_v·log p_v in nats; differentiable; None without `entropy=True`.
        log_sum_of_squares: (...) float32, log Σ_v p_v², without gradient; None without `entropy=True`.
        selected_log_probs: (..., K) float32, log p of the `selected_token_ids`; differentiable; None without them.
    """

    log_probs: jax.Array
    log_normalizer: jax.Array
    max_logit: jax.Array | None
    predicted_tokens: jax.Array | None
    entropy: jax.Array | None
    log_sum_of_squares: jax.Array | None
    selected_log_probs: jax.Array | None = None


def fused_linear_log_probs(
    hidden: Float[ArrayLike, "*tokens D"],
    weight: Float[ArrayLike, "_ _"] | SplitHead,
    labels: Integer[ArrayLike, "*tokens"],
    *,
    selected_token_ids: Integer[ArrayLike, " K"] | None = None,
    bias: Float[ArrayLike, " V"] | None = None,
    weight_layout: str = "vd",
    where: Bool[ArrayLike, "*tokens"] | None = None,
    ignore_index: int | None = -100,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    entropy: bool = False,
    metrics: bool = True,
    vocab_axis: str | None = None,
    chunk_size: int | None = None,
    memory_budget_bytes: int | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: Implementation = None,
) -> TokenLogProbs:
    """`log_softmax(logits / temperature)` at the labels, with no buffer of the size (tokens, vocabulary).

    The logits are z = logit_scale · softcap(hidden · weightᵀ + bias) / temperature, from float32 accumulators, with
    softcap(u) = s·tanh(u/s). (TRL applies the softcap after the scale, softcap(logit_scale · u) / temperature, which
    differs only if both are set.) Preference and policy losses are functions of `log_probs`, and entropy bonuses of
    `entropy`:

        ∂ log p_y / ∂z_j = 1[j = y] − p_j          ∂H / ∂z_j = −p_j · (log p_j + H)

    Statistics are computed first, and slices of the logits are recomputed for the gradients. That takes 4 products of
    2·N·D·V operations, and the weight's gradient is written once: it is never summed in less than float32. Only
    gradients that are needed are computed. The entropy costs no product. On one device, results are bitwise
    reproducible. Meshes, and the arguments that are not listed here, are as in `fused_linear_cross_entropy`.

    With `selected_token_ids`, log p of the same K tokens is also returned for every row, such as "yes" and "no" for a
    grader. This costs products with K rows of the head, whose gradients are added to those rows of the weight's
    gradient. In 16 bits, the two terms of a selected token's gradient, that of its logit and that of the normaliser,
    are rounded separately, while those of a label are rounded as a sum.

    Args:
        labels: (...), integers in [0, V), or `ignore_index`. Any other label makes its token's log-probability and
            the gradients NaN under jit.
        selected_token_ids: (K,), integers in [0, V), the same for all tokens; None for none. An id may occur twice. Any
            other id makes its log-probabilities and the gradients NaN under jit.
        where: (...) bool, which tokens count; None for all. Others get 0 and a gradient of exactly 0.
        temperature: the logits are divided by it, a finite Python number > 0.
        entropy: whether to compute `entropy` and `log_sum_of_squares`, too.
        metrics: whether to compute `max_logit` and `predicted_tokens`.
        chunk_size: vocabulary entries in a slice; None to choose.

    Returns:
        `TokenLogProbs`, whose arrays have the labels' shape; `selected_log_probs` has K as one more axis at the end.

    Raises:
        ValueError: as from `fused_linear_cross_entropy`; or a concrete id is outside [0, V).

    Example:
        >>> hidden, weight = jnp.eye(2, 4), jnp.ones((8, 4))
        >>> tokens = fused_linear_log_probs(hidden, weight, jnp.array([3, 5]), entropy=True)
        >>> print(tokens.log_probs.round(4), tokens.entropy.round(4))
        [-2.0794 -2.0794] [2.0794 2.0794]

    References:
        Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024 (arXiv:2411.09009).
    """
    weight, split = taken_apart(weight)
    hidden, weight, bias, vocab_size = checks.linear_head(OP, hidden, weight, bias, weight_layout, split=split)
    checks.check_mode(OP, "lean", chunk_size, memory_budget_bytes)
    checks.check_flag(OP, entropy=entropy, metrics=metrics)
    loss_terms.check_temperature(OP, temperature)
    loss_terms.check_logit_options(OP, logit_scale, logit_softcap)
    scale = logit_scale / temperature
    loss_options = loss_terms.LossOptions(OP, ignore_index, 0.0, 0.0, scale, logit_softcap, reduction="none")
    labels, where = loss_terms.as_arrays(OP, labels, where=where)
    loss_terms.check_tokens(OP, labels, where, None, None, hidden.shape[:-1], vocab_size)

    logit_options = dataclasses.replace(loss_options.logit_options(metrics), entropy=entropy)
    static = dict(
        options=loss_options,
        linear=LinearOptions(logit_options, weight_layout, checks.current_precision(OP, precision), "lean", 0),
        chunk_size=chunk_size,
        memory_budget_bytes=memory_budget_bytes,
        implementation=implementation,
    )
    shards, selected = 1, selected_token_ids
    if selected is not None:
        selected = as_labels(selected, OP, "selected_token_ids")
    if vocab_axis is not None:
        same = dict(hidden=hidden, labels=labels, where=where, selected_token_ids=selected)
        _vocab_shards.check_axis(OP, vocab_axis, dict(weight=weight, bias=bias), same)
        shards = jax.lax.axis_size(vocab_axis)
    selected = as_selected(OP, selected, vocab_size * shards)
    arrays = hidden, weight, labels, bias, where, selected
    if vocab_axis is not None or split is not None:
        return _local(*arrays, vocab_axis=vocab_axis, split=split, **static)
    loss_terms.check_label_range(OP, labels, where, ignore_index, vocab_size)
    return (_on_shards if are_seen(hidden, weight) else _local)(*arrays, **static)


def _on_shards(hidden, weight, labels, bias, where, selected, **static) -> TokenLogProbs:
    """The log-probabilities of tokens on an Explicit mesh: each device computes its own tokens'."""
    shards = shards_of(OP, hidden, weight, static["linear"].vocab_dim)
    local = functools.partial(_local, vocab_axis=shards.vocab_axis, split=shards.split, **static)
    specs = shards.hidden, shards.weight, shards.tokens, shards.vocabulary, shards.tokens, P()
    return _explicit.on_shards(OP, local, (hidden, weight, labels, bias, where, selected), specs, shards.tokens)


def _local(
    hidden, weight, labels, bias, where, selected, *, options, linear, vocab_axis=None, split=None, **limits: Any
) -> TokenLogProbs:
    shape = labels.shape
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    where = None if where is None else where.reshape(-1)
    problem = problem_on_device(
        OP, hidden, weight, labels, bias,
        options=linear, reduction=options.reduction, vocab_axis=vocab_axis, split=split, **limits,
    )  # fmt: skip
    terms, kernel_labels = _vocab_shards.token_terms(labels, where, None, None, options, problem.v, vocab_axis)
    h, w, b, y = meshes.align_varying(hidden, weight, bias, kernel_labels)
    selected_logits = None
    if selected is not None:
        w, selected_logits = logits_of_selected(h, w, b, selected, terms.counts, linear, vocab_axis, split)
    static = dict(problem=problem, options=linear, vocab_axis=vocab_axis)
    statistics = statistics_of_tokens(h, w, b, None, y, counts=terms.counts, **static)
    return token_log_probs(statistics, terms, shape, selected_logits)


def token_log_probs(
    statistics: formulas.Statistics,
    terms: loss_terms.TokenTerms,
    shape: tuple[int, ...],
    selected: jax.Array | None = None,
) -> TokenLogProbs:
    """The log-probabilities of the labels' shape, from the statistics of the tokens that count and zeros elsewhere.

    `selected` (N, K) are the logits of the selected tokens.
    """
    # A factor of 1, or NaN where a label is out of range.
    log_probs = terms.coefficients.target * (statistics.target_logit - statistics.log_normalizer)
    constants = jax.lax.stop_gradient(statistics._replace(entropy=None))
    predicted = constants.predicted_token
    output = TokenLogProbs(
        log_probs=log_probs,
        log_normalizer=constants.log_normalizer,
        max_logit=constants.max_logit,
        predicted_tokens=None if predicted is None else jnp.where(terms.counts, predicted, -1),
        entropy=statistics.entropy,
        log_sum_of_squares=constants.log_sum_of_squares,
        selected_log_probs=None if selected is None else selected - statistics.log_normalizer[:, None],
    )
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), output)
