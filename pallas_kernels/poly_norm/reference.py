"""PolyNorm as its formula stands in the paper: the oracle of the tests, in whatever precision it is given."""

import jax
import jax.numpy as jnp


def poly_norm(x: jax.Array, weight: jax.Array, bias: jax.Array | None, *, eps: float) -> jax.Array:
    """y = Σ_p weight[3 − p] · x^p / sqrt(mean(x^2p) + eps) + bias for p = 3, 2, 1, in x's dtype throughout."""
    powers = (x**3, x**2, x)
    normed = [u / jnp.sqrt(jnp.mean(jnp.square(u), axis=-1, keepdims=True) + eps) for u in powers]
    y = weight[0] * normed[0] + weight[1] * normed[1] + weight[2] * normed[2]
    return y if bias is None else y + bias
