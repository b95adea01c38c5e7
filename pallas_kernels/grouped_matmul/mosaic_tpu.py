"""The grouped product in Pallas for TPUs: the grid walks over visits, a tile of rows and a group with rows there.

The scheme is that of megablox, JAX's own kernel, which cannot run inside a `shard_map` that checks how values vary, and
leaves rows after the groups as they are. Here they are one more group, without a weight, which gets `fill`.
Product: a tile's visits follow each other, so that each writes its own rows into a tile that stays in VMEM. The whole
contracted axis is there at once, so that the visits of a group share a weight's tile, which is read once for a group.
Weights' gradient: the visits of a group follow each other, and their sum stays in VMEM. Rows of other groups are zero
in both factors, so that NaN does not pass. An empty group has one visit, which writes zeros.
Rounding: sums are float32, and rounded once.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _mosaic_tpu as pltpu
from liger_jax.pallas_kernels.grouped_matmul import config, formulas
from liger_jax.pallas_kernels.tiles import cdiv, out_like, tpu_interpreter, tpu_params, vmem_bytes, vmem_limit


def unsupported(x: Any, w: Any) -> str | None:
    """Takes float32 and bfloat16, where a tile's whole contracted axis fits into VMEM."""
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        return f"the TPU kernel supports float32 and bfloat16, and x is {x.dtype}; use 'xla'."
    m, num_groups, (k, n), itemsize = x.shape[0], w.shape[0], w.shape[1:], x.dtype.itemsize
    products = (config.tpu_product(m, *shape, num_groups, itemsize, vmem_bytes()) for shape in ((k, n), (n, k)))
    if None in (*products, config.tpu_gradient(m, k, n, num_groups, itemsize, vmem_bytes())):
        return f"tiles of w {w.shape} do not fit into {vmem_bytes() >> 20} MiB of VMEM; use 'xla'."
    return None


def product(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    fill: jax.Array,
    *,
    transpose_w: bool,
    precision: Any,
    interpret: bool,
) -> jax.Array:
    """x (M, K), w (E, K, N) or (E, N, K) → (M, N) in x.dtype; `fill` () is written after the last group."""
    (m, k), num_groups, n = x.shape, w.shape[0], w.shape[1 if transpose_w else 2]
    rows, columns = _found(config.tpu_product(m, k, n, num_groups, x.dtype.itemsize, vmem_bytes()))
    rest = m - group_sizes.sum(dtype=jnp.int32, keepdims=True)
    visits = formulas.visits(jnp.concatenate([group_sizes, rest]), m, rows)
    dot = _dot(x.dtype, precision, (1, 1 if transpose_w else 0))

    def kernel(tile_ref, group_ref, begin_ref, end_ref, fill_ref, x_ref, w_ref, out_ref):
        visit = pl.program_id(1)
        begin, end = begin_ref[visit], end_ref[visit]
        has_weight = group_ref[visit] < num_groups
        inside = _inside(tile_ref[visit] * rows, (rows, columns), begin, end)

        def write(values):
            kept = out_ref[...].astype(jnp.float32)
            out_ref[...] = jnp.where(inside, values, kept).astype(out_ref.dtype)

        pl.when((end > begin) & has_weight)(lambda: write(dot(x_ref[...], w_ref[...])))
        pl.when((end > begin) & jnp.logical_not(has_weight))(lambda: write(fill_ref[0]))

    def weight_map(column, visit, tile_ref, group_ref, *_):
        group = jnp.minimum(group_ref[visit], num_groups - 1)
        return (group, column, 0) if transpose_w else (group, 0, column)

    x_spec = pl.BlockSpec((rows, k), lambda column, visit, tile_ref, *_: (tile_ref[visit], 0))
    weight_spec = pl.BlockSpec((None, *((columns, k) if transpose_w else (k, columns))), weight_map)
    out_spec = pl.BlockSpec((rows, columns), lambda column, visit, tile_ref, *_: (tile_ref[visit], column))
    return pl.pallas_call(
        kernel,
        out_shape=out_like(x, (m, n), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(cdiv(n, columns), visits.tile.shape[0]),
            in_specs=[x_spec, weight_spec],
            out_specs=out_spec,
        ),
        name="grouped_matmul_product",
        **_launch(interpret, "parallel", "arbitrary"),
    )(visits.tile, visits.group, visits.begin, visits.end, fill[None], x, w)


def weight_gradient(
    a: jax.Array, b: jax.Array, group_sizes: jax.Array, fill: jax.Array, *, dtype: Any, precision: Any, interpret: bool
) -> jax.Array:
    """a (M, A), b (M, B) → aᵀ · b over the rows of each group, (E, A, B) in dtype; `fill` () for empty groups."""
    m, num_groups, height, width = a.shape[0], group_sizes.shape[0], a.shape[1], b.shape[1]
    tiles = config.tpu_gradient(m, height, width, num_groups, a.dtype.itemsize, vmem_bytes())
    rows, a_columns, b_columns = _found(tiles)
    visits = formulas.visits(group_sizes, m, rows, every_group=True)
    num_visits = visits.tile.shape[0]
    dot = _dot(a.dtype, precision, (0, 0))

    def kernel(tile_ref, group_ref, begin_ref, end_ref, fill_ref, a_ref, b_ref, out_ref, sum_ref):
        visit = pl.program_id(2)
        group, row, begin, end = group_ref[visit], tile_ref[visit] * rows, begin_ref[visit], end_ref[visit]
        is_first = (visit == 0) | (group_ref[jnp.maximum(visit - 1, 0)] != group)
        is_last = (visit == num_visits - 1) | (group_ref[jnp.minimum(visit + 1, num_visits - 1)] != group)
        is_whole = (row >= begin) & (row + rows <= end)

        @pl.when(is_first)
        def _():
            sum_ref[...] = jnp.zeros(sum_ref.shape, sum_ref.dtype)

        @pl.when(is_whole)
        def _():
            sum_ref[...] += dot(a_ref[...], b_ref[...])

        @pl.when((end > begin) & jnp.logical_not(is_whole))
        def _():
            def own(ref):
                inside = _inside(row, ref.shape, begin, end)
                return jnp.where(inside, ref[...].astype(jnp.float32), 0.0).astype(ref.dtype)

            sum_ref[...] += dot(own(a_ref), own(b_ref))

        @pl.when(is_last)
        def _():
            out_ref[...] = (sum_ref[...] + fill_ref[0]).astype(out_ref.dtype)

    a_spec = pl.BlockSpec((rows, a_columns), lambda i, j, visit, tile_ref, *_: (tile_ref[visit], i))
    b_spec = pl.BlockSpec((rows, b_columns), lambda i, j, visit, tile_ref, *_: (tile_ref[visit], j))
    out_spec = pl.BlockSpec(
        (None, a_columns, b_columns), lambda i, j, visit, tile_ref, group_ref, *_: (group_ref[visit], i, j)
    )
    return pl.pallas_call(
        kernel,
        out_shape=out_like(a, (num_groups, height, width), dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(cdiv(height, a_columns), cdiv(width, b_columns), num_visits),
            in_specs=[a_spec, b_spec],
            out_specs=out_spec,
            scratch_shapes=[pltpu.VMEM((a_columns, b_columns), jnp.float32)],
        ),
        name="grouped_matmul_weight_gradient",
        **_launch(interpret, "parallel", "parallel", "arbitrary"),
    )(visits.tile, visits.group, visits.begin, visits.end, fill[None], a, b)


def spread(x: jax.Array, token: jax.Array, row: jax.Array, *, interpret: bool) -> jax.Array:
    """x (N, D), row (N, k), a permutation of N·k, with token (N·k,) its inverse → (N·k, D), x[n] in each row[n]."""
    del row, interpret
    return x.at[token].get(mode="promise_in_bounds")


def _found(tiles: tuple[int, ...] | None) -> tuple[int, ...]:
    if tiles is None:
        raise ValueError("no tiles fit; `unsupported` says so before")
    return tiles


def _dot(dtype: Any, precision: Any, contract: tuple[int, int]) -> Any:
    """The product of two tiles, float32. Products of 16-bit numbers are exact, whatever the precision."""
    return functools.partial(
        jax.lax.dot_general,
        dimension_numbers=(((contract[0],), (contract[1],)), ((), ())),
        precision=precision if dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _inside(row: Any, shape: tuple[int, ...], begin: Any, end: Any) -> jax.Array:
    """Which rows of a tile, whose first one is `row`, are the group's."""
    row += jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return (row >= begin) & (row < end)


def _launch(interpret: bool, *semantics: str) -> dict[str, Any]:
    params = tpu_params(interpret, *semantics, vmem_limit_bytes=vmem_limit(vmem_bytes()))
    return {"compiler_params": params, "interpret": tpu_interpreter(interpret)}
