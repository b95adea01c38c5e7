"""The rotation of pairs, which every backend runs: float32 throughout, rounded once to the dtype of q or k.

The gradient is the transposed rotation, which needs cos and sin only.
"""

from collections.abc import Sequence

import jax

Halves = Sequence[jax.Array]  # the first columns of all pairs, and the second ones


def rotated_halves(x: Halves, cos: Halves, sin: Halves, *, inverse: bool) -> tuple[jax.Array, jax.Array]:
    """All pairs, rotated or rotated back, in their own dtype; cos and sin are float32 or wider."""
    x1, x2 = (half.astype(cos[0].dtype) for half in x)
    # The transpose of the rotation, which is its inverse where both halves of a table are equal.
    s1, s2 = (-sin[1], -sin[0]) if inverse else sin
    # y₁ = x₁·cos₁ − x₂·sin₁      y₂ = x₂·cos₂ + x₁·sin₂
    return (x1 * cos[0] - x2 * s1).astype(x[0].dtype), (x2 * cos[1] + x1 * s2).astype(x[1].dtype)
