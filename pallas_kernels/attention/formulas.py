"""How the product of a query and a key becomes a weight, and back: what the kernels of every GPU compute."""

import dataclasses
import math

import jax
import jax.numpy as jnp

LOG2_E = math.log2(math.e)
NO_SCORE = -1e30  # a maximum of no scores; finite, so that what is masked has the weight exp2(−inf) = 0, and no NaN


@dataclasses.dataclass(frozen=True)
class Scores:
    """How a product of a query and a key becomes an exponent of 2: factor · capped(q·k)."""

    softcap: float | None
    scale: float

    @property
    def factor(self) -> float:
        """What a capped product is multiplied by: base 2 and the scale, or the softcap in the scale's place."""
        return LOG2_E * (self.scale if self.softcap is None else self.softcap)

    def capped(self, products: jax.Array) -> jax.Array:
        """The products; with a softcap tanh(scale·q·k/softcap), as 1 − 2/(1 + exp(2x)), exact to 2^-23 of 1."""
        if self.softcap is None:
            return products
        return 1.0 - 2.0 / (1.0 + jnp.exp2(products * (2 * LOG2_E * self.scale / self.softcap)))

    def slope(self, gradient: jax.Array, capped: jax.Array) -> jax.Array:
        """The gradient by the capped score → the gradient by the product, without the factor `scale`."""
        return gradient if self.softcap is None else gradient * (1.0 - jnp.square(capped))
