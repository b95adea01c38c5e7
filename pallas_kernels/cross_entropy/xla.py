"""Cross-entropy in plain XLA.

Memory passes over the logits: two reads for the statistics (the maximum, then the sum of exponentials); one read and
one write for the gradient.
"""

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels.cross_entropy import formulas
from liger_jax.pallas_kernels.cross_entropy.config import LogitOptions
from liger_jax.pallas_kernels.cross_entropy.formulas import Statistics

gradient = formulas.gradient


def statistics(
    logits: jax.Array, labels: jax.Array, class_weights: jax.Array | None, *, options: LogitOptions
) -> Statistics:
    """logits (N, V), labels (N,) int32, class_weights (V,) float32 or None → Statistics of (N,)."""
    z = formulas.transform(logits.astype(jnp.float32), options)
    # A mask and a sum, and not a gather: XLA fuses these into the pass that sums the exponentials.
    target = jnp.sum(jnp.where(formulas.column_indices(z.shape[1]) == labels[:, None], z, 0.0), axis=1)
    entropy = log_sum_of_squares = None
    if options.entropy:  # from x = z − maximum: the rounding of large logits is no error of the entropy
        x = z - jnp.max(z, axis=1, keepdims=True)
        exp_sum = jnp.sum(jnp.exp(x), axis=1)
        weighted_sum = jnp.sum(jnp.exp(x) * jnp.maximum(x, formulas.LEAST_EXPONENT), axis=1)
        entropy = jnp.log(exp_sum) - weighted_sum / exp_sum
        log_sum_of_squares = jnp.log(jnp.sum(jnp.exp(2.0 * x), axis=1)) - 2.0 * jnp.log(exp_sum)
    weighted = z if class_weights is None else z * class_weights[None, :]
    return Statistics(
        log_normalizer=formulas.log_sum_exp(z),
        target_logit=target,
        logit_sum=jnp.sum(weighted, axis=1) if options.logit_sum else None,
        max_logit=jnp.max(z, axis=1) if options.metrics else None,
        predicted_token=jnp.argmax(z, axis=1).astype(jnp.int32) if options.metrics else None,
        entropy=entropy,
        log_sum_of_squares=log_sum_of_squares,
    )
