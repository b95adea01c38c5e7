"""What the TPU kernels of the fused linear cross-entropy share: a tile's strips, rows' numbers, blocks.

Spills: only the float32 sums of a strip of a tile's columns, 1 MiB, which exceed the registers of any core
(benchmarks/results/tpu_schedule.md).
The numbers of a row are spread over 128 lanes once for each row tile. If they were spread for each strip of columns,
the unit that moves values between lanes would be busier than the matrix units where the width is small.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _mosaic_tpu as pltpu
from liger_jax.pallas_kernels.cross_entropy import formulas as row_formulas
from liger_jax.pallas_kernels.fused_linear_cross_entropy import config, formulas
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import Inputs, LinearOptions
from liger_jax.pallas_kernels.tiles import (
    next_power_of_2,
    out_like,
    tpu_interpreter,
    tpu_params,
    vmem_bytes,
    vmem_limit,
)

LANES = 128
PART = 256  # columns of a tile that are multiplied, and then folded, at a time
ROW_GROUP = 16  # rows whose values are kept in registers while the epilogue goes through their columns


def parts_of_tile(v_block_size: int, whole_d: bool) -> list[tuple[int, int]]:
    """First column and width of each strip of a tile. A tile with a slice of d is one strip."""
    width = PART if whole_d else v_block_size
    return [(first, min(width, v_block_size - first)) for first in range(0, v_block_size, width)]


def _float32(ref, strip):
    return None if ref is None else ref[:, strip].astype(jnp.float32)


def for_each_part(hidden_ref, weight_ref, x_ref, u_ref, *, d, options: LinearOptions, start_row_tile, epilogue):
    """Calls epilogue(first column, width) for each strip of a tile, once u_ref holds the strip's logits.

    Where a tile has all of d, no branch is between products and epilogues. Then the compiler schedules one strip's
    epilogue among the next strip's products: 17.8 million cycles on v6e at (8192, 4096, 128256), and 18.0 in one strip.
    """
    d_tile, d_block_size, v_block_size = pl.program_id(2), hidden_ref.shape[1], u_ref.shape[1]

    def product(x, first, width):
        own = pl.ds(first, width)
        w = weight_ref[own, :] if options.vocab_dim == 0 else weight_ref[:, own]
        return formulas.product(x, w, 1, 1 - options.vocab_dim, options)

    @pl.when((pl.program_id(1) == 0) & (d_tile == 0))
    def _():
        start_row_tile()
        if x_ref is not None:
            x_ref[...] = pltpu.bitcast(hidden_ref[...], x_ref.dtype)

    if d == d_block_size:
        x = hidden_ref[...] if x_ref is None else pltpu.bitcast(x_ref[...], hidden_ref.dtype)
        for first, width in parts_of_tile(v_block_size, whole_d=True):
            u_ref[:, pl.ds(first, width)] = product(x, first, width)
            epilogue(first, width)
        return

    @pl.when(d_tile == 0)
    def _():
        u_ref[...] = jnp.zeros_like(u_ref)

    u_ref[...] += product(hidden_ref[...], 0, v_block_size)

    @pl.when(d_tile == pl.num_programs(2) - 1)
    def _():
        for first, width in parts_of_tile(v_block_size, whole_d=False):
            epilogue(first, width)


def columns_of_strip(v_block_size: int, first: int, width: int) -> jax.Array:
    """The indices of a strip's columns, in pieces."""
    start = pl.program_id(1) * v_block_size + first
    return pieces(start + jax.lax.broadcasted_iota(jnp.int32, (1, width), 1))


def row_groups(n_block_size: int):
    """A tile's rows in groups of `ROW_GROUP`, as slices of a ref."""
    return [pl.ds(start, min(ROW_GROUP, n_block_size - start)) for start in range(0, n_block_size, ROW_GROUP)]


def pieces(x: jax.Array) -> jax.Array:
    """(m, v) → (v / 128, m, 128), whose sums over the first axis add up whole registers."""
    return jnp.stack([x[:, start : start + LANES] for start in range(0, x.shape[1], LANES)])


def vector_pieces(ref, strip):
    """A strip of a vector's ref (1, V) as `pieces` in float32, or None."""
    return None if ref is None else pieces(_float32(ref, strip))


def write_pieces(ref, own, first: int, pieces: jax.Array) -> None:
    """Writes `pieces` to the rows `own` of a ref, from column `first` on."""
    for i in range(pieces.shape[0]):
        ref[own, pl.ds(first + i * LANES, LANES)] = pieces[i].astype(ref.dtype)


# --- numbers of rows --------------------------------------------------------------------------------------------------


def row_operand(labels: jax.Array, *fields: jax.Array) -> jax.Array:
    """All numbers of a row in one operand (N, k), because a row takes 512 bytes of HBM for 1 lane as for 128."""
    return jnp.stack([labels, *(jax.lax.bitcast_convert_type(field, jnp.int32) for field in fields)], axis=1)


def spread_rows(rows_ref, spread_ref) -> None:
    """(n, k) → (k, n, 128)."""
    for i in range(spread_ref.shape[0]):
        spread_ref[i] = jnp.broadcast_to(rows_ref[:, i : i + 1], spread_ref.shape[1:])


def read_rows(spread_ref, own) -> tuple[jax.Array, ...]:
    """Labels, and the float32 fields, of a group of rows: each (1, n, 128)."""
    labels, *fields = [spread_ref[i, own, :][None] for i in range(spread_ref.shape[0])]
    return labels, *(pltpu.bitcast(field, jnp.float32) for field in fields)


def spread_scratch(n_block_size: int, row_operand: jax.Array):
    """Scratch memory of `spread_rows`."""
    return pltpu.VMEM((row_operand.shape[1], n_block_size, LANES), jnp.int32)


# --- maxima of a row's strips -----------------------------------------------------------------------------------------


def maximum_lanes(v_block_size: int, whole_d: bool) -> int:
    """How many of 128 lanes a tile's maxima take, one for each of its strips. Several tiles share the 128."""
    return next_power_of_2(len(parts_of_tile(v_block_size, whole_d)))


def maximum_lane(v_block_size: int, whole_d: bool, first: int) -> tuple[jax.Array, jax.Array]:
    """The lane of the maxima of the strip that begins at column `first`, and the indices of all lanes."""
    index = [start for start, _ in parts_of_tile(v_block_size, whole_d)].index(first)
    lane = jax.lax.rem(pl.program_id(1) * maximum_lanes(v_block_size, whole_d), LANES) + index
    return lane, jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)


# --- blocks, scratch and launch ---------------------------------------------------------------------------------------


def operand_specs(tiles: config.TpuConfig, options: LinearOptions, row_width: int, num_vectors: int):
    """Block specs over the grid (row_tile, vocab_tile, d_tile) of hidden, the weight, rows' numbers, and vectors.

    Where the kernel gets the number of the weight's first tile, index maps get it, too.
    """

    def weight_index_map(_, vocab_tile, d_tile, *first_tile_ref):
        vocab_tile = vocab_tile + first_tile_ref[0][0] if first_tile_ref else vocab_tile
        return (vocab_tile, d_tile) if options.vocab_dim == 0 else (d_tile, vocab_tile)

    block = (tiles.v_block_size, tiles.d_block_size)
    hidden_spec = pl.BlockSpec(
        (tiles.n_block_size, tiles.d_block_size), lambda row_tile, _, d_tile, *__: (row_tile, d_tile)
    )
    weight_spec = pl.BlockSpec(block if options.vocab_dim == 0 else block[::-1], weight_index_map)
    row_spec = pl.BlockSpec((tiles.n_block_size, row_width), lambda row_tile, *_: (row_tile, 0))
    vector_spec = pl.BlockSpec((1, tiles.v_block_size), lambda _, vocab_tile, *__: (0, vocab_tile))
    return [hidden_spec, weight_spec, row_spec, *[vector_spec] * num_vectors]


def tile_spec(tiles: config.TpuConfig) -> pl.BlockSpec:
    """Blocks of an array (N, V), a row tile by a vocabulary tile."""
    return pl.BlockSpec(
        (tiles.n_block_size, tiles.v_block_size), lambda row_tile, vocab_tile, *_: (row_tile, vocab_tile)
    )


def maxima_spec(tiles: config.TpuConfig, whole_d: bool) -> pl.BlockSpec:
    """Blocks of the rows' maxima in each strip of the vocabulary; several vocabulary tiles share one."""
    tiles_in_block = LANES // maximum_lanes(tiles.v_block_size, whole_d)
    return pl.BlockSpec(
        (tiles.n_block_size, LANES), lambda row_tile, vocab_tile, *_: (row_tile, vocab_tile // tiles_in_block)
    )


def product_scratch(tiles: config.TpuConfig, d: int):
    """Scratch for a tile of hidden, where it is kept, and for the logits."""
    kept = [pltpu.VMEM((tiles.n_block_size // 2, d), jnp.uint32)] if tiles.keeps_hidden else []
    return [*kept, pltpu.VMEM((tiles.n_block_size, tiles.v_block_size), jnp.float32)]


def tiles_of(inputs: Inputs, options: LinearOptions, keep: bool) -> config.TpuConfig:
    """The tiles of these inputs; `keep` says whether exponentials and maxima are kept for the gradients."""
    (n, d), v = inputs.hidden.shape, inputs.weight.shape[options.vocab_dim]
    num_fields = len(jax.tree.leaves(jax.eval_shape(lambda: row_formulas.online_start(1, options.logit))))
    return config.tpu_config(
        n,
        v,
        d,
        inputs.hidden.dtype.itemsize,
        vmem_bytes(),
        num_statistics=num_fields,
        keeps_maxima=keep,
        num_vectors=inputs.num_vectors,
    )


def launch_options(interpret: bool) -> dict[str, Any]:
    """What `pallas_call` takes beside a kernel's blocks: the grid is (row_tile, vocab_tile, d_tile)."""
    params = tpu_params(interpret, "parallel", "arbitrary", "arbitrary", vmem_limit_bytes=vmem_limit(vmem_bytes()))
    return {"compiler_params": params, "interpret": tpu_interpreter(interpret)}


def empty(like: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike, interpret: bool) -> jax.Array:
    """An array to be filled, which takes no pass over memory as zeros would."""
    return pl.pallas_call(
        lambda _: None,
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=out_like(like, shape, dtype),
        interpret=tpu_interpreter(interpret),
        name="empty",
    )()
