"""Softmax cross-entropy of a linear layer's output, without ever holding the logits."""

import dataclasses
import functools
from typing import Any

import jax
from jaxtyping import Bool, Float, Integer

from liger_jax.ops import _explicit, _vocab_shards, checks, loss_terms, meshes
from liger_jax.ops.checks import ArrayLike
from liger_jax.ops.kernels import Implementation
from liger_jax.ops.layout import are_seen
from liger_jax.ops.linear._shards import shards_of
from liger_jax.ops.linear._statistics import problem_on_device, statistics_of_tokens
from liger_jax.ops.linear._sum import RowLoss, linear_sum
from liger_jax.ops.linear.plan import choose_mode
from liger_jax.ops.linear.problem import OP
from liger_jax.ops.linear.split_head import SplitHead, taken_apart, whole_weight
from liger_jax.pallas_kernels.cross_entropy import row_losses as formulas
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import LinearOptions


@functools.lru_cache  # so that all calls have the same functions
def _row_loss(token_scaling: bool) -> RowLoss:
    """The loss of rows, from their coefficients and Σ_v c_v."""
    if not token_scaling:
        return RowLoss(formulas.row_losses, formulas.row_cotangents, is_shared=True)

    def losses(statistics, coefficients, class_weight_sum):
        return formulas.row_losses(*formulas.by_own_probability(statistics, coefficients), class_weight_sum)

    def cotangents(statistics, coefficients, class_weight_sum):
        return formulas.row_cotangents(*formulas.by_own_probability(statistics, coefficients), class_weight_sum)

    return RowLoss(losses, cotangents, is_shared=True)


@functools.lru_cache
def _row_loss_of_shards(token_scaling: bool, axis: str, devices: int, shard_size: int) -> RowLoss:
    """The same where each of the devices along an axis has the statistics of its shard of the vocabulary."""
    of_whole = _row_loss(token_scaling)

    def losses(statistics, *others):
        return of_whole.losses(_vocab_shards.merged_over(statistics, axis, shard_size), *others)

    def cotangents(statistics, *others):
        whole = _vocab_shards.merged_over(statistics, axis, shard_size)
        rows = of_whole.cotangents(whole, *others)
        share = _vocab_shards.share_of_rows(statistics, whole)
        return rows._replace(log_normalizer=share * rows.log_normalizer)

    return RowLoss(losses, cotangents, is_shared=True, copies=devices)


# --- the public function ----------------------------------------------------------------------------------------------


def fused_linear_cross_entropy(
    hidden: Float[ArrayLike, "*tokens D"],
    weight: Float[ArrayLike, "_ _"] | SplitHead,
    labels: Integer[ArrayLike, "*tokens"],
    *,
    bias: Float[ArrayLike, " V"] | None = None,
    weight_layout: str = "vd",
    where: Bool[ArrayLike, "*tokens"] | None = None,
    token_weights: Float[ArrayLike, "*tokens"] | None = None,
    class_weights: Float[ArrayLike, " V"] | None = None,
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    reduction: str = "mean",
    token_scaling: bool = False,
    return_metrics: bool = False,
    vocab_axis: str | None = None,
    mode: str = "auto",
    chunk_size: int | None = None,
    memory_budget_bytes: int | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: Implementation = None,
) -> Any:
    """`cross_entropy(hidden · weightᵀ + bias, labels)`, with no buffer of the size (tokens, vocabulary).

    The loss is that of `liger_jax.ops.cross_entropy` for z = logit_scale · softcap(hidden · weightᵀ + bias), from
    float32 accumulators. Only gradients that are needed are computed: none for a frozen head or a frozen trunk.

    Mode "fast" computes the gradients together with the loss, one chunk of tokens at a time, with 3 products of 2·N·D·V
    operations; it needs a scalar loss, and does not support float16. Mode "lean" computes statistics first and
    recomputes the logits, one slice of the vocabulary at a time, for the gradients: 4 products, and the weight's
    gradient is written once. "auto" is "fast" if the device's memory or `memory_budget_bytes` allows it;
    `plan_fused_linear_cross_entropy` returns the choice. In mode "fast", the weight's gradient is summed over chunks in
    float32, or on Hopper, for a weight of 16 bits, in the three upper bytes of a float32. Products are computed in
    hidden's dtype. On one device, results are bitwise reproducible.

    On a mesh with Explicit axes, tokens stay on their devices, and "mean" is the mean over all devices. A weight that
    is sharded over the tokens' axes is gathered, in mode "lean" one slice at a time, whose gradient is reduce-scattered
    immediately. A weight whose vocabulary is sharded over another axis stays sharded. The same holds for Auto axes
    outside of jit, where the sharding of arrays is known, also under jax.grad. Inside jit it is not known: the error
    then shows the jax.shard_map to write.

    Forward-mode differentiation (jax.jvp, jax.linearize, jax.jacfwd) is supported by mode "fast" of "xla" only.

    Args:
        hidden: (..., D), any float dtype.
        weight: (V, D), or (D, V) with `weight_layout="dv"`, any float dtype.
        labels: (...), integers in [0, V), or `ignore_index`. Any other label makes its row's loss and gradient NaN
            under jit.
        bias: (V,) float, or None.
        weight_layout: "vd" for an embedding or a Hugging Face head, "dv" for a Flax kernel.
        where: (...) bool, which tokens count; None for all.
        token_weights: (...) float, differentiable; None for ones.
        class_weights: (V,) float, constants; None for ones.
        ignore_index: the label of tokens that do not count; None for no such label.
        label_smoothing: ε in [0, 1], a Python number.
        z_loss: the factor of lse², a finite Python number ≥ 0.
        logit_scale: a finite Python number.
        logit_softcap: s > 0 for s·tanh(u/s), a finite Python number, or None.
        reduction: "mean", "sum" or "none".
        token_scaling: whether each token's whole loss is multiplied by the probability of its label, as a constant; the
            denominators do not change. This is the loss of dynamic fine-tuning.
        return_metrics: whether to return `LossMetrics` too, for `has_aux=True`.
        vocab_axis: inside `jax.shard_map`, the mesh axis over which `weight`, `bias` and `class_weights` are shards of
            the vocabulary, while hidden, labels and token arguments are the same on all. With `check_vma=False` this is
            not checked, and a replicated head gives a wrong loss.
        mode: "auto", "fast" or "lean".
        chunk_size: tokens in a chunk ("fast"), or vocabulary entries in a slice ("lean"); None to choose.
        memory_budget_bytes: how much memory may be used in addition to inputs and gradients; None for no limit.
        precision: of the products; None for `jax.default_matmul_precision`.
        implementation: None to choose, or "xla", "mosaic_gpu" (Hopper), "triton" or "mosaic_tpu"; see `liger_jax.ops`.

    Returns:
        The loss, float32: () for "mean" and "sum", (...) for "none". With `return_metrics`: (loss, metrics).

    Raises:
        TypeError: class_weights are differentiated, or a mode or implementation does not support forward-mode
            differentiation.
        ValueError: a concrete label is outside [0, V), or the budget is too small; or the compiler would gather the
            tokens, which happens on several devices outside of `jax.shard_map`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> hidden, weight = jnp.eye(2, 4), jnp.ones((8, 4))
        >>> print(fused_linear_cross_entropy(hidden, weight, jnp.array([3, 5])).round(4))
        2.0794

    References:
        Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024 (arXiv:2411.09009), for the
        blockwise statistics; Hsu et al., "Liger Kernel", 2024 (arXiv:2410.10989), for gradients in the forward.
        Wu et al., "On the Generalization of SFT", 2025 (arXiv:2508.05629), for the token scaling.
    """
    return named_loss(
        OP, hidden, weight, labels,
        bias=bias, weight_layout=weight_layout, where=where, token_weights=token_weights, class_weights=class_weights,
        ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss, logit_scale=logit_scale,
        logit_softcap=logit_softcap, reduction=reduction, token_scaling=token_scaling, return_metrics=return_metrics,
        vocab_axis=vocab_axis, mode=mode, chunk_size=chunk_size, memory_budget_bytes=memory_budget_bytes,
        precision=precision, implementation=implementation,
    )  # fmt: skip


def named_loss(
    op, hidden, weight, labels, *, bias, weight_layout, where, token_weights, class_weights, ignore_index,
    label_smoothing, z_loss, logit_scale, logit_softcap, reduction, token_scaling, return_metrics, vocab_axis, mode,
    chunk_size, memory_budget_bytes, precision, implementation,
):  # fmt: skip
    """`fused_linear_cross_entropy` for a public function of another name, with which messages begin."""
    weight, split = taken_apart(weight)
    hidden, weight, bias, vocab_size = checks.linear_head(op, hidden, weight, bias, weight_layout, split=split)
    checks.check_mode(op, mode, chunk_size, memory_budget_bytes)
    checks.check_flag(op, return_metrics=return_metrics)
    loss_options = loss_terms.LossOptions(
        op, ignore_index, label_smoothing, z_loss, logit_scale, logit_softcap, reduction, token_scaling
    )
    labels, where, token_weights, class_weights = loss_terms.as_arrays(
        op, labels, where=where, token_weights=token_weights, class_weights=class_weights
    )
    loss_terms.check_tokens(op, labels, where, token_weights, class_weights, hidden.shape[:-1], vocab_size)

    static = dict(
        return_metrics=return_metrics,
        weight_layout=weight_layout,
        mode=mode,
        chunk_size=chunk_size,
        memory_budget_bytes=memory_budget_bytes,
        precision=checks.current_precision(op, precision),
        implementation=implementation,
    )
    arrays = hidden, weight, labels, bias, where, token_weights, class_weights
    if vocab_axis is not None:
        shards = dict(weight=weight, bias=bias, class_weights=class_weights)
        same = dict(hidden=hidden, labels=labels, where=where, token_weights=token_weights)
        _vocab_shards.check_axis(op, vocab_axis, shards, same)
    if vocab_axis is not None or split is not None:
        return _local(*arrays, options=loss_options, vocab_axis=vocab_axis, split=split, **static)
    loss_terms.check_label_range(op, labels, where, ignore_index, vocab_size)
    by_device = _on_shards if are_seen(hidden, weight) else _local
    return by_device(*arrays, options=loss_options, **static)


# --- the computation of one device ------------------------------------------------------------------------------------


def _on_shards(hidden, weight, labels, bias, where, token_weights, class_weights, *, options, **static):
    """The loss of tokens on an Explicit mesh: each device computes its own tokens' loss."""
    op = options.op
    shards = shards_of(op, hidden, weight, static["weight_layout"].index("v"))
    own = dataclasses.replace(options, token_axes=shards.token_axes)
    local = functools.partial(_local, options=own, vocab_axis=shards.vocab_axis, split=shards.split, **static)
    tokens, vocabulary = shards.tokens, shards.vocabulary
    specs = shards.hidden, shards.weight, tokens, vocabulary, tokens, tokens, vocabulary
    arrays = hidden, weight, labels, bias, where, token_weights, class_weights
    return _explicit.loss_on_shards(op, local, arrays, specs, tokens, options.reduction, static["return_metrics"])


def _local(
    hidden, weight, labels, bias, where, token_weights, class_weights, *, options, return_metrics, weight_layout,
    precision, mode, vocab_axis=None, split=None, **limits,
):  # fmt: skip
    tokens_shape = labels.shape
    flat = lambda x: None if x is None else x.reshape(-1)
    hidden = hidden.reshape(-1, hidden.shape[-1])
    labels, where, token_weights = labels.reshape(-1), flat(where), flat(token_weights)
    class_weights = loss_terms.constant_class_weights(options.op, class_weights)
    linear_options = LinearOptions(options.logit_options(return_metrics), weight_layout, precision, mode, chunk_size=0)
    problem = problem_on_device(
        options.op, hidden, weight, labels, bias, class_weights,
        options=linear_options, reduction=options.reduction, vocab_axis=vocab_axis, merges_in_forward=True,
        split=split, **limits,
    )  # fmt: skip
    terms, kernel_labels = _vocab_shards.token_terms(
        labels, where, token_weights, class_weights, options, problem.v, vocab_axis
    )
    if choose_mode(problem) == "fast":
        weight = whole_weight(weight, split, hidden)
        h, w, b, c, c_sum, y, *coefficients = meshes.align_varying(
            hidden, weight, bias, class_weights, terms.class_weight_sum, kernel_labels, *terms.coefficients
        )
        coefficients, row_loss = formulas.Coefficients(*coefficients), _row_loss(options.token_scaling)
        if vocab_axis is not None:
            devices = jax.lax.axis_size(vocab_axis)
            row_loss = _row_loss_of_shards(options.token_scaling, vocab_axis, devices, problem.v)
        loss, statistics = linear_sum(
            h, w, b, coefficients, c, c_sum, y, problem=problem, options=linear_options, row_loss=row_loss
        )
        if vocab_axis is not None:
            loss = jax.lax.pmean(loss, vocab_axis)
            statistics = _vocab_shards.merged_over(statistics, vocab_axis, problem.v)
        loss = options.sum(loss)  # of other devices, too
    else:
        arrays = hidden, weight, bias, class_weights, kernel_labels
        static = dict(problem=problem, options=linear_options, vocab_axis=vocab_axis)
        statistics = statistics_of_tokens(*arrays, counts=terms.counts, **static)
        losses = loss_terms.row_losses(statistics, terms, options)
        loss = loss_terms.reduced(losses, options, tokens_shape)
    return (loss, loss_terms.metrics(statistics, terms, options, tokens_shape)) if return_metrics else loss
