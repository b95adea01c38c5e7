"""Softmax cross-entropy over logits."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, zero_from_primal
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Integer

from liger_jax.ops import _explicit, _vocab_shards, checks, layout, loss_terms, meshes
from liger_jax.ops._linear_map import linear_map
from liger_jax.ops.checks import ArrayLike
from liger_jax.ops.kernels import Implementation, Kernels
from liger_jax.pallas_kernels.cross_entropy import formulas, mosaic_tpu, triton, xla
from liger_jax.pallas_kernels.cross_entropy.formulas import LEAST_MAXIMUM, Cotangents, Statistics
from liger_jax.pallas_kernels.tiles import full_like

_KERNELS = Kernels(
    "cross_entropy",
    {"xla": xla, "triton": triton, "mosaic_tpu": mosaic_tpu},
    defaults={"gpu": ("triton",), "tpu": ("mosaic_tpu",)},
)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4, 5, 6))
def _statistics(logits, labels, class_weights, forward, backward, options, is_shard) -> Statistics:
    return forward.run(*forward.guarded(logits, labels, class_weights))


def _tangent_rule(forward, backward, options, is_shard, primals, tangents):
    logits, labels, class_weights = primals
    statistics: Statistics = _statistics(logits, labels, class_weights, forward, backward, options, is_shard)
    lse = statistics.log_normalizer
    # There z − lse is what was rounded, and exp(z − 0) is 0. So it is for a shard of −inf alone, which has no share in
    # its row; a whole row of −inf is NaN.
    is_masked = lse < LEAST_MAXIMUM
    lse = jnp.where(is_masked if is_shard else is_masked & (lse > -jnp.inf), 0.0, lse)

    def tangent(residuals, tangents):
        return formulas.tangent(*residuals, *tangents, options=options)

    def transpose(residuals, cotangents):
        *arrays, class_weights = residuals
        cotangents = Cotangents(*cotangents, *(() if options.logit_sum else (None,)))
        return [_gradient(*arrays, cotangents, class_weights, backward, options)]

    of_logits = tangents[0]
    if isinstance(of_logits, SymbolicZero):
        of_logits = full_like(logits, logits.shape, 0, logits.dtype)
    tangents_out = linear_map(tangent, transpose, (logits, labels, lse, class_weights), [of_logits])
    own = dict(zip(("log_normalizer", "target_logit", "logit_sum"), tangents_out, strict=False))
    still = jax.tree.map(functools.partial(zero_from_primal, symbolic_zeros=True), statistics)
    return statistics, still._replace(**own)


_statistics.defjvp(_tangent_rule, symbolic_zeros=True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(5, 6))
def _gradient(logits, labels, lse, cotangents, class_weights, backward, options):
    return backward.run(*backward.guarded(logits, labels, lse, cotangents, class_weights))


@_gradient.defjvp
def _gradients_tangent_rule(backward, options, primals, tangents):
    """The kernel's value, and the tangent of its formula."""
    logits, labels, lse, cotangents, class_weights = primals

    def of_formula(logits, lse, cotangents):
        logits, lse = formulas.without_rows(labels, logits, lse)
        return formulas.gradient(logits, labels, lse, cotangents, class_weights, options=options)

    tangent = jax.jvp(of_formula, (logits, lse, cotangents), (tangents[0], tangents[2], tangents[3]))[1]
    return _gradient(*primals, backward, options), tangent


def cross_entropy(
    logits: Float[ArrayLike, "*tokens V"],
    labels: Integer[ArrayLike, "*tokens"],
    *,
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
    implementation: Implementation = None,
) -> Any:
    """Cross-entropy of the softmax of `logits` with integer labels, computed in float32 for any input dtype.

    With z = logit_scale · softcap(logits), softcap(u) = s·tanh(u/s), lse = log Σ_v exp(z_v), t the token's and c
    the class's weight, ε = label_smoothing:

        ce = (1 − ε)·c_y·(lse − z_y) + (ε/V)·Σ_v c_v·(lse − z_v)
        "none": t·(ce + z_loss·lse²)      "sum": its sum
        "mean": Σ t·ce / Σ t·c_y + z_loss · Σ t·lse² / Σ t

    A token counts if `where` is true, its label is not `ignore_index` and its weight is not 0. The others have loss 0
    and gradient exactly 0, whatever their logits are. If no token counts, the loss is 0; if the counted weights sum to
    0, it is NaN. Only the logits and lse are kept for the backward pass.

    With `vocab_axis`, the logits are a device's shard of the vocabulary. Each device reduces its shard, and the devices
    exchange a few numbers per token. On a mesh with Explicit axes, V may be sharded over one axis.

    Args:
        logits: (..., V), any float dtype.
        labels: (...), integers in [0, V), or `ignore_index`. Any other label makes its row's loss and gradient NaN
            under jit.
        where: (...) bool, which tokens count; None for all.
        token_weights: (...) float, differentiable; None for ones.
        class_weights: (V,) float, constants; None for ones.
        ignore_index: the label of tokens that do not count; None for no such label.
        label_smoothing: ε in [0, 1], a Python number.
        z_loss: the factor of lse², a finite Python number ≥ 0.
        logit_scale: a finite Python number.
        logit_softcap: s > 0, a finite Python number, or None for no capping.
        reduction: "mean", "sum" or "none".
        token_scaling: whether each token's whole loss is multiplied by the probability of its label, as a constant; the
            denominators do not change. This is the loss of dynamic fine-tuning.
        return_metrics: whether to return `LossMetrics` too, for `has_aux=True`.
        vocab_axis: inside `jax.shard_map`, the mesh axis over which `logits` and `class_weights` are equal shards of
            the vocabulary, while labels and the tokens' other arrays are the same on all. Labels are indices into the
            whole vocabulary. With `check_vma=False` this is not checked.
        implementation: None to choose, or "xla", "triton" or "mosaic_tpu"; see `liger_jax.ops`.

    Returns:
        The loss, float32: () for "mean" and "sum", (...) for "none". With `return_metrics`: (loss, metrics).

    Raises:
        TypeError: class_weights are differentiated.
        ValueError: a concrete label is outside [0, V).

    Example:
        >>> logits = jnp.array([[2.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
        >>> print(cross_entropy(logits, jnp.array([0, -100])).round(4))
        0.2395

    References:
        Szegedy et al., 2016 (label smoothing, arXiv:1512.00567); Chowdhery et al., 2022 (z-loss, arXiv:2204.02311).
        Wu et al., "On the Generalization of SFT", 2025 (arXiv:2508.05629), for the token scaling.
    """
    op = "cross_entropy"
    (logits,) = checks.floating(op, logits=logits)
    if logits.ndim == 0:
        raise ValueError(f"{op}: logits has shape (), but must be (..., V); the last axis holds the classes.")
    checks.check_flag(op, return_metrics=return_metrics)
    vocab_size = logits.shape[-1]
    loss_options = loss_terms.LossOptions(
        op, ignore_index, label_smoothing, z_loss, logit_scale, logit_softcap, reduction, token_scaling
    )
    labels, where, token_weights, class_weights = loss_terms.as_arrays(
        op, labels, where=where, token_weights=token_weights, class_weights=class_weights
    )
    loss_terms.check_tokens(op, labels, where, token_weights, class_weights, logits.shape[:-1], vocab_size)
    if vocab_axis is None:
        loss_terms.check_label_range(op, labels, where, ignore_index, vocab_size)
    elif layout.is_explicit(logits):
        raise ValueError(
            f"{op}: vocab_axis={vocab_axis!r} is only for use inside jax.shard_map, but the logits are sharded over a "
            "mesh with Explicit axes, so it is known how they are split; leave it out."
        )
    else:
        same = dict(labels=labels, where=where, token_weights=token_weights)
        _vocab_shards.check_axis(op, vocab_axis, dict(logits=logits, class_weights=class_weights), same)
    return reduced_cross_entropy(
        logits, labels, where, token_weights, class_weights, loss_options, return_metrics, implementation, vocab_axis
    )


def reduced_cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    where: jax.Array | None,
    token_weights: jax.Array | None,
    class_weights: jax.Array | None,
    loss_options: loss_terms.LossOptions,
    return_metrics: bool = False,
    implementation: Implementation = None,
    vocab_axis: str | None = None,
) -> Any:
    """`cross_entropy` after its checks. A label out of range makes its row NaN, whether or not it is concrete."""
    if logits.ndim and layout.is_explicit(logits):
        spec = layout.spec_of(logits)
        tokens, classes = P(*spec[:-1]), layout.names(spec[-1])
        if len(classes) > 1:
            raise ValueError(
                f"{loss_options.op}: the mesh axes {classes} split the classes of the logits, but one at most may; "
                "move them by jax.sharding.reshard."
            )
        own_options = dataclasses.replace(loss_options, token_axes=layout.names(spec[:-1]))
        options = dict(loss_options=own_options, return_metrics=return_metrics, implementation=implementation)
        local = functools.partial(reduced_cross_entropy, vocab_axis=classes[0] if classes else None, **options)
        arrays = logits, labels, where, token_weights, class_weights
        specs = spec, tokens, tokens, tokens, P(*classes)
        kind = loss_options.reduction, return_metrics
        return _explicit.loss_on_shards(loss_options.op, local, arrays, specs, tokens, *kind)
    vocab_size = logits.shape[-1]

    def flat(x):
        return None if x is None else x.reshape(-1)

    z = logits.reshape(-1, vocab_size)
    class_weights = loss_terms.constant_class_weights(loss_options.op, class_weights)
    choice = dataclasses.replace(_KERNELS, op=loss_options.op).choose(implementation, z, class_weights)
    terms, kernel_labels = _vocab_shards.token_terms(
        flat(labels), flat(where), flat(token_weights), class_weights, loss_options, vocab_size, vocab_axis
    )
    z, kernel_labels, class_weights = meshes.align_varying(z, kernel_labels, class_weights)
    options = loss_options.logit_options(return_metrics)
    kernels = choice.kernel("statistics", options=options), choice.kernel("gradient", options=options)
    # Before they are multiplied by coefficients, whose gradients they enter: an ignored row may hold inf or NaN.
    raw = _statistics(z, kernel_labels, class_weights, *kernels, options, vocab_axis is not None)
    statistics = formulas.where(terms.counts, raw)
    if vocab_axis is not None:
        merged = _vocab_shards.merged_over(statistics, vocab_axis, vocab_size)
        statistics = formulas.where(terms.counts, merged)
    losses = loss_terms.row_losses(statistics, terms, loss_options)
    loss = loss_terms.reduced(losses, loss_options, labels.shape)
    return (loss, loss_terms.metrics(statistics, terms, loss_options, labels.shape)) if return_metrics else loss
