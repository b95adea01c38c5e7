"""The grouped product in plain XLA: a loop over visits, each one a dense product of a tile with its group's weight.

Nothing is dense over groups. A visit reads a tile of rows and one weight, and multiplies whole tiles; rows of other
groups are masked. Memory beside inputs and results: a tile of each, and for the weights' gradient one weight in
float32. Sums are float32, also where a group's rows are in several tiles.
"""

from typing import Any

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels.grouped_matmul import config, formulas
from liger_jax.pallas_kernels.tiles import full_like, promoted


def _tile(x: jax.Array, start: jax.Array, rows: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, rows)


def _place(group_sizes: jax.Array, m: int) -> tuple[formulas.Visits, int, Any]:
    """The visits, the rows of a tile, and a function of a visit's number: its tile's first row and its own rows.

    The last tile ends with the last row, and so may begin in the tile before: no row is after the arrays' end.
    """
    rows = config.xla_rows(m, group_sizes.shape[0])
    visits = formulas.visits(group_sizes, m, rows)

    def place(i):
        first = visits.tile[i] * rows
        start = jnp.minimum(first, m - rows)
        row = start + jnp.arange(rows, dtype=jnp.int32)
        inside = (row >= jnp.maximum(visits.begin[i], first)) & (row < visits.end[i])
        return start, inside[:, None]

    return visits, rows, place


def product(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array, fill: jax.Array, *, transpose_w: bool, precision: Any
) -> jax.Array:
    """x (M, K), w (E, K, N) or (E, N, K) → (M, N) in x.dtype; `fill` () is written after the last group."""
    m, n = x.shape[0], w.shape[1 if transpose_w else 2]
    visits, rows, place = _place(group_sizes, m)

    def visit(i, y):
        start, inside = place(i)
        products = jax.lax.dot_general(
            _tile(x, start, rows), w[visits.group[i]], (((1,), (1 if transpose_w else 0,)), ((), ())),
            precision=precision, preferred_element_type=promoted(x.dtype, jnp.float32),
        )  # fmt: skip
        products = jnp.where(inside, products.astype(x.dtype), _tile(y, start, rows))
        return jax.lax.dynamic_update_slice_in_dim(y, products, start, axis=0)

    y = full_like(x, (m, n), 0, x.dtype) + fill.astype(x.dtype)
    return jax.lax.fori_loop(0, visits.total, visit, y)


def weight_gradient(
    a: jax.Array, b: jax.Array, group_sizes: jax.Array, fill: jax.Array, *, dtype: Any, precision: Any
) -> jax.Array:
    """a (M, A), b (M, B) → aᵀ · b over the rows of each group, (E, A, B) in dtype; `fill` () for empty groups."""
    m, num_groups = a.shape[0], group_sizes.shape[0]
    visits, rows, place = _place(group_sizes, m)
    accumulator = promoted(a.dtype, jnp.float32)

    def visit(i, sums):
        total, gradient = sums
        start, inside = place(i)
        own_a, own_b = (jnp.where(inside, _tile(x, start, rows), jnp.zeros((), x.dtype)) for x in (a, b))
        products = jax.lax.dot_general(
            own_a, own_b, (((0,), (0,)), ((), ())), precision=precision, preferred_element_type=accumulator
        )
        group = visits.group[i]
        is_first = visits.tile[i] == visits.begin[i] // rows
        total = jnp.where(is_first, products, total + products)
        gradient = jax.lax.dynamic_update_slice_in_dim(gradient, total.astype(dtype)[None], group, axis=0)
        return total, gradient

    shape = a.shape[1], b.shape[1]
    gradient = full_like(a, (num_groups, *shape), 0, dtype) + fill.astype(dtype)
    return jax.lax.fori_loop(0, visits.total, visit, (full_like(a, shape, 0, accumulator), gradient))[1]


def spread(x: jax.Array, token: jax.Array, row: jax.Array) -> jax.Array:
    """x (N, D), row (N, k), a permutation of N·k, with token (N·k,) its inverse → (N·k, D), x[n] in each row[n]."""
    del row
    return x.at[token].get(mode="promise_in_bounds")
