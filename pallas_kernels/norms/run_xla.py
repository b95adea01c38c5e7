"""A row pass in plain XLA: whole arrays, fused as the compiler sees fit."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels.norms.row_pass import Arrays, RowPass


def unsupported(*arrays: jax.Array | None, **case: Any) -> str | None:
    """XLA runs every case."""
    return None


def run(
    row_pass: RowPass, matrices: Sequence[jax.Array], vectors: Sequence[jax.Array | None], known_sums: Arrays = ()
) -> tuple[Arrays, Arrays, Arrays]:
    """matrices (N, D), vectors (D,) or None → outputs (N, D), totals (D,), and no sums to save.

    XLA reads memory as often with saved sums as without, so none are saved and none are known.
    """
    del known_sums
    outputs, totals = run_along((-1,), (0,), row_pass, matrices, [x if x is None else x[None, :] for x in vectors])
    return outputs, totals, ()


def run_along(
    row_axes: tuple[int, ...],
    total_axes: tuple[int, ...],
    row_pass: RowPass,
    matrices: Sequence[jax.Array],
    vectors: Sequence[jax.Array | None],
) -> tuple[Arrays, Arrays]:
    """A row pass over arrays of any rank, whose rows lie along `row_axes`. Totals are sums over `total_axes`."""
    sums: Arrays = ()
    for stage in row_pass.all_stages:
        stage_sums = tuple(jnp.sum(term, axis=row_axes, keepdims=True) for term in stage(sums, *matrices, *vectors))
        # On GPUs, XLA fuses a row's sums with what is made of them. Where there are totals, it would then write x̂ in
        # float32 for them: the barrier keeps the two apart.
        sums += jax.lax.optimization_barrier(stage_sums) if row_pass.num_totals else stage_sums
    outputs, terms = row_pass.outputs(sums, *matrices, *vectors)
    outputs = tuple(y.astype(dtype) for y, dtype in zip(outputs, row_pass.output_dtypes, strict=True))
    return outputs, tuple(jnp.sum(term, axis=total_axes) for term in terms)
