"""The loss of a row of logits and its derivatives, from the row's statistics. All arithmetic is float32."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels.cross_entropy.formulas import Cotangents, Statistics


class Coefficients(NamedTuple):
    """A row's loss is target·(lse − z_y) + smoothing·Σ_v c_v·(lse − z_v) + squared·lse²; each (N,) float32."""

    target: jax.Array
    smoothing: jax.Array | None
    squared: jax.Array | None


def row_losses(statistics: Statistics, coefficients: Coefficients, class_weight_sum: jax.Array) -> jax.Array:
    """The loss of each row (N,), from its statistics and coefficients; class_weight_sum is Σ_v c_v."""
    lse = statistics.log_normalizer
    losses = coefficients.target * (lse - statistics.target_logit)
    if coefficients.smoothing is not None:
        assert statistics.logit_sum is not None  # smoothing asks for it
        losses += coefficients.smoothing * (class_weight_sum * lse - statistics.logit_sum)
    if coefficients.squared is not None:
        losses += coefficients.squared * jnp.square(lse)
    return losses


def row_cotangents(statistics: Statistics, coefficients: Coefficients, class_weight_sum: jax.Array) -> Cotangents:
    """The derivatives of `row_losses` by the statistics."""
    g_lse, g_sum = coefficients.target, None
    if coefficients.smoothing is not None:
        g_lse = g_lse + coefficients.smoothing * class_weight_sum
        g_sum = -coefficients.smoothing
    if coefficients.squared is not None:
        g_lse = g_lse + 2.0 * coefficients.squared * statistics.log_normalizer
    return Cotangents(g_lse, -coefficients.target, g_sum)


def by_own_probability(statistics: Statistics, coefficients: Coefficients) -> tuple[Statistics, Coefficients]:
    """Coefficients times p_y, the label's probability, which has no gradient; and statistics for `row_losses`.

    A row whose p_y rounds to 0 has loss 0 and no gradient, though its −log p_y may be infinite: its statistics are
    zeros. So has a row whose coefficients are 0, whatever it holds.
    """
    lse = statistics.log_normalizer
    p = jnp.exp(jax.lax.stop_gradient(statistics.target_logit - lse))
    vanishes = (p == 0) & jnp.isfinite(lse)
    of_losses = statistics._replace(
        log_normalizer=jnp.where(vanishes, 0.0, lse),
        target_logit=jnp.where(vanishes, 0.0, statistics.target_logit),
        logit_sum=None if statistics.logit_sum is None else jnp.where(vanishes, 0.0, statistics.logit_sum),
    )
    return of_losses, jax.tree.map(lambda c: jnp.where(c == 0, 0.0, c * p), coefficients)
