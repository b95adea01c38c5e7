"""Cross-entropy as its formula stands: the oracle of the tests, in whatever precision it is given."""

import jax
import jax.numpy as jnp


def cross_entropy_rows(
    logits: jax.Array,
    labels: jax.Array,
    class_weights: jax.Array | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    token_scaling: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The cross-entropy and the z-loss of each row of logits (N, V), for labels (N,) in [0, V).

    ce = (1 − ε)·c_y·(lse − z_y) + (ε/V)·Σ_v c_v·(lse − z_v)      z_loss · lse²      both times p_y with token_scaling
    """
    z = logits if logit_softcap is None else logit_softcap * jnp.tanh(logits / logit_softcap)
    z = logit_scale * z
    vocab_size = z.shape[-1]
    c = jnp.ones(vocab_size, z.dtype) if class_weights is None else class_weights
    lse = jax.scipy.special.logsumexp(z, axis=-1, keepdims=True)
    target = jnp.take_along_axis(lse - z, labels[:, None], axis=-1)[:, 0]
    smooth = jnp.sum(c[None, :] * (lse - z), axis=-1) / vocab_size
    ce = (1 - label_smoothing) * c[labels] * target + label_smoothing * smooth
    p = jax.lax.stop_gradient(jnp.exp(-target)) if token_scaling else jnp.ones_like(ce)
    return p * ce, p * z_loss * lse[:, 0] ** 2


def cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    token_weights: jax.Array,
    class_weights: jax.Array | None = None,
    *,
    reduction: str = "mean",
    **options: float | bool | None,
) -> jax.Array:
    """Reduces the rows. Where token_weights (N,) are 0, a row does not count and its logits are not read."""
    counts = token_weights != 0
    logits = jnp.where(counts[:, None], logits, 0)
    labels = jnp.where(counts, labels, 0)
    ce, z = cross_entropy_rows(logits, labels, class_weights, **options)
    ce, z = token_weights * ce, token_weights * z
    if reduction == "none":
        return ce + z
    if reduction == "sum":
        return jnp.sum(ce + z)
    target_weights = token_weights if class_weights is None else token_weights * class_weights[labels]
    return jnp.sum(ce) / jnp.sum(target_weights) + jnp.sum(z) / jnp.sum(token_weights)
