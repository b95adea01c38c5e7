"""The ops as plain jnp, with the ops' rounding: what a model runs where `KernelOptions` switches a kernel off."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rms_norm(x: Float[Array, "*rows D"], scale: Float[Array, "D"], eps: float) -> Float[Array, "*rows D"]:
    """Normalises in float32, rounds to x's dtype, then scales (LLaMA's order).

    Args:
        x: float array.
        scale: one factor per column, in any float dtype.
        eps: added to the mean square.

    Returns:
        An array like `x`.
    """
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * scale.astype(x.dtype)


def apply_rope(
    q: Float[Array, "B T Q H"],
    k: Float[Array, "B T K H"],
    cos: Float[Array, "#B T H"],
    sin: Float[Array, "#B T H"],
) -> tuple[Float[Array, "B T Q H"], Float[Array, "B T K H"]]:
    """Rotates the halves of each head in float32.

    Args:
        q: queries.
        k: keys.
        cos: cosines; the second half repeats the first.
        sin: sines, likewise.

    Returns:
        Rotated queries and keys, in their own dtypes.
    """

    def rotate(x):
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        turned = jnp.concatenate([-second, first], axis=-1)
        c, s = (table.astype(jnp.float32)[:, :, None, :] for table in (cos, sin))
        return (x.astype(jnp.float32) * c + turned * s).astype(x.dtype)

    return rotate(q), rotate(k)


def swiglu(gate: Float[Array, "*rows F"], up: Float[Array, "*rows F"]) -> Float[Array, "*rows F"]:
    """silu(gate)·up with silu in float32.

    Args:
        gate: float array.
        up: float array of the same shape and dtype.

    Returns:
        An array like `gate`.
    """
    return jax.nn.silu(gate.astype(jnp.float32)).astype(gate.dtype) * up


def token_losses(
    logits: Float[Array, "*tokens V"], labels: Int[Array, "*tokens"], ignore_index: int
) -> Float[Array, "*tokens"]:
    """lse(z) − z[label] in float32; 0 where the label is `ignore_index`, NaN where it is outside the vocabulary.

    Args:
        logits: float array.
        labels: integers in [0, V), or `ignore_index`.
        ignore_index: the label that does not count.

    Returns:
        float32 losses, one a token.
    """
    z = logits.astype(jnp.float32)
    counts = labels != ignore_index
    inside = (labels >= 0) & (labels < z.shape[-1])
    safe = jnp.where(inside, labels, 0)
    target = jnp.take_along_axis(z, safe[..., None], axis=-1)[..., 0]
    loss = jax.nn.logsumexp(z, axis=-1) - target
    return jnp.where(counts, jnp.where(inside, loss, jnp.nan), 0.0)
