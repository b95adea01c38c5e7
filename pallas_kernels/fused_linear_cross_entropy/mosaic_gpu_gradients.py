"""The gradients of the fused loss on Hopper: products that make du, dX and dW, and the pass that makes du of E."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _mosaic_gpu as plgpu
from liger_jax.pallas_kernels import hopper
from liger_jax.pallas_kernels._hopper_product import Factors, product
from liger_jax.pallas_kernels._hopper_tiles import PIECE_COLUMNS, Epilogue, Tile, pieces, staging, store_tile
from liger_jax.pallas_kernels.cross_entropy import formulas as row_formulas
from liger_jax.pallas_kernels.cross_entropy.config import LogitOptions
from liger_jax.pallas_kernels.cross_entropy.formulas import Cotangents
from liger_jax.pallas_kernels.fused_linear_cross_entropy import config
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import HeadProducts, Inputs, LinearOptions
from liger_jax.pallas_kernels.fused_linear_cross_entropy.formulas import weight_operands
from liger_jax.pallas_kernels.fused_linear_cross_entropy.mosaic_gpu_operands import (
    Span,
    column_vectors,
    tile_logits,
)
from liger_jax.pallas_kernels.fused_linear_cross_entropy.mosaic_gpu_statistics import Blocks
from liger_jax.pallas_kernels.tiles import cdiv, out_like, round_up

_LOG2_E = math.log2(math.e)
FIRST_CHUNK, LAST_CHUNK = 1, 2  # of a sum over chunks
_SMALLEST = 2.0**-126  # the smallest normal number in bfloat16
_LEAST_EXPONENT = row_formulas.LEAST_EXPONENT * _LOG2_E  # of 2


def _logit_gradient(tile: Tile, z, exponent, probability, labels, g: Cotangents, class_weights, options: LogitOptions):
    """du = (g_lse · p + g_log_p · p · log p + g_target · 1[v = y] + g_sum · c_v) · dz/du; p is 2 to the exponent."""
    factor = tile.over_rows(g.log_normalizer)
    if g.log_probability is not None:
        factor += tile.over_rows(g.log_probability / _LOG2_E) * jnp.maximum(exponent, _LEAST_EXPONENT)
    du = factor * probability
    du += jnp.where(tile.column_indices() == tile.over_rows(labels - tile.column), tile.over_rows(g.target_logit), 0.0)
    if g.logit_sum is not None:
        g_sum = tile.over_rows(g.logit_sum)
        du += g_sum if class_weights is None else g_sum * tile.over_columns(class_weights)
    slope = row_formulas.slope_of_logit(z, options)
    return du if isinstance(slope, float) and slope == 1.0 else du * slope


# --- products ---------------------------------------------------------------------------------------------------------


def logit_gradients(
    inputs: Inputs, lse, cotangents: Cotangents, start, size: int, options: LinearOptions, vocab_size: int
):
    """du (N, size) for the vocabulary from `start` on; the number of columns is rounded up to whole pieces.

    It is 0 for entries from `vocab_size` on.
    """
    n, d = inputs.hidden.shape
    has_bias, has_weights = inputs.bias is not None, inputs.class_weights is not None and options.logit.logit_sum

    def finish(tile: Tile, refs, scratch):
        labels, lse, *g = tile.row_vectors
        tile = tile._replace(column=tile.column + tile.first_column)
        z = tile_logits(tile, has_bias, options.logit)
        exponent = z * _LOG2_E - tile.over_rows(lse * _LOG2_E)
        g = jax.tree.unflatten(jax.tree.structure(cotangents), g)
        weights = tile.column_vectors[-1] if has_weights else None
        du = _logit_gradient(tile, z, exponent, jnp.exp2(exponent), labels, g, weights, options.logit)
        if vocab_size % 64:  # the last piece reaches past it: the weights there are zeros, but probabilities are not
            du = jnp.where(tile.column_indices() < vocab_size - tile.column, du, 0.0)
        store_tile(tile, du, scratch[0], refs[0], tile.row, tile.column - tile.first_column)

    contract = 1, 1 - options.vocab_dim
    (du,) = product(
        Factors(inputs.hidden, inputs.weight, contract, first_column=start, num_columns=size),
        config.mosaic_gpu_logit_tiles(d, n, size),
        Epilogue(
            finish,
            out_types=[out_like(inputs.hidden, (n, round_up(size, 64)), inputs.hidden.dtype)],
            scratch=[staging(inputs.hidden.dtype)],
            row_vectors=[inputs.labels, lse, *[g for g in cotangents if g is not None]],
            column_vectors=column_vectors(inputs, has_weights),
        ),
        name="fused_linear_cross_entropy_logit_gradients",
    )
    return du


def _store(tile: Tile, refs: Any, scratch: Any, add: bool = False) -> None:
    """The epilogue of a plain product, or of one that is added to the existing values."""
    store_tile(tile, tile.values, scratch[0], refs[0], tile.row, tile.column, add)


def hidden_gradient(du: jax.Array, weight: jax.Array, options: LinearOptions, dtype: Any) -> jax.Array:
    """du · W (N, D)."""
    shape = du.shape[0], weight.shape[1 - options.vocab_dim]
    (dx,) = product(
        Factors(du, weight, (1, options.vocab_dim)),
        config.mosaic_gpu_tiles(du.shape[1], *shape),
        Epilogue(_store, out_types=[out_like(du, shape, dtype)], scratch=[staging(dtype)]),
        name="fused_linear_cross_entropy_hidden_gradient",
    )
    return dx


def weight_gradient(du: jax.Array, hidden: jax.Array, options: LinearOptions, dtype: Any) -> jax.Array:
    """duᵀ · X in the weight's layout."""
    operands = weight_operands(du, hidden, options)
    shape = operands[0].shape[1], operands[1].shape[1]
    (dw,) = product(
        Factors(*operands, (0, 0)),
        config.mosaic_gpu_tiles(du.shape[0], *shape),
        Epilogue(_store, out_types=[out_like(du, shape, dtype)], scratch=[staging(dtype)]),
        name="fused_linear_cross_entropy_weight_gradient",
    )
    return dw


def add_product(total: jax.Array | None, du: jax.Array, inputs: Inputs, start: jax.Array, options: LinearOptions):
    """Adds du · (the weight from `start` on) to total (N, D), float32, in place; to a new array if that is None."""
    shape = inputs.hidden.shape
    store = functools.partial(_store, add=total is not None)
    place: dict[str, Any] = (
        dict(in_place=[total]) if total is not None else dict(out_types=[out_like(du, shape, jnp.float32)])
    )
    (total,) = product(
        Factors(du, inputs.weight, (1, options.vocab_dim), first_depth=start),
        config.mosaic_gpu_tiles(du.shape[1], *shape),
        Epilogue(store, scratch=[staging(jnp.float32)], **place),
        name="fused_linear_cross_entropy_hidden_gradient",
    )
    return total


def put_product(
    whole: jax.Array, du: jax.Array, hidden: jax.Array, start: jax.Array, options: LinearOptions, add: bool = False
):
    """Writes duᵀ · X to its place in dW, from the vocabulary's `start` on, or adds it (float32), in place."""

    def finish(tile: Tile, refs, scratch):
        row, column = tile.row, tile.column
        row, column = (row + tile.place, column) if options.vocab_dim == 0 else (row, column + tile.place)
        store_tile(tile, tile.values, scratch[0], refs[0], row, column, add)

    operands = weight_operands(du, hidden, options)
    (whole,) = product(
        Factors(*operands, (0, 0)),
        config.mosaic_gpu_tiles(du.shape[0], *(x.shape[1] for x in operands)),
        Epilogue(finish, in_place=[whole], scratch=[staging(whole.dtype)], place=start),
        name="fused_linear_cross_entropy_weight_gradient",
    )
    return whole


def _split(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """The upper two bytes of each float32, under the name of `dtype`, and the third byte as uint8."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    upper = jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), dtype)
    return upper, (bits >> 8).astype(jnp.uint8)


def _join(upper: jax.Array, third: jax.Array) -> jax.Array:
    """The float32 that `_split` was given. Half a step stands for the lost byte: 2^-17 of error at most, unbiased."""
    upper = jax.lax.bitcast_convert_type(upper, jnp.uint16).astype(jnp.uint32)
    bits = (upper << 16) | (third.astype(jnp.uint32) << 8) | jnp.uint32(0x80)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def add_to_sum(
    high: jax.Array, low: jax.Array, du: jax.Array, hidden: jax.Array, which: jax.Array, options: HeadProducts
) -> tuple[jax.Array, jax.Array]:
    """Adds duᵀ · X, in place, to a sum over chunks that is kept in the upper three bytes of float32.

    `high` has the upper two bytes, whatever its dtype says, until the last chunk writes the rounded sum there. `low`
    (uint8) has the third byte. `which` (1,) int32 is `FIRST_CHUNK`, for which nothing is read, `LAST_CHUNK`, for which
    `low` is not written, or anything else.
    """
    num_slots, dtypes = 4, (high.dtype, low.dtype)
    tiles = config.mosaic_gpu_sum_tiles()
    todo = pieces((tiles.rows, tiles.columns))

    def fetch(tile: Tile, refs, scratch, i):
        arrived, slot = scratch[-1].at[tile.warpgroup * num_slots + i % num_slots], (tile.warpgroup, i % num_slots)
        for ref, stage in zip(refs, scratch, strict=False):
            plgpu.copy_gmem_to_smem(hopper.at(ref, tile.row, tile.column, todo[i]), stage.at[slot], arrived)

    def prepare(tile: Tile, refs, scratch):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(tile.flag != FIRST_CHUNK)
        def _():
            for i in range(num_slots):  # they arrive during the product
                fetch(tile, refs, scratch, i)

    def finish(tile: Tile, refs, scratch):
        (high_ref, low_ref), (high_stage, low_stage, arrived) = refs, scratch
        is_first, is_last = tile.flag == FIRST_CHUNK, tile.flag == LAST_CHUNK
        for i, piece in enumerate(todo):
            slot = (tile.warpgroup, i % num_slots)
            barrier = arrived.at[tile.warpgroup * num_slots + i % num_slots]
            pl.when(~is_first)(lambda barrier=barrier: plgpu.barrier_wait(barrier))
            upper = hopper.load(high_stage, slot, hopper.tile_layout())
            lowest = hopper.load(low_stage, slot, hopper.tile_layout())
            old = _join(upper, lowest)
            zeros = jnp.zeros_like(old)
            total = tile.values[piece] + jax.lax.select(jax.lax.broadcast(is_first, zeros.shape), zeros, old)
            upper, lowest = _split(total, high.dtype)
            rounded = total.astype(high.dtype)
            high_stage[slot] = jax.lax.select(jax.lax.broadcast(is_last, zeros.shape), rounded, upper)
            low_stage[slot] = lowest
            plgpu.commit_smem()
            low_there = hopper.at(low_ref, tile.row, tile.column, piece)
            store_low = functools.partial(plgpu.copy_smem_to_gmem, low_stage.at[slot], low_there, commit_group=False)
            pl.when(~is_last)(store_low)
            plgpu.copy_smem_to_gmem(high_stage.at[slot], hopper.at(high_ref, tile.row, tile.column, piece))
            if 0 < i <= len(todo) - num_slots:  # into the slot of the piece before, once that piece has left
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                pl.when(~is_first)(lambda i=i: fetch(tile, refs, scratch, i - 1 + num_slots))

    operands = weight_operands(du, hidden, options)
    stages = [hopper.shared_tile((2, num_slots, 64, PIECE_COLUMNS), dtype) for dtype in dtypes]
    scratch = [*stages, plgpu.Barrier(num_arrivals=2, num_barriers=2 * num_slots)]
    high, low = product(
        Factors(*operands, (0, 0)),
        tiles,
        Epilogue(finish, prepare, in_place=[high, low], scratch=scratch, flag=which),
        name="fused_linear_cross_entropy_weight_gradient",
    )
    return high, low


def make_logit_gradients(
    span: Span,
    exponentials: jax.Array | Blocks,
    maximum: jax.Array,
    lse: jax.Array,
    g: Cotangents,
    options: LinearOptions,
    first_block: jax.Array | None = None,
) -> jax.Array:
    """Writes du where E (N, V) is, for a span of the vocabulary.

    `maximum` (tiles, N) is the maximum of each row in each tile. du is 0 for entries from `span.size` on. If E is in
    blocks, the span begins at `first_block` (1,) int32, and du has an array of its own.
    """
    inputs, cotangents = span.inputs, g
    blocks = exponentials if isinstance(exponentials, Blocks) else None
    exponentials = exponentials.array if isinstance(exponentials, Blocks) else exponentials
    n, d = inputs.hidden.shape
    v, num_tiles = span.size if blocks else exponentials.shape[1], maximum.shape[0]
    tiles_of = config.mosaic_gpu_block_tiles if blocks else config.mosaic_gpu_logit_tiles
    columns = tiles_of(d, n, v).columns  # as E was written
    has_weights = inputs.class_weights is not None and options.logit.logit_sum
    row_vectors = [inputs.labels, lse, *[g for g in cotangents if g is not None]]
    column_vectors = [inputs.class_weights] if has_weights else []
    # Where E cannot be written to in place, du is a separate array.
    in_place = hopper.can_write_in_place(exponentials) and blocks is None
    numbers = () if first_block is None else (first_block,)
    source = numbers if in_place else (*numbers, exponentials)
    total = (n // 64) * num_tiles
    num_blocks, num_slots = min(hopper.NUM_CORES, hopper.cores_here(), cdiv(total, 3)), 2

    def body(*refs):
        vector_refs, vector_stages = refs[:num_vectors], refs[-num_vectors:]
        maximum_ref, *e_refs, e_stage, maximum_stage, filled, vectors_filled = refs[num_vectors:-num_vectors]
        first = e_refs.pop(0)[0] if numbers else 0
        e_ref, du_ref = e_refs[0], e_refs[-1]
        worker = jax.lax.axis_index("block") * 3 + jax.lax.axis_index("warpgroup")
        own = jax.lax.axis_index("warpgroup")
        count = jax.lax.div(total - 1 - worker, 3 * num_blocks) + 1

        def place(i):
            index = worker + i * 3 * num_blocks
            return jax.lax.rem(index, num_tiles), jax.lax.div(index, num_tiles) * 64

        def fetch(i):
            column_tile, row = place(i)
            slot = jax.lax.rem(i, num_slots)
            barrier = filled.at[own * num_slots + slot]
            place_of_e = row, column_tile * columns
            if blocks is not None:
                place_of_e = blocks.place(*place_of_e, first)
            source = e_ref.at[pl.ds(place_of_e[0], 64), pl.ds(place_of_e[1], columns)]
            plgpu.copy_gmem_to_smem(source, e_stage.at[own, slot], barrier)
            plgpu.copy_gmem_to_smem(maximum_ref.at[column_tile, pl.ds(row, 64)], maximum_stage.at[own, slot], barrier)

        def step(i, _):
            column_tile, row = place(i)
            slot = jax.lax.rem(i, num_slots)
            for k, (ref, stage) in enumerate(zip(vector_refs, vector_stages, strict=True)):
                index = pl.ds(row, 64) if k < len(row_vectors) else pl.ds(column_tile * columns, columns)
                plgpu.copy_gmem_to_smem(ref.at[index], stage.at[own], vectors_filled.at[own])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            pl.when(i + 1 < count)(lambda: fetch(i + 1))
            plgpu.barrier_wait(filled.at[own * num_slots + slot])
            plgpu.barrier_wait(vectors_filled.at[own])
            e = hopper.load(e_stage, (own, slot), hopper.tile_layout()).astype(jnp.float32)
            maximum = hopper.load(maximum_stage, (own, slot), hopper.row_layout())
            layouts = [hopper.row_layout()] * len(row_vectors) + [hopper.column_layout()] * len(column_vectors)
            vectors = [hopper.load(s, (own,), layout) for s, layout in zip(vector_stages, layouts, strict=True)]
            labels, lse, *g = vectors[: len(row_vectors)]
            weights = vectors[-1] if has_weights else None
            g = jax.tree.unflatten(jax.tree.structure(cotangents), g)
            tile = Tile(e, row, column_tile * columns, column_tile, own)
            du = _from_exponentials(tile, maximum, labels, lse, g, weights, options.logit, span.size)
            e_stage[own, slot] = du.astype(e_ref.dtype)
            plgpu.commit_smem()
            destination = du_ref.at[pl.ds(row, 64), pl.ds(column_tile * columns, columns)]
            plgpu.copy_smem_to_gmem(e_stage.at[own, slot], destination)

        pl.when(count > 0)(lambda: fetch(0))
        jax.lax.fori_loop(0, count, step, None)
        plgpu.wait_smem_to_gmem(0)

    num_vectors = len(row_vectors) + len(column_vectors)
    (du,) = hopper.launch(
        body, *row_vectors, *column_vectors, maximum, *source,
        num_blocks=num_blocks,
        in_place=[exponentials] if in_place else (),
        out_types=() if in_place else [out_like(exponentials, (n, v), exponentials.dtype)],
        scratch=[
            hopper.shared_tile((3, num_slots, 64, columns), exponentials.dtype),
            plgpu.SMEM((3, num_slots, 64), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=3 * num_slots),
            plgpu.Barrier(num_arrivals=num_vectors, num_barriers=3),
            *[plgpu.SMEM((3, 64), x.dtype) for x in row_vectors],
            *[plgpu.SMEM((3, columns), x.dtype) for x in column_vectors],
        ],
        name="fused_linear_cross_entropy_logit_gradients",
    )  # fmt: skip
    return du


def _from_exponentials(
    tile: Tile, maximum, labels, lse, g: Cotangents, class_weights, options: LogitOptions, vocab_size: int
):
    """du of a tile of E: p = E · exp(maximum − lse), and for the softcap z = maximum + log E."""
    e = tile.values
    probability = e * tile.over_rows(jnp.exp2((maximum - lse) * _LOG2_E))
    z = None if options.softcap is None else tile.over_rows(maximum) + jnp.log(jnp.maximum(e, _SMALLEST))
    du = _logit_gradient(tile, z, None, probability, labels, g, class_weights, options)
    # E is 0 for entries from `vocab_size` on, so most terms of du are 0 there. The term of the sum of logits is not,
    # unless class weights, which are 0 there, are its factor.
    if options.logit_sum and class_weights is None and vocab_size % 64:
        du = jnp.where(tile.column_indices() < vocab_size - tile.column, du, 0.0)
    return du
