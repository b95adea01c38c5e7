"""A row pass in plain XLA: whole arrays, fused as the compiler sees fit."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels.norms.row_pass import Arrays, RowPass


def run(
    row_pass: RowPass, matrices: Sequence[jax.Array], vectors: Sequence[jax.Array | None], known_sums: Arrays = ()
) -> tuple[Arrays, Arrays, Arrays]:
    """matrices (N, D), vectors (D,) or None → outputs (N, D), totals (D,), and no sums to save.

    XLA reads memory as often with saved sums as without, so none are saved and none are known.
    """
    del known_sums
    rows, sums = [x if x is None else x[None, :] for x in vectors], ()
    for stage in row_pass.all_stages:
        stage_sums = tuple(jnp.sum(term, axis=-1, keepdims=True) for term in stage(sums, *matrices, *rows))
        # On GPUs, XLA fuses a row's sums with what is made of them. Where there are totals, it would then write x̂ in
        # float32 for them: the barrier keeps the two apart.
        sums += jax.lax.optimization_barrier(stage_sums) if row_pass.num_totals else stage_sums
    outputs, terms = row_pass.outputs(sums, *matrices, *rows)
    outputs = tuple(y.astype(dtype) for y, dtype in zip(outputs, row_pass.output_dtypes, strict=True))
    return outputs, tuple(jnp.sum(term, axis=0) for term in terms), ()
