"""How the product of a query and a key becomes a weight, and how its gradient comes back. All GPU kernels use this."""

import dataclasses
import math

import jax
import jax.numpy as jnp

LOG2_E = math.log2(math.e)
# The maximum of no scores. It is finite: a masked score then has the weight exp2(−inf − NO_SCORE) = 0, and not NaN.
NO_SCORE = -1e30


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
