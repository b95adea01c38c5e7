"""How the product of a query and a key becomes a weight, and the gradient of that. All GPU kernels use this.

A sink is one more score s per head, of a key without a value. It takes weight from the visible keys. With the
log-sum-exp of these keys' scores, lse, and lse' = log(e^lse + e^s), the result is out' = e^(lse − lse')·out. The
gradients with respect to q, k and v are those of the softmax without a sink, computed with lse' and out' in place of
lse and out. The gradient with respect to s is −Σ e^(s − lse')·(dO·out'), summed over a head's queries.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

LOG2_E = math.log2(math.e)
# The maximum of no scores, which is compared and subtracted, never scaled. It is finite: a masked score then has the
# weight exp2(−inf − NO_SCORE) = 0, and not NaN.
NO_SCORE = -1e30


def product(a: jax.Array, b: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    """The float32 product of two tiles over one axis of each."""
    dimensions = (((contracted[0],), (contracted[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True)
class Scores:
    """How a product of a query and a key becomes an exponent of 2: factor · capped(q·k)."""

    softcap: float | None
    scale: float

    @property
    def factor(self) -> float:
        """The factor of a capped product: log2(e) · scale, or log2(e) · softcap if there is a softcap."""
        return LOG2_E * (self.scale if self.softcap is None else self.softcap)

    def capped(self, products: jax.Array) -> jax.Array:
        """The products themselves, or with a softcap tanh(scale·q·k/softcap)."""
        if self.softcap is None:
            return products
        return 1.0 - 2.0 / (1.0 + jnp.exp2(products * (2 * LOG2_E * self.scale / self.softcap)))

    def slope(self, gradient: jax.Array, capped: jax.Array) -> jax.Array:
        """The gradient by the capped score → the gradient by the product, without the factor `scale`."""
        return gradient if self.softcap is None else gradient * (1.0 - jnp.square(capped))


def weights(scores: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Scores (B, K, Q/K, ..., keys), float32, → their softmax, with sinks (K, Q/K), which are left out."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    sink = sinks.astype(jnp.float32).reshape(1, *sinks.shape, *[1] * (scores.ndim - 3))
    largest = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sink))
    exponentials = jnp.exp(scores - largest)
    return exponentials / (jnp.sum(exponentials, axis=-1, keepdims=True) + jnp.exp(sink - largest))


def with_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """out (B, T, Q, H), lse (B, Q, T or more) in base 2, sinks (Q,) → both with the sinks among the scores."""
    lse_with = jnp.logaddexp2(lse, _exponents(sinks))
    share = jnp.exp2(lse - lse_with)[:, :, : out.shape[1]].swapaxes(1, 2)[..., None]
    return (share * out.astype(jnp.float32)).astype(out.dtype), lse_with


def sinks_gradient(out: jax.Array, lse: jax.Array, do: jax.Array, sinks: jax.Array) -> jax.Array:
    """`with_sinks`' out and lse, and do, the gradient by out → the gradient by sinks (Q,)."""
    delta = jnp.einsum("btqh,btqh->bqt", out.astype(jnp.float32), do.astype(jnp.float32))
    share = jnp.exp2(_exponents(sinks) - lse[:, :, : out.shape[1]])
    return -jnp.sum(share * delta, axis=(0, 2)).astype(sinks.dtype)


def _exponents(sinks: jax.Array) -> jax.Array:
    """Sinks (Q,) as exponents of 2, (1, Q, 1)."""
    return LOG2_E * sinks.astype(jnp.float32)[None, :, None]
