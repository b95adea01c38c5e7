"""Numbers whose squares or higher powers are summed in float32, and must neither overflow nor vanish."""

import jax
import jax.numpy as jnp

_LARGEST_FACTOR = 2.0**120


def shrinking_factor(largest: jax.Array, eps: float) -> jax.Array:
    """A power of two that brings numbers up to `largest` down, or up, to about 8; a constant for derivatives.

    It brings no number up to where eps, which is added to a mean square, exceeds 1: what is less is not seen beside it.
    """
    most = min(max(1.0, eps**-0.5), _LARGEST_FACTOR) if eps else _LARGEST_FACTOR
    factor = jnp.minimum(8.0 / jax.lax.stop_gradient(largest), most)
    return jax.lax.reduce_precision(factor, exponent_bits=jnp.finfo(factor.dtype).nexp, mantissa_bits=0)


def normalised_powers(x: jax.Array, eps: float, powers: tuple[int, ...]) -> list[jax.Array]:
    """u / sqrt(mean(u²) + eps) over the last axis, for each power u of float32 numbers x."""
    factor = shrinking_factor(jnp.max(jnp.abs(x), axis=-1, keepdims=True), eps)
    small = x * factor

    def normalised(power):
        # The cube of a factor may be infinite: then the power vanishes beside eps.
        least = jnp.square(eps**0.5 * factor**power) if eps else 0.0
        mean_square = jnp.mean(small ** (2 * power), axis=-1, keepdims=True)
        return small**power * jax.lax.rsqrt(mean_square + least)

    return [normalised(power) for power in powers]
