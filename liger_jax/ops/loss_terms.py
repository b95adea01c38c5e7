"""The algebra that cross_entropy and fused_linear_cross_entropy share, on vectors of tokens.

The kernels reduce each row of logits to a few statistics; here labels and weights become the coefficients by which
a row's statistics make its loss, and the statistics become metrics. All of it is plain differentiable JAX over
(N,) arrays; only the statistics' own gradients are kernels.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from liger_jax._tree import tree_dataclass
from liger_jax.ops import checks
from liger_jax.ops.labels import as_labels
from liger_jax.pallas_kernels.cross_entropy import row_losses as loss_formulas
from liger_jax.pallas_kernels.cross_entropy.config import LogitOptions
from liger_jax.pallas_kernels.cross_entropy.formulas import IMPOSSIBLE_LABEL, NO_LABEL, Statistics
from liger_jax.pallas_kernels.cross_entropy.row_losses import Coefficients

REDUCTIONS = ("mean", "sum", "none")


@tree_dataclass
class LossMetrics:
    """Metrics that a loss computes besides its value, without gradient. `...` is the labels' shape.

    Attributes:
        accuracy: () float32, the fraction of counted tokens whose largest logit is the label's; 0 if none counts.
        predicted_tokens: (...) int32, the first index of the largest logit; −1 where a token does not count.
        max_logit: (...) float32, the largest logit; 0 where a token does not count.
        log_normalizer: (...) float32, log Σ_v exp(z_v); 0 where a token does not count.
        z_loss: the term that `z_loss` adds to the loss, with the same reduction.
        num_tokens: () float32, the sum of the weights of the tokens that count.
    """

    accuracy: jax.Array
    predicted_tokens: jax.Array
    max_logit: jax.Array
    log_normalizer: jax.Array
    z_loss: jax.Array
    num_tokens: jax.Array


def check_logit_options(op: str, logit_scale: float, logit_softcap: float | None, prefix: str = "") -> None:
    """Raises a TypeError or ValueError unless logits can be scaled and capped by these; names begin with `prefix`."""
    scale, softcap = f"{prefix}logit_scale", f"{prefix}logit_softcap"
    checks.check_number(op, **{scale: logit_scale})
    if not math.isfinite(logit_scale):
        raise ValueError(f"{op}: {scale}={logit_scale} must be finite; 1.0 leaves the logits as they are.")
    if logit_softcap is not None:
        checks.check_number(op, **{softcap: logit_softcap})
        if not 0.0 < logit_softcap < math.inf:
            raise ValueError(f"{op}: {softcap}={logit_softcap} must be finite and > 0; pass None to cap nothing.")


def check_temperature(op: str, temperature: float) -> None:
    """Raises a TypeError or ValueError unless logits can be divided by it."""
    checks.check_number(op, temperature=temperature)
    if not 0.0 < temperature < math.inf:
        raise ValueError(f"{op}: temperature={temperature} must be finite and > 0; 1.0 leaves the logits as they are.")


@dataclasses.dataclass(frozen=True)
class LossOptions:
    """The loss options of the public functions, checked."""

    op: str
    ignore_index: int | None
    label_smoothing: float
    z_loss: float
    logit_scale: float
    logit_softcap: float | None
    reduction: str
    token_scaling: bool = False
    token_axes: tuple[str, ...] = ()  # over which tokens are split, inside shard_map: sums go over them, too

    def __post_init__(self) -> None:
        op = self.op
        checks.check_number(op, label_smoothing=self.label_smoothing, z_loss=self.z_loss)
        check_ignore_index(op, self.ignore_index)
        checks.check_choice(op, "reduction", self.reduction, REDUCTIONS)
        checks.check_flag(op, token_scaling=self.token_scaling)
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ValueError(f"{op}: label_smoothing={self.label_smoothing} must be in [0, 1]; 0.0 switches it off.")
        if not 0.0 <= self.z_loss < math.inf:
            raise ValueError(f"{op}: z_loss={self.z_loss} must be finite and ≥ 0; 0.0 switches it off.")
        check_logit_options(op, self.logit_scale, self.logit_softcap)

    def sum(self, per_token: jax.Array) -> jax.Array:
        """The sum over all tokens, those of other devices too."""
        own = jnp.sum(per_token)
        return jax.lax.psum(own, self.token_axes) if self.token_axes else own

    def logit_options(self, metrics: bool) -> LogitOptions:
        """The options that the kernels need."""
        softcap = None if self.logit_softcap is None else float(self.logit_softcap)
        return LogitOptions(float(self.logit_scale), softcap, logit_sum=self.label_smoothing > 0, metrics=metrics)


def check_ignore_index(op: str, ignore_index: Any) -> None:
    """Raises a TypeError unless it is a label, or None."""
    if ignore_index is not None and not isinstance(ignore_index, int):
        raise TypeError(f"{op}: ignore_index={ignore_index!r} must be a Python int; None ignores no label.")


class TokenTerms(NamedTuple):
    """The terms of the loss from labels and weights; each is (N,) or ()."""

    labels: jax.Array  # int32; NO_LABEL where a token does not count, IMPOSSIBLE_LABEL where out of range
    counts: jax.Array  # bool
    coefficients: Coefficients  # float32; NaN where a label is out of range
    class_weight_sum: jax.Array  # (), Σ_v c_v
    num_tokens: jax.Array  # ()


def as_arrays(op: str, labels: Any, **others: Any) -> Iterator[jax.Array]:
    """The labels and the other arguments, by name, as JAX's arrays; of the others None stays None."""
    arrays: Any = [None if x is None else checks.as_array(op, name, x) for name, x in others.items()]
    return iter([as_labels(labels, op), *arrays])


def check_tokens(
    op: str,
    labels: jax.Array,
    where: jax.Array | None,
    token_weights: jax.Array | None,
    class_weights: jax.Array | None,
    tokens_shape: tuple[int, ...],
    class_weights_size: int,
) -> None:
    """Raises a TypeError or ValueError unless the per-token and per-class arguments fit."""
    if labels.shape == (*tokens_shape, class_weights_size):
        raise ValueError(
            f"{op}: labels have shape {labels.shape}, a number for each class, but must have {tokens_shape}, with one "
            "class for each token; pass labels.argmax(-1) if they are one-hot."
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"{op}: labels have dtype {labels.dtype}, but must be integers; labels.astype(jnp.int32).")
    checks.check_bool(op, "where", where)
    checks.floating(op, "token_weights", "class_weights", token_weights=token_weights, class_weights=class_weights)
    rule = "one entry for each token"
    checks.check_shape(op, "labels", labels, tokens_shape, rule)
    checks.check_shape(op, "where", where, tokens_shape, rule)
    checks.check_shape(op, "token_weights", token_weights, tokens_shape, rule)
    checks.check_shape(op, "class_weights", class_weights, (class_weights_size,), "one entry for each class")


def constant_class_weights(op: str, class_weights: jax.Array | None) -> jax.Array | None:
    """Class weights in float32; differentiating them is a TypeError."""
    if class_weights is None:
        return None
    return checks.constant(class_weights.astype(jnp.float32), op, "class_weights")


def check_label_range(
    op: str, labels: jax.Array, where: jax.Array | None, ignore_index: int | None, vocab_size: int
) -> None:
    """Raises a ValueError for a concrete label outside [0, vocab_size); under jit the row becomes NaN instead."""
    if isinstance(labels, Tracer) or isinstance(where, Tracer):
        return
    if not labels.is_fully_addressable or (where is not None and not where.is_fully_addressable):
        return
    values = np.asarray(labels)
    wrong = (values < 0) | (values >= vocab_size)
    wrong = wrong if ignore_index is None else wrong & (values != ignore_index)
    wrong = wrong if where is None else wrong & np.asarray(where)
    if wrong.any():
        raise ValueError(
            f"{op}: labels hold {values[wrong].flat[0]}, but must be in [0, {vocab_size}) or be "
            f"ignore_index={ignore_index}; mask other tokens with `where`."
        )


def token_terms(
    labels: jax.Array,
    where: jax.Array | None,
    token_weights: jax.Array | None,
    class_weights: jax.Array | None,
    options: LossOptions,
    vocab_size: int,
) -> TokenTerms:
    """Coefficients by which a token's loss is target·(lse − z_y) + smoothing·Σ_v c_v·(lse − z_v) + squared·lse².

    All arrays are flat, (N,); class_weights (V,) float32.
    """
    t = jnp.ones(labels.shape, jnp.float32) if token_weights is None else token_weights.astype(jnp.float32)
    counts = t != 0
    counts = counts if options.ignore_index is None else counts & (labels != options.ignore_index)
    counts = counts if where is None else counts & where
    t = jnp.where(counts, t, 0.0)
    in_range = (labels >= 0) & (labels < vocab_size)
    # An error under jit: an impossible label makes its own row NaN, but not the denominator.
    poisoned = jnp.where(counts & ~in_range, jnp.nan, t)
    c_sum = jnp.full((), vocab_size, jnp.float32)
    c_target = jnp.ones_like(t)
    if class_weights is not None:
        c_sum = jnp.sum(class_weights)
        c_target = class_weights[jnp.where(in_range, labels, 0)]
    ce_norm = z_norm = jnp.ones((), jnp.float32)
    if options.reduction == "mean":
        any_counts = options.sum(jnp.any(counts).astype(jnp.int32)) > 0
        ce_norm = denominator(options.sum(t * c_target), any_counts)
        z_norm = denominator(options.sum(t), any_counts)
    smoothing = options.label_smoothing
    coefficients = Coefficients(
        target=(1.0 - smoothing) * c_target * (poisoned / ce_norm),
        smoothing=(smoothing / vocab_size) * (poisoned / ce_norm) if smoothing else None,
        squared=options.z_loss * (poisoned / z_norm) if options.z_loss else None,
    )
    kernel_labels = jnp.where(counts, jnp.where(in_range, labels, IMPOSSIBLE_LABEL), NO_LABEL).astype(jnp.int32)
    return TokenTerms(kernel_labels, counts, coefficients, c_sum, jax.lax.stop_gradient(options.sum(t)))


def denominator(total: jax.Array, any_counts: jax.Array) -> jax.Array:
    """The total as a denominator: 1 if no token counts, for a loss of 0; NaN if tokens count and weigh nothing."""
    return jnp.where(any_counts, jnp.where(total == 0, jnp.nan, total), 1.0)


def row_losses(statistics: Statistics, terms: TokenTerms, options: LossOptions) -> jax.Array:
    """The losses of the tokens (N,). The coefficients hold a mean's denominator already."""
    coefficients = terms.coefficients
    if options.token_scaling:
        statistics, coefficients = loss_formulas.by_own_probability(statistics, coefficients)
    return loss_formulas.row_losses(statistics, coefficients, terms.class_weight_sum)


def reduced(losses: jax.Array, options: LossOptions, shape: tuple[int, ...]) -> jax.Array:
    """The tokens' losses in the labels' shape, or their sum."""
    return losses.reshape(shape) if options.reduction == "none" else options.sum(losses)


def metrics(statistics: Statistics, terms: TokenTerms, options: LossOptions, shape: tuple[int, ...]) -> LossMetrics:
    """The metrics of (N,) statistics, in the labels' shape."""
    statistics, terms = jax.lax.stop_gradient((statistics, terms))
    masked = lambda x, other: jnp.where(terms.counts, x, other).reshape(shape)
    right = (statistics.predicted_token == terms.labels) & terms.counts
    correct, num_counting = (options.sum(x.astype(jnp.float32)) for x in (right, terms.counts))
    squared = terms.coefficients.squared
    if options.token_scaling:
        squared = loss_formulas.by_own_probability(statistics, terms.coefficients)[1].squared
    z_losses = (
        jnp.zeros(terms.counts.shape, jnp.float32)
        if squared is None
        else squared * jnp.square(statistics.log_normalizer)
    )
    return LossMetrics(
        accuracy=correct / jnp.maximum(num_counting, 1.0),
        predicted_tokens=masked(statistics.predicted_token, -1),
        max_logit=masked(statistics.max_logit, 0.0),
        log_normalizer=masked(statistics.log_normalizer, 0.0),
        z_loss=reduced(jnp.where(terms.counts, z_losses, 0.0), options, shape),
        num_tokens=terms.num_tokens,
    )
