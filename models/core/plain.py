"""The ops in plain jnp, with the ops' rounding. A model runs these if `KernelOptions` switches a kernel off."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from liger_jax.ops import LossMetrics


def rms_norm(
    x: Float[Array, "*rows D"],
    scale: Float[Array, " D"],
    *,
    eps: float,
    offset: float,
    casting_mode: str,
    axis: str | None = None,
) -> Float[Array, "*rows D"]:
    """Normalises and scales; the mean square and its root are float32.

    `casting_mode` "llama" rounds to x's dtype before the scale, in the wider of the two dtypes; "gemma" after it.
    `axis` is the mesh axis whose devices have as many other columns of each row; `None` for whole rows.
    """
    x32, scale = x.astype(jnp.float32), jnp.expand_dims(jnp.asarray(scale), tuple(range(x.ndim - 1)))
    mean_square = jnp.mean(x32 * x32, axis=-1, keepdims=True)
    mean_square = mean_square if axis is None else jax.lax.pmean(mean_square, axis)
    normed = x32 * jax.lax.rsqrt(mean_square + eps)
    if casting_mode == "gemma":
        return (normed * (offset + scale.astype(jnp.float32))).astype(x.dtype)
    wider = jnp.promote_types(x.dtype, scale.dtype)
    return (normed.astype(x.dtype).astype(wider) * (offset + scale).astype(wider)).astype(x.dtype)


def normalised(x: Float[Array, "*rows D"], eps: float) -> Float[Array, "*rows D"]:
    """x/√(mean(x²) + eps) over the last axis, in float32: the norm without a scale."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)).astype(x.dtype)


def fused_add_rms_norm(
    x: Float[Array, "*rows D"], residual: Float[Array, "*rows D"] | None, scale: Float[Array, " D"], **options: Any
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows D"]]:
    """The normalised sum, and the sum; `residual` is `None` to add nothing."""
    added = x if residual is None else residual + x
    return rms_norm(added, scale, **options), added


def apply_rope(
    q: Float[Array, "B T Q H"],
    k: Float[Array, "B T K H"],
    cos: Float[Array, "#B T R"],
    sin: Float[Array, "#B T R"],
    *,
    layout: str,
) -> tuple[Float[Array, "B T Q H"], Float[Array, "B T K H"]]:
    """Rotates pairs of the first R columns of each head in float32; the tables' halves are alike.

    `layout`: "half", where the pair i is columns i and i + R/2; or "interleaved", columns 2i and 2i + 1.
    """
    width = cos.shape[-1]
    axis, in_pairs = (-2, (2, -1)) if layout == "half" else (-1, (-1, 2))

    def rotate(x):
        if width < x.shape[-1]:
            return jnp.concatenate([rotate(x[..., :width]), x[..., width:]], axis=-1)
        first, second = jnp.split(x.astype(jnp.float32).reshape(*x.shape[:-1], *in_pairs), 2, axis=axis)
        c, s = (jnp.expand_dims(table.astype(jnp.float32)[:, :, None, : width // 2], axis) for table in (cos, sin))
        turned = jnp.concatenate([first * c - second * s, second * c + first * s], axis=axis)
        return turned.reshape(x.shape).astype(x.dtype)

    return rotate(q), rotate(k)


def swiglu(gate: Float[Array, "*rows F"], up: Float[Array, "*rows F"]) -> Float[Array, "*rows F"]:
    """silu(gate)·up with silu in float32."""
    return jax.nn.silu(gate.astype(jnp.float32)).astype(gate.dtype) * up


def geglu(gate: Float[Array, "*rows F"], up: Float[Array, "*rows F"]) -> Float[Array, "*rows F"]:
    """gelu(gate)·up with gelu by tanh in float32."""
    return jax.nn.gelu(gate.astype(jnp.float32), approximate=True).astype(gate.dtype) * up


def cross_entropy(
    logits: Float[Array, "*tokens V"],
    labels: Integer[Array, "*tokens"],
    token_weights: Float[Array, "*tokens"] | None,
    ignore_index: int,
    *,
    reduction: str,
    token_scaling: bool,
) -> tuple[Float[Array, ""], LossMetrics]:
    """Σ t·(lse(z) − z_y), over Σ t if the reduction is "mean", in float32; t are the token weights, z the logits.

    With `token_scaling` each token's loss is multiplied by exp(z_y − lse(z)), without gradient through that. A label
    that is neither in [0, V) nor `ignore_index` makes the loss NaN. Under jit the metrics cost nothing unless used.
    """
    z = logits.astype(jnp.float32)
    t = jnp.ones(labels.shape, jnp.float32) if token_weights is None else token_weights.astype(jnp.float32)
    counts = (labels != ignore_index) & (t != 0)
    inside = (labels >= 0) & (labels < z.shape[-1])
    target = jnp.take_along_axis(z, jnp.where(inside, labels, 0)[..., None], axis=-1)[..., 0]
    lse = jax.nn.logsumexp(z, axis=-1)
    losses = t * jnp.where(inside, lse - target, jnp.nan)
    if token_scaling:
        losses *= jax.lax.stop_gradient(jnp.exp(target - lse))
    losses = jnp.where(counts, losses, 0.0)
    num_tokens = jnp.sum(jnp.where(counts, t, 0.0))
    loss = jnp.sum(losses)
    if reduction == "mean":
        loss = loss / jnp.where(jnp.any(counts), num_tokens, 1.0)
    predicted = jnp.argmax(z, axis=-1).astype(jnp.int32)
    num_correct = jnp.sum(counts & (predicted.astype(labels.dtype) == labels), dtype=jnp.float32)
    metrics = LossMetrics(
        accuracy=num_correct / jnp.maximum(jnp.sum(counts, dtype=jnp.float32), 1.0),
        predicted_tokens=jnp.where(counts, predicted, -1),
        max_logit=jnp.where(counts, jnp.max(z, axis=-1), 0.0),
        log_normalizer=jnp.where(counts, lse, 0.0),
        z_loss=jnp.zeros((), jnp.float32),
        num_tokens=num_tokens,
    )
    return loss, jax.lax.stop_gradient(metrics)
