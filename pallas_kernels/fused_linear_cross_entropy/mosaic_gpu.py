"""Fused linear cross-entropy in Pallas Mosaic GPU (Hopper): products at the matrix units' speed, with our epilogues.

Statistics: each tile of logits is folded, in the registers that hold it, into one number a row; XLA merges them.
lean: slice by slice of the vocabulary the same product, with the softmax's gradient as its epilogue, writes du; two
more products add du · W to dX and write duᵀ · X to its place in dW.
fast: the product also keeps E = exp(z − the tile's maximum), from which one pass in place makes du; dW is one product
where one chunk holds all tokens, else summed over chunks in float32, or for a 16-bit weight as two halves.
Memory passes: fast writes E, reads and writes it once more as du, and reads du twice.
Rounding: statistics and losses come from the float32 accumulators. E is relative to its tile's maximum, so that
rounding it costs 2^-9 of a probability, where a rounded logit z costs |z| · 2^-9; du is rounded once more.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from liger_jax.pallas_kernels import _hopper
from liger_jax.pallas_kernels._hopper import ROWS, Tile
from liger_jax.pallas_kernels._tiles import cdiv, full_like, out_like, round_up
from liger_jax.pallas_kernels.cross_entropy import xla as rows
from liger_jax.pallas_kernels.cross_entropy.config import LogitOptions
from liger_jax.pallas_kernels.cross_entropy.xla import Coefficients, Cotangents, OnlineState, Statistics
from liger_jax.pallas_kernels.fused_linear_cross_entropy import config, xla
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import Gradients, Inputs, LinearOptions, Needs, Typed

_LOG2_E = math.log2(math.e)
_NO_COLUMN = 2**30
_SMALLEST = 2.0**-126  # normal number in bfloat16
_WIDEST_SOFTCAP = 40.0  # |z| up to it: exp(z − max) stays a normal number, from which z can be had back


def unsupported(hidden: Typed, weight: Typed, *others: jax.Array | None, options: LinearOptions) -> str | None:
    """16-bit operands, in sizes that the copy engine moves in tiles."""
    d, v = hidden.shape[-1], weight.shape[options.vocab_dim]
    if hidden.dtype not in (jnp.bfloat16, jnp.float16):
        return f"Hopper's matrix units take bfloat16 and float16, and hidden is {hidden.dtype}; use 'xla'."
    if d % 64:
        return f"the copy engine moves rows of 64, and D={d} is no multiple of it; use 'xla' or 'triton'."
    multiple = 64 if options.mode != "lean" or options.vocab_dim == 1 else 8
    if v % multiple:
        return (
            f"V={v} must be a multiple of {multiple} with mode={options.mode!r} and "
            f"weight_layout={options.weight_layout!r}; pad the vocabulary, or use 'xla'."
        )
    softcap = (options.logit.softcap or 0.0) * abs(options.logit.scale)
    if options.mode != "lean" and softcap > _WIDEST_SOFTCAP:
        return (
            f"logit_scale · logit_softcap = {softcap} is above {_WIDEST_SOFTCAP}, where capped logits cannot be had "
            "back from what mode='fast' keeps; use mode='lean', or 'xla'."
        )
    return None


def _padded(inputs: Inputs, *vectors: Any) -> Any:
    """Whole tiles of rows: what is added has no label, and zeros everywhere else."""
    n = inputs.hidden.shape[0]
    extra = round_up(n, ROWS) - n
    inputs = inputs._replace(weight=inputs.weight.astype(inputs.hidden.dtype))
    if extra:
        hidden = jnp.pad(inputs.hidden, ((0, extra), (0, 0)))
        labels = jnp.pad(inputs.labels, (0, extra), constant_values=rows.NO_LABEL)
        inputs = inputs._replace(hidden=hidden, labels=labels)
        vectors = jax.tree.map(lambda x: jnp.pad(x, (0, extra)), vectors)
    return inputs, *vectors


def _transform(u: jax.Array, options: LogitOptions) -> jax.Array:
    """`rows.transform`, with a tanh that is exact here."""
    if options.softcap is not None:
        u = options.softcap * _hopper.tanh(u / options.softcap)
    return u if options.scale == 1.0 else options.scale * u


def _slope(z: jax.Array | None, options: LogitOptions) -> jax.Array | float:
    """dz/du = scale · (1 − (z / (scale · softcap))²), from the capped logit."""
    if options.softcap is None:
        return options.scale
    return options.scale * (1.0 - jnp.square(z / (options.scale * options.softcap)))


def _logits(tile: Tile, has_bias: bool, options: LogitOptions) -> jax.Array:
    u = tile.values
    return _transform(u + tile.over_columns(tile.column_vectors[0]) if has_bias else u, options)


def _logit_gradient(tile: Tile, z, probability, cotangents, class_weights, options: LogitOptions):
    """du = (g_lse · p + g_target · 1[v = y] + g_sum · c_v) · dz/du"""
    labels, g_lse, g_target, *g_sum = cotangents
    du = tile.over_rows(g_lse) * probability
    du += jnp.where(tile.column_indices() == tile.over_rows(labels - tile.column), tile.over_rows(g_target), 0.0)
    if g_sum:
        g_sum = tile.over_rows(g_sum[0])
        du += g_sum if class_weights is None else g_sum * tile.over_columns(class_weights)
    slope = _slope(z, options)
    return du if isinstance(slope, float) and slope == 1.0 else du * slope


# --- statistics -------------------------------------------------------------------------------------------------------


def _partial_statistics(inputs: Inputs, options: LinearOptions, keep: bool) -> tuple[OnlineState, jax.Array | None]:
    """Of each tile of the vocabulary, (tiles, N); with `keep` also E (N, V), relative to its tile's maximum.

    Where nobody asks for the maximum, a tile's log-sum-exp stands for both maximum and sum: two float32 a row and tile.
    """
    (n, d), v = inputs.hidden.shape, inputs.weight.shape[options.vocab_dim]
    tiles = config.mosaic_gpu_tiles(d, n, v)
    has_bias, has_weights = inputs.bias is not None, inputs.class_weights is not None and options.logit.logit_sum
    wants_maximum = keep or options.logit.metrics
    dtypes = [jnp.float32] * (2 + wants_maximum + options.logit.logit_sum) + [jnp.int32] * options.logit.metrics

    def epilogue(tile: Tile, refs, scratch):
        (labels,) = tile.row_vectors
        z = _logits(tile, has_bias, options.logit)
        columns = tile.column_indices()
        in_vocab = columns < v - tile.column
        masked = jnp.where(in_vocab, z, -jnp.inf) if v % tiles.columns else z
        maximum = jnp.max(masked, axis=1)
        # exp(−inf − (−inf)) would be NaN; with log2 e multiplied in, z costs one fused operation.
        shift = tile.over_rows(jnp.where(maximum == -jnp.inf, 0.0, maximum * _LOG2_E))
        exponentials = jnp.exp2(masked * _LOG2_E - shift)
        exp_sum = jnp.sum(exponentials, axis=1)
        is_target = columns == tile.over_rows(labels - tile.column)
        fields = [maximum, exp_sum] if wants_maximum else [maximum + jnp.log(exp_sum)]
        fields.append(jnp.sum(jnp.where(is_target, z, 0.0), axis=1))
        if options.logit.logit_sum:
            weighted = z * tile.over_columns(tile.column_vectors[-1]) if has_weights else z
            fields.append(jnp.sum(jnp.where(in_vocab, weighted, 0.0), axis=1))
        if options.logit.metrics:
            at_maximum = jnp.where(masked == tile.over_rows(maximum), columns, _NO_COLUMN)
            fields.append(jnp.min(at_maximum, axis=1) + tile.column)
        _hopper.store_rows(tile, fields, scratch[: len(fields)], refs[: len(fields)])
        if keep:
            _hopper.store_tile(tile, exponentials, scratch[-1], refs[-1], tile.row, tile.column)

    out_types = [out_like(inputs.hidden, (cdiv(v, tiles.columns), n), dtype) for dtype in dtypes]
    scratch = [_hopper.row_staging(tiles, dtype) for dtype in dtypes]
    if keep:
        out_types.append(out_like(inputs.hidden, (n, v), inputs.hidden.dtype))
        scratch.append(_hopper.staging(inputs.hidden.dtype))
    fields = _hopper.product(
        inputs.hidden,
        inputs.weight,
        (1, 1 - options.vocab_dim),
        tiles,
        epilogue,
        name="fused_linear_cross_entropy_statistics",
        out_types=out_types,
        scratch=scratch,
        row_vectors=[inputs.labels],
        column_vectors=_column_vectors(inputs, has_weights),
    )
    exponentials = fields.pop() if keep else None
    maximum = fields.pop(0)
    exp_sum = fields.pop(0) if wants_maximum else jnp.ones_like(maximum)
    target = fields.pop(0)
    logit_sum = fields.pop(0) if options.logit.logit_sum else None
    predicted = fields.pop(0) if options.logit.metrics else None
    return OnlineState(maximum, exp_sum, target, logit_sum, predicted), exponentials


def _column_vectors(inputs: Inputs, with_class_weights: bool) -> list[jax.Array]:
    vectors = [inputs.bias] + [inputs.class_weights] * with_class_weights
    return [x.astype(jnp.float32) for x in vectors if x is not None]


def statistics(inputs: Inputs, *, options: LinearOptions) -> Statistics:
    """See `Inputs` → Statistics of (N,)."""
    n = inputs.hidden.shape[0]
    (inputs,) = _padded(inputs)
    parts, _ = _partial_statistics(inputs, options, keep=False)
    return jax.tree.map(lambda x: x[:n], rows.online_merge(parts, options.logit))


# --- products ---------------------------------------------------------------------------------------------------------


def _logit_gradients(inputs: Inputs, lse, cotangents: Cotangents, start, size: int, options: LinearOptions):
    """du (N, size) for the vocabulary from `start` on; the columns are rounded up to whole pieces."""
    (n, d), v = inputs.hidden.shape, inputs.weight.shape[options.vocab_dim]
    has_bias, has_weights = inputs.bias is not None, inputs.class_weights is not None and options.logit.logit_sum

    def epilogue(tile: Tile, refs, scratch):
        labels, lse, *g = tile.row_vectors
        tile = tile._replace(column=tile.column + tile.start)
        z = _logits(tile, has_bias, options.logit)
        probability = jnp.exp2(z * _LOG2_E - tile.over_rows(lse * _LOG2_E))
        weights = tile.column_vectors[-1] if has_weights else None
        du = _logit_gradient(tile, z, probability, (labels, *g), weights, options.logit)
        if v % 64:  # the last piece reaches past the vocabulary, where weights are zeros, and probabilities are not
            du = jnp.where(tile.column_indices() < v - tile.column, du, 0.0)
        _hopper.store_tile(tile, du, scratch[0], refs[0], tile.row, tile.column - tile.start)

    (du,) = _hopper.product(
        inputs.hidden,
        inputs.weight,
        (1, 1 - options.vocab_dim),
        config.mosaic_gpu_tiles(d, n, size),
        epilogue,
        name="fused_linear_cross_entropy_logit_gradients",
        out_types=[out_like(inputs.hidden, (n, round_up(size, 64)), inputs.hidden.dtype)],
        scratch=[_hopper.staging(inputs.hidden.dtype)],
        row_vectors=[inputs.labels, lse, *[g for g in cotangents if g is not None]],
        column_vectors=_column_vectors(inputs, has_weights),
        start=start,
        num_columns=size,
    )
    return du


def _add_product(total: jax.Array, du: jax.Array, inputs: Inputs, start: jax.Array, options: LinearOptions):
    """total (N, D) + du · (the weight from `start` on), float32, in place."""

    def epilogue(tile: Tile, refs, scratch):
        _hopper.store_tile(tile, tile.values, scratch[0], refs[0], tile.row, tile.column, add=True)

    (total,) = _hopper.product(
        du,
        inputs.weight,
        (1, options.vocab_dim),
        config.mosaic_gpu_tiles(du.shape[1], *total.shape),
        epilogue,
        name="fused_linear_cross_entropy_hidden_gradient",
        in_place=[total],
        scratch=[_hopper.staging(jnp.float32)],
        start=start,
        start_of="depth",
    )
    return total


def _put_product(whole: jax.Array, du: jax.Array, hidden: jax.Array, start: jax.Array, options: LinearOptions):
    """Writes duᵀ · X to its place in dW, from the vocabulary's `start` on, in place."""

    def epilogue(tile: Tile, refs, scratch):
        row, column = tile.row, tile.column
        row, column = (row + tile.start, column) if options.vocab_dim == 0 else (row, column + tile.start)
        _hopper.store_tile(tile, tile.values, scratch[0], refs[0], row, column)

    operands = (du, hidden) if options.vocab_dim == 0 else (hidden, du)
    (whole,) = _hopper.product(
        *operands,
        (0, 0),
        config.mosaic_gpu_tiles(du.shape[0], *(x.shape[1] for x in operands)),
        epilogue,
        name="fused_linear_cross_entropy_weight_gradient",
        in_place=[whole],
        scratch=[_hopper.staging(whole.dtype)],
        start=start,
        start_of="output",
    )
    return whole


def _add_to_halves(high, low, du: jax.Array, hidden: jax.Array, is_first: jax.Array, options: LinearOptions):
    """high + low += duᵀ · X, in place: two 16-bit numbers hold as many digits as float32 is asked for here.

    high is the sum as the weight's dtype holds it, low what that leaves out: together 2^-17 of the sum. The first
    time (is_first (1,) int32 is not 0) both count as zeros, and are not read.
    """
    dtype, num_slots = high.dtype, 4
    tiles = config.mosaic_gpu_sum_tiles()
    todo = _hopper.pieces((tiles.rows, tiles.columns))

    def copy(tile: Tile, refs, scratch, i, *, out: bool):
        stage, arrived = scratch
        slot = (tile.warpgroup, i % num_slots)
        for half, ref in enumerate(refs):
            there, here = _hopper.at(ref, tile.row, tile.column, todo[i]), stage.at[(*slot, half)]
            if out:
                plgpu.copy_smem_to_gmem(here, there)
            else:
                plgpu.copy_gmem_to_smem(there, here, arrived.at[tile.warpgroup * num_slots + i % num_slots])

    def prologue(tile: Tile, refs, scratch):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(tile.start == 0)
        def _():
            for i in range(num_slots):  # they arrive during the product
                copy(tile, refs, scratch, i, out=False)

    def epilogue(tile: Tile, refs, scratch):
        stage, arrived = scratch
        is_first = tile.start != 0
        for i, piece in enumerate(todo):
            slot = (tile.warpgroup, i % num_slots)
            barrier = arrived.at[tile.warpgroup * num_slots + i % num_slots]
            pl.when(~is_first)(lambda barrier=barrier: plgpu.barrier_wait(barrier))
            old = [_hopper.load(stage, (*slot, half), _hopper.LAYOUT).astype(jnp.float32) for half in (0, 1)]
            zeros = jnp.zeros_like(old[0])
            total = tile.values[piece] + jax.lax.select(
                jax.lax.broadcast(is_first, zeros.shape), zeros, old[0] + old[1]
            )
            new_high = total.astype(dtype)
            stage[(*slot, 0)] = new_high
            stage[(*slot, 1)] = (total - new_high.astype(jnp.float32)).astype(dtype)
            plgpu.commit_smem()
            copy(tile, refs, scratch, i, out=True)
            if 0 < i <= len(todo) - num_slots:  # the last piece's slot, once it has left
                plgpu.wait_smem_to_gmem(2, wait_read_only=True)
                pl.when(~is_first)(lambda i=i: copy(tile, refs, scratch, i - 1 + num_slots, out=False))

    operands = (du, hidden) if options.vocab_dim == 0 else (hidden, du)
    return tuple(
        _hopper.product(
            *operands,
            (0, 0),
            tiles,
            epilogue,
            prologue=prologue,
            name="fused_linear_cross_entropy_weight_gradient",
            in_place=[high, low],
            scratch=[
                _hopper.shared_tile((2, num_slots, 2, 64, _hopper.PIECE_COLUMNS), dtype),
                plgpu.Barrier(num_arrivals=2, num_barriers=2 * num_slots),
            ],
            start=is_first,
            start_of="flag",
        )
    )


# --- lean -------------------------------------------------------------------------------------------------------------


def gradients(
    inputs: Inputs, log_normalizer: jax.Array, cotangents: Cotangents, *, options: LinearOptions, needs: Needs
) -> Gradients:
    """Slice by slice of the vocabulary, du, then dX += du · W and dW = duᵀ · X."""
    in_place = _hopper.can_write_in_place(inputs.hidden)
    n, v = inputs.hidden.shape[0], inputs.weight.shape[options.vocab_dim]
    dtypes = Gradients(inputs.hidden.dtype, inputs.weight.dtype, inputs.bias.dtype if needs.bias else None)
    inputs, lse, cotangents = _padded(inputs, log_normalizer, cotangents)

    def body(grads, start, size):
        dhidden, dweight, dbias = grads
        start = jnp.asarray(start, jnp.int32)[None]
        du = _logit_gradients(inputs, lse, cotangents, start, size, options)
        if not in_place:
            du = du[:, :size]
        if needs.hidden and _hopper.can_add_in_place(inputs.hidden):
            dhidden = _add_product(dhidden, du, inputs, start, options)
        elif needs.hidden:
            part = xla.take(inputs.weight, start[0], size, options.vocab_dim)
            dhidden += xla.product(du[:, :size], part, 1, options.vocab_dim, options)
        if needs.weight and in_place:
            dweight = _put_product(dweight, du, inputs.hidden, start, options)
        elif needs.weight:
            part = xla.weight_gradient(du, inputs.hidden, options)
            dweight = xla.put(dweight, part, start[0], options.vocab_dim)
        if needs.bias:
            dbias = xla.put(dbias, jnp.sum(du[:, :size].astype(jnp.float32), axis=0), start[0])
        return Gradients(dhidden, dweight, dbias)

    zeros_of = lambda need, shape, dtype: full_like(inputs.hidden, shape, 0, dtype) if need else None
    zeros = Gradients(
        zeros_of(needs.hidden, inputs.hidden.shape, jnp.float32),
        zeros_of(needs.weight, inputs.weight.shape, dtypes.weight),
        zeros_of(needs.bias, (v,), dtypes.bias),
    )
    if needs.weight and in_place:
        zeros = zeros._replace(weight=_hopper.empty(inputs.hidden, inputs.weight.shape, dtypes.weight))
    # Slices begin at whole tiles.
    grads = xla.over_slices(v, min(round_up(options.chunk_size, 2 * ROWS), v), body, zeros)
    return grads._replace(hidden=grads.hidden[:n].astype(dtypes.hidden) if needs.hidden else None)


# --- fast -------------------------------------------------------------------------------------------------------------


def _make_logit_gradients(exponentials, maximum, inputs: Inputs, lse, cotangents: Cotangents, options: LinearOptions):
    """du from E (N, V), in its place: p = E · exp(maximum − lse), and for the softcap z = maximum + log E.

    The maximum is that of a row's part in a tile of the vocabulary, (tiles, N).
    """
    (n, v), num_tiles = exponentials.shape, maximum.shape[0]
    columns = config.mosaic_gpu_tiles(inputs.hidden.shape[1], n, v).columns
    has_weights = inputs.class_weights is not None and options.logit.logit_sum
    row_vectors = [inputs.labels, lse, *[g for g in cotangents if g is not None]]
    column_vectors = [inputs.class_weights] if has_weights else []
    # Where E cannot be written to in place, du is an array of its own.
    in_place = _hopper.can_write_in_place(exponentials)
    source = () if in_place else (exponentials,)
    total = (n // 64) * num_tiles
    num_blocks, num_slots = min(_hopper.NUM_CORES, cdiv(total, 3)), 2

    def body(*refs):
        vector_refs, vector_stages = refs[:num_vectors], refs[-num_vectors:]
        maximum_ref, *e_refs, e_stage, maximum_stage, filled, vectors_filled = refs[num_vectors:-num_vectors]
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
            source = e_ref.at[pl.ds(row, 64), pl.ds(column_tile * columns, columns)]
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
            e = _hopper.load(e_stage, (own, slot), _hopper.LAYOUT).astype(jnp.float32)
            maximum = _hopper.load(maximum_stage, (own, slot), _hopper.ROW_LAYOUT)
            layouts = [_hopper.ROW_LAYOUT] * len(row_vectors) + [_hopper.COLUMN_LAYOUT] * len(column_vectors)
            vectors = [_hopper.load(s, (own,), layout) for s, layout in zip(vector_stages, layouts, strict=True)]
            labels, lse, *g = vectors[: len(row_vectors)]
            weights = vectors[-1] if has_weights else None
            tile = Tile(e, row, column_tile * columns, column_tile, own, [], [], 0)
            probability = e * tile.over_rows(jnp.exp2((maximum - lse) * _LOG2_E))
            z = None
            if options.logit.softcap is not None:
                z = tile.over_rows(maximum) + jnp.log(jnp.maximum(e, _SMALLEST))
            du = _logit_gradient(tile, z, probability, (labels, *g), weights, options.logit)
            e_stage[own, slot] = du.astype(e_ref.dtype)
            plgpu.commit_smem()
            destination = du_ref.at[pl.ds(row, 64), pl.ds(column_tile * columns, columns)]
            plgpu.copy_smem_to_gmem(e_stage.at[own, slot], destination)

        pl.when(count > 0)(lambda: fetch(0))
        jax.lax.fori_loop(0, count, step, None)
        plgpu.wait_smem_to_gmem(0)

    num_vectors = len(row_vectors) + len(column_vectors)
    (du,) = _hopper.launch(
        body, *row_vectors, *column_vectors, maximum, *source,
        num_blocks=num_blocks,
        in_place=[exponentials] if in_place else (),
        out_types=() if in_place else [out_like(exponentials, exponentials.shape, exponentials.dtype)],
        scratch=[
            _hopper.shared_tile((3, num_slots, 64, columns), exponentials.dtype),
            plgpu.SMEM((3, num_slots, 64), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=3 * num_slots),
            plgpu.Barrier(num_arrivals=num_vectors, num_barriers=3),
            *[plgpu.SMEM((3, 64), x.dtype) for x in row_vectors],
            *[plgpu.SMEM((3, columns), x.dtype) for x in column_vectors],
        ],
        name="fused_linear_cross_entropy_logit_gradients",
    )  # fmt: skip
    return du


def gradients_in_forward(
    inputs: Inputs, coefficients: Coefficients, class_weight_sum: jax.Array, *, options: LinearOptions, needs: Needs
) -> tuple[Statistics, Gradients]:
    """Chunk by chunk of tokens: E and statistics, du in its place, dX = du · W, and dW (+)= duᵀ · X."""
    n, v = inputs.hidden.shape[0], inputs.weight.shape[options.vocab_dim]
    dtypes = Gradients(inputs.hidden.dtype, inputs.weight.dtype, inputs.bias.dtype if needs.bias else None)
    inputs, coefficients = _padded(inputs, coefficients)
    padded = inputs.hidden.shape[0]
    chunk_size = min(round_up(options.chunk_size, ROWS), padded)
    one_chunk = chunk_size == padded
    in_halves = (
        needs.weight and not one_chunk and dtypes.weight.itemsize == 2 and _hopper.can_write_in_place(inputs.hidden)
    )

    def body(carry, start, own):
        stats, (dhidden, dweight, dbias) = carry
        part, chunk_coefficients = xla.take_tokens(inputs, coefficients, start, chunk_size, own)
        parts, exponentials = _partial_statistics(part, options, keep=True)
        chunk_stats = rows.online_merge(parts, options.logit)
        lse = chunk_stats.log_normalizer
        cotangents = rows.row_cotangents(lse, chunk_coefficients, class_weight_sum)
        du = _make_logit_gradients(exponentials, parts.maximum, part, lse, cotangents, options)
        if needs.hidden:
            part_gradient = xla.product(du, inputs.weight, 1, options.vocab_dim, options, dtypes.hidden)
            dhidden = xla.put(dhidden, part_gradient, start)
        if needs.weight and in_halves:
            dweight = _add_to_halves(*dweight, du, part.hidden, jnp.asarray(start == 0, jnp.int32)[None], options)
        elif needs.weight and one_chunk:
            dweight = xla.weight_gradient(du, part.hidden, options, dtypes.weight)
        elif needs.weight:
            dweight += xla.weight_gradient(du, part.hidden, options)
        if needs.bias:
            dbias += jnp.sum(du.astype(jnp.float32), axis=0)
        stats = jax.tree.map(lambda whole, part: xla.put(whole, part, start), stats, chunk_stats)
        return stats, Gradients(dhidden, dweight, dbias)

    zeros_of = lambda need, shape, dtype: full_like(inputs.hidden, shape, 0, dtype) if need else None
    accumulator = dtypes.weight if one_chunk or in_halves else jnp.float32
    accumulators = zeros_of(needs.weight, inputs.weight.shape, accumulator)
    if in_halves:
        accumulators = tuple(_hopper.empty(inputs.hidden, inputs.weight.shape, accumulator) for _ in range(2))
    kinds = Statistics(jnp.float32, jnp.float32, jnp.float32, jnp.float32, jnp.int32)
    wanted = Statistics(True, True, options.logit.logit_sum, options.logit.metrics, options.logit.metrics)
    zeros = Statistics(*(zeros_of(want, (padded,), kind) for want, kind in zip(wanted, kinds, strict=True)))
    start_carry = (
        zeros,
        Gradients(
            zeros_of(needs.hidden, inputs.hidden.shape, dtypes.hidden),
            accumulators,
            zeros_of(needs.bias, (v,), jnp.float32),
        ),
    )
    stats, grads = xla.over_tokens(padded, chunk_size, body, start_carry)
    return jax.tree.map(lambda x: x[:n], stats), Gradients(
        grads.hidden[:n] if needs.hidden else None,
        grads.weight[0] if in_halves else grads.weight.astype(dtypes.weight) if needs.weight else None,
        grads.bias.astype(dtypes.bias) if needs.bias else None,
    )
