"""Hopper's copies of tokens to their places among the rows that are sorted by expert.

Each row of x is read once, and written to k places by the copy engine. XLA's gather moves single numbers: for 8,192
rows of 2,048 to 8 places each it took 193 µs on an H200, where memory alone would take 65.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _mosaic_gpu as plgpu
from liger_jax.pallas_kernels import hopper
from liger_jax.pallas_kernels.grouped_matmul.mosaic_gpu_block import num_blocks
from liger_jax.pallas_kernels.tiles import cdiv, out_like

_PIECE = 64  # columns; the copy engine takes at most 256 pieces at once
_WIDEST = 256 * _PIECE
_SHARED_BYTES = 192 * 1024


def spread(x: jax.Array, token: jax.Array, row: jax.Array) -> jax.Array:
    """x (N, D), row (N, k), a permutation of N·k, with token (N·k,) its inverse → (N·k, D), x[n] in each row[n]."""
    (n, d), k = x.shape, row.shape[1]
    if d > _WIDEST:
        return x.at[token].get(mode="promise_in_bounds")
    workers = 4 if d <= _WIDEST // 2 else 1  # warpgroups, each with its own rows
    stages = min(4, _SHARED_BYTES // (workers * 2 * d))
    blocks = num_blocks(cdiv(n, workers))
    shape = d // _PIECE, _PIECE

    def body(x_ref, row_ref, out_ref, stage, filled):
        warpgroup = jax.lax.axis_index("warpgroup")
        worker, num_workers = jax.lax.axis_index("block") * workers + warpgroup, blocks * workers
        own = jax.lax.div(n - 1 - worker + num_workers, num_workers)

        def fetch(i):
            slot = warpgroup * stages + jax.lax.rem(i, stages)
            plgpu.copy_gmem_to_smem(x_ref.at[worker + i * num_workers], stage.at[slot], filled.at[slot])

        for i in range(stages - 1):
            pl.when(i < own)(lambda i=i: fetch(jnp.int32(i)))

        def one(i, _):
            slot = warpgroup * stages + jax.lax.rem(i, stages)
            places = [row_ref[(worker + i * num_workers) * k + j] for j in range(k)]
            plgpu.barrier_wait(filled.at[slot])
            for j, place in enumerate(places):
                plgpu.copy_smem_to_gmem(stage.at[slot], out_ref.at[place], commit_group=j == k - 1)
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the row before has left its place
            pl.when(i + stages - 1 < own)(lambda: fetch(i + stages - 1))

        jax.lax.fori_loop(0, own, one, None)
        plgpu.wait_smem_to_gmem(0)

    (rows,) = hopper.launch(
        body, x.reshape(n, *shape), row.reshape(-1),
        num_blocks=blocks,
        num_warpgroups=workers,
        out_types=[out_like(x, (n * k, *shape), x.dtype)],
        scratch=[plgpu.SMEM((workers * stages, *shape), x.dtype), plgpu.Barrier(num_barriers=workers * stages)],
        name="moe_mlp_spread",
    )  # fmt: skip
    return hopper.kept(rows).reshape(n * k, d)
