"""A factor of queries that grows with their positions, so that attention to long rows stays as sharp."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def query_scale(positions: Int[Array, "B T"], beta: float, length: int) -> Float[Array, "B T 1"]:
    """1 + beta·ln(1 + ⌊position/length⌋), which is 1 for the first `length` positions."""
    times = (positions // length).astype(jnp.float32)
    return (1 + beta * jnp.log1p(times))[..., None]
