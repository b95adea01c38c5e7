"""The order in which the choices of tokens are sorted by expert, and sums over a token's choices."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels.tiles import promoted


class Order(NamedTuple):
    """How the N·k choices of tokens are sorted by expert, those of tokens with a wrong expert last."""

    token: jax.Array  # (N·k,), the token of each sorted row
    choice: jax.Array  # (N·k,), the sorted row's place among the choices
    row: jax.Array  # (N, k), the sorted row of each choice
    sizes: jax.Array  # (E,), rows of each expert
    is_right: jax.Array  # (N, 1), whether all of a token's experts exist

    def by_row(self, weights: jax.Array) -> jax.Array:
        """weights (N, k) → (N·k, 1), that of each sorted row; 0 where an expert is wrong."""
        known = jnp.where(self.is_right, weights, 0).reshape(-1)
        return known.at[self.choice].get(mode="promise_in_bounds")[:, None]

    def by_choice(self, values: jax.Array) -> jax.Array:
        """values (N·k,) of the sorted rows → (N, k); NaN where an expert is wrong."""
        return jnp.where(self.is_right, values.at[self.row].get(mode="promise_in_bounds"), jnp.nan)


def sorted_by_expert(experts: jax.Array, num_experts: int) -> Order:
    """experts (N, k) → their order among the N·k choices."""
    k = experts.shape[1]
    is_right = jnp.all((experts >= 0) & (experts < num_experts), axis=1, keepdims=True)
    of_choice = jnp.where(is_right, experts, num_experts).astype(jnp.int32).reshape(-1)
    # A radix sort takes a pass for each byte of its keys.
    key = of_choice.astype(jnp.uint8 if num_experts < 2**8 else jnp.uint16 if num_experts < 2**16 else jnp.uint32)
    numbers = jnp.arange(of_choice.size, dtype=jnp.int32)
    _, choice = jax.lax.sort((key, numbers), num_keys=1, is_stable=True)
    # A permutation's inverse: no two rows are written to the same place.
    row = jnp.zeros_like(numbers).at[choice].set(numbers, unique_indices=True).reshape(experts.shape)
    is_of = of_choice[:, None] == jnp.arange(num_experts, dtype=jnp.int32)[None]  # XLA counts without making it
    sizes = is_of.sum(axis=0, dtype=jnp.int32)
    return Order(choice // k, choice, row, sizes, is_right)


def summed(
    rows: jax.Array, row: jax.Array, weights: jax.Array | None = None, *, mode: Any = "promise_in_bounds"
) -> jax.Array:
    """rows (M, D), row (N, k) of each choice → (N, D), the sum over a token's choices; float32 or wider.

    `weights` (N, k) weigh them. With `mode="fill"` a choice whose row is not there adds nothing.
    """
    total = 0.0
    for choice in range(row.shape[1]):
        own = rows.at[row[:, choice]].get(mode=mode, fill_value=0).astype(promoted(rows.dtype, jnp.float32))
        total = total + (own if weights is None else weights[:, choice, None] * own)
    return jnp.asarray(total)
