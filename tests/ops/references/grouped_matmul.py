"""The grouped product and the mixture of experts as their formulas stand, in whatever precision they are given.

Each is dense over groups: every row meets every weight, and a mask keeps one.
"""

import jax
import jax.numpy as jnp

from tests.ops.references import glu


def grouped_matmul(x: jax.Array, w: jax.Array, group_sizes: jax.Array, *, transpose_w: bool = False) -> jax.Array:
    """x (M, K), w (E, K, N) or (E, N, K) → y (M, N): row m times the weight of its group, 0 after the last group."""
    ends = jnp.cumsum(group_sizes, dtype=group_sizes.dtype)
    rows = jnp.arange(x.shape[0], dtype=ends.dtype)[:, None]
    inside = ((rows >= (ends - group_sizes)[None]) & (rows < ends[None])).astype(x.dtype)
    in_some = inside.sum(axis=1, keepdims=True) > 0
    return jnp.einsum("me,mk,enk->mn" if transpose_w else "me,mk,ekn->mn", inside, jnp.where(in_some, x, 0), w)


def gated(gate: jax.Array, up: jax.Array, activation: str) -> jax.Array:
    """act(gate) · up, or gpt-oss's min(gate, 7)·σ(1.702·min(gate, 7)) · (clip(up, −7, 7) + 1)."""
    if activation != "clamped_swiglu":
        return glu.gated(gate, up, activation=activation)
    gate = jnp.minimum(gate, 7)
    return gate / (1 + jnp.exp(-1.702 * gate)) * (jnp.clip(up, -7, 7) + 1)


def moe_mlp(
    x: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    *,
    experts: jax.Array,
    activation: str,
) -> jax.Array:
    """x (N, D) → y (N, D): the sum over a token's experts of weight · expert(x)."""
    both = jnp.einsum("nd,edf->nef", x, gate_up)
    both = both if gate_up_bias is None else both + gate_up_bias[None]
    gate, up = jnp.split(both, 2, axis=-1)
    y = jnp.einsum("nef,efd->ned", gated(gate, up, activation), down)
    y = y if down_bias is None else y + down_bias[None]
    chosen = (experts[..., None] == jnp.arange(gate_up.shape[0], dtype=experts.dtype)[None, None]).astype(x.dtype)
    return jnp.einsum("nk,nke,ned->nd", weights, chosen, y)
