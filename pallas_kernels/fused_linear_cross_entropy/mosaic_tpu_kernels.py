"""The TPU kernels of the fused linear cross-entropy.

Spills: only the float32 sums of a part of a tile's columns are left, 1 MiB, for which no core has registers
(benchmarks/results/tpu_schedule.md).
What belongs to a row is spread over 128 lanes once a row tile. To spread it for each part of the columns would keep the
unit that moves values between lanes busier than the matrix units where the width is small.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from liger_jax.pallas_kernels._tiles import (
    cdiv,
    next_power_of_2,
    out_like,
    round_up,
    tpu_interpreter,
    tpu_params,
    vmem_bytes,
    vmem_limit,
    with_absent,
)
from liger_jax.pallas_kernels.cross_entropy import formulas as row_formulas
from liger_jax.pallas_kernels.cross_entropy.formulas import Cotangents, Statistics
from liger_jax.pallas_kernels.fused_linear_cross_entropy import config, formulas
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import Inputs, LinearOptions

LANES = 128
PART = 256  # columns of a tile that are multiplied, and then folded, at a time
ROW_GROUP = 16  # rows whose values are kept in registers while the epilogue goes through their columns


def _parts(v_block_size: int, whole_d: bool) -> list[tuple[int, int]]:
    """First column and width of each part of a tile. A tile with a part of d is one part."""
    width = PART if whole_d else v_block_size
    return [(first, min(width, v_block_size - first)) for first in range(0, v_block_size, width)]


def _float32(ref, part):
    return None if ref is None else ref[:, part].astype(jnp.float32)


def _for_each_part(hidden_ref, weight_ref, x_ref, u_ref, *, d, options: LinearOptions, start_row_tile, epilogue):
    """Calls epilogue(first column, width) for each part of a tile, once u_ref holds the part's logits.

    Where a tile has all of d, no branch lies between products and epilogues. Then the compiler schedules one part's
    epilogue among the next part's products: 17.8 million cycles on v6e at (8192, 4096, 128256), and 18.0 in one part.
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
        for first, width in _parts(v_block_size, whole_d=True):
            u_ref[:, pl.ds(first, width)] = product(x, first, width)
            epilogue(first, width)
        return

    @pl.when(d_tile == 0)
    def _():
        u_ref[...] = jnp.zeros_like(u_ref)

    u_ref[...] += product(hidden_ref[...], 0, v_block_size)

    @pl.when(d_tile == pl.num_programs(2) - 1)
    def _():
        for first, width in _parts(v_block_size, whole_d=False):
            epilogue(first, width)


def _columns(v_block_size: int, first: int, width: int) -> jax.Array:
    """The indices of a part's columns, in pieces."""
    start = pl.program_id(1) * v_block_size + first
    return _pieces(start + jax.lax.broadcasted_iota(jnp.int32, (1, width), 1))


def _row_groups(n_block_size: int):
    return [pl.ds(start, min(ROW_GROUP, n_block_size - start)) for start in range(0, n_block_size, ROW_GROUP)]


def _pieces(x: jax.Array) -> jax.Array:
    """(m, v) → (v / 128, m, 128), whose sums over the first axis add up whole registers."""
    return jnp.stack([x[:, start : start + LANES] for start in range(0, x.shape[1], LANES)])


def _vector_pieces(ref, part):
    return None if ref is None else _pieces(_float32(ref, part))


def _write_pieces(ref, own, first: int, pieces: jax.Array) -> None:
    for i in range(pieces.shape[0]):
        ref[own, pl.ds(first + i * LANES, LANES)] = pieces[i].astype(ref.dtype)


# --- numbers of rows --------------------------------------------------------------------------------------------------


def _row_operand(labels: jax.Array, *fields: jax.Array) -> jax.Array:
    """All numbers of a row in one operand (N, k), because a row takes 512 bytes of HBM, for 1 lane or for 128."""
    return jnp.stack([labels, *(jax.lax.bitcast_convert_type(field, jnp.int32) for field in fields)], axis=1)


def _spread(rows_ref, spread_ref) -> None:
    """(n, k) → (k, n, 128)."""
    for i in range(spread_ref.shape[0]):
        spread_ref[i] = jnp.broadcast_to(rows_ref[:, i : i + 1], spread_ref.shape[1:])


def _read(spread_ref, own) -> tuple[jax.Array, ...]:
    """Labels, and the float32 fields, of a group of rows: each (1, n, 128)."""
    labels, *fields = [spread_ref[i, own, :][None] for i in range(spread_ref.shape[0])]
    return labels, *(pltpu.bitcast(field, jnp.float32) for field in fields)


def _spread_scratch(n_block_size: int, row_operand: jax.Array):
    return pltpu.VMEM((row_operand.shape[1], n_block_size, LANES), jnp.int32)


# --- statistics -------------------------------------------------------------------------------------------------------


def _maximum_lanes(v_block_size: int, whole_d: bool) -> int:
    """How many of 128 lanes a tile's maxima take, one for each of its parts. Several tiles share the 128."""
    return next_power_of_2(len(_parts(v_block_size, whole_d)))


def _maximum_lane(v_block_size: int, whole_d: bool, first: int) -> tuple[jax.Array, jax.Array]:
    """The lane of the maxima of the part that begins at column `first`, and the indices of all lanes."""
    index = [start for start, _ in _parts(v_block_size, whole_d)].index(first)
    lane = jax.lax.rem(pl.program_id(1) * _maximum_lanes(v_block_size, whole_d), LANES) + index
    return lane, jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)


def _statistics_kernel(hidden_ref, weight_ref, rows_ref, *refs, v, d, options, has, num_fields):
    bias_ref, class_weights_ref, e_ref, maxima_ref, *refs, spread_ref, x_ref, u_ref = with_absent(refs, has)
    out_refs, state_refs = refs[:num_fields], refs[num_fields:]
    n_block_size, v_block_size = u_ref.shape
    structure = jax.tree.structure(row_formulas.online_start(1, options.logit))

    def start_row_tile():
        _spread(rows_ref, spread_ref)
        for ref, field in zip(state_refs, jax.tree.leaves(row_formulas.online_start(1, options.logit)), strict=True):
            ref[...] = jnp.broadcast_to(field, ref.shape)

    def fold(first: int, width: int):
        part, columns = pl.ds(first, width), _columns(v_block_size, first, width)
        bias, class_weights = _vector_pieces(bias_ref, part), _vector_pieces(class_weights_ref, part)
        in_vocab = columns < v if v % v_block_size else None
        for own in _row_groups(n_block_size):
            u = _pieces(u_ref[own, part])
            z = row_formulas.transform(u if bias is None else u + bias, options.logit)
            state = row_formulas.online_update(
                jax.tree.unflatten(structure, [ref[own, :][None] for ref in state_refs]),
                z,
                columns,
                in_vocab,
                spread_ref[0, own, :],
                class_weights,
                axis=0,
                one_maximum=e_ref is not None,
            )
            for ref, field in zip(state_refs, jax.tree.leaves(state), strict=True):
                ref[own, :] = jnp.broadcast_to(field[0], (u.shape[1], LANES))
            if e_ref is not None:
                keep(own, first, z if in_vocab is None else jnp.where(in_vocab, z, -jnp.inf), state.maximum)

    def keep(own, first, z, maximum):
        shift = jnp.where(maximum == -jnp.inf, 0.0, maximum)
        _write_pieces(e_ref, own, first, jnp.exp(z - shift))
        lane, lanes = _maximum_lane(v_block_size, d == hidden_ref.shape[1], first)
        maxima_ref[own, :] = jnp.where(lanes == lane, shift[0], maxima_ref[own, :])

    _for_each_part(
        hidden_ref, weight_ref, x_ref, u_ref, d=d, options=options, start_row_tile=start_row_tile, epilogue=fold
    )
    last_step = [pl.program_id(axis) == pl.num_programs(axis) - 1 for axis in (1, 2)]

    @pl.when(last_step[0] & last_step[1])
    def _():
        state = row_formulas.over_lanes(jax.tree.unflatten(structure, [ref[...] for ref in state_refs]))
        for ref, field in zip(out_refs, jax.tree.leaves(state), strict=True):
            ref[...] = field


def _specs(tiles: config.TpuConfig, options: LinearOptions, row_width: int, num_vectors: int):
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


def _tile_spec(tiles: config.TpuConfig) -> pl.BlockSpec:
    """Blocks of an array (N, V), a row tile by a vocabulary tile."""
    return pl.BlockSpec(
        (tiles.n_block_size, tiles.v_block_size), lambda row_tile, vocab_tile, *_: (row_tile, vocab_tile)
    )


def _maxima_spec(tiles: config.TpuConfig, whole_d: bool) -> pl.BlockSpec:
    """Blocks of the rows' maxima in each part of the vocabulary; several vocabulary tiles share one."""
    tiles_in_block = LANES // _maximum_lanes(tiles.v_block_size, whole_d)
    return pl.BlockSpec(
        (tiles.n_block_size, LANES), lambda row_tile, vocab_tile, *_: (row_tile, vocab_tile // tiles_in_block)
    )


def _product_scratch(tiles: config.TpuConfig, d: int):
    """Scratch for a tile of hidden, where it is kept, and for the logits."""
    kept = [pltpu.VMEM((tiles.n_block_size // 2, d), jnp.uint32)] if tiles.keeps_hidden else []
    return [*kept, pltpu.VMEM((tiles.n_block_size, tiles.v_block_size), jnp.float32)]


def _tiles(inputs: Inputs, options: LinearOptions, keep: bool) -> config.TpuConfig:
    (n, d), v = inputs.hidden.shape, inputs.weight.shape[options.vocab_dim]
    num_fields = len(jax.tree.leaves(jax.eval_shape(lambda: row_formulas.online_start(1, options.logit))))
    return config.tpu_config(n, v, d, inputs.hidden.dtype.itemsize, vmem_bytes(), num_fields, keep)


def statistics(
    inputs: Inputs, *, options: LinearOptions, interpret: bool, keep: bool = False
) -> tuple[Statistics, jax.Array | None, jax.Array | None]:
    """The statistics of all rows, each (N,), and with `keep` E (N, V) and the rows' maxima that it is relative to.

    E = exp(z − maximum) has hidden's dtype. The maximum is that of the row's columns up to the end of a part of a tile,
    and of those in it: a lane of the maxima belongs to each part.
    """
    hidden, weight, labels, bias, class_weights = inputs
    (n, d), v = hidden.shape, weight.shape[options.vocab_dim]
    state = jax.eval_shape(lambda: row_formulas.online_start(n, options.logit))
    fields = jax.tree.leaves(state)
    tiles = _tiles(inputs, options, keep)
    whole_d = tiles.d_block_size == d
    vectors = [x[None, :] for x in (bias, class_weights) if x is not None]
    rows = _row_operand(labels)
    present = [bias is not None, class_weights is not None, keep, keep, *[True] * (2 * len(fields) + 1)]
    present += [tiles.keeps_hidden, True]
    row_spec = pl.BlockSpec((tiles.n_block_size, 1), lambda row_tile, *_: (row_tile, 0))
    num_maxima = round_up(cdiv(v, tiles.v_block_size) * _maximum_lanes(tiles.v_block_size, whole_d), LANES)
    kept = [out_like(hidden, (n, v), hidden.dtype), out_like(hidden, (n, num_maxima), jnp.float32)] if keep else []
    found = pl.pallas_call(
        functools.partial(_statistics_kernel, v=v, d=d, options=options, has=tuple(present), num_fields=len(fields)),
        grid=(cdiv(n, tiles.n_block_size), cdiv(v, tiles.v_block_size), cdiv(d, tiles.d_block_size)),
        in_specs=_specs(tiles, options, row_width=1, num_vectors=len(vectors)),
        out_specs=([_tile_spec(tiles), _maxima_spec(tiles, whole_d)] if keep else []) + [row_spec] * len(fields),
        out_shape=kept + [out_like(hidden, s.shape, s.dtype) for s in fields],
        scratch_shapes=[
            *(pltpu.VMEM((tiles.n_block_size, LANES), s.dtype) for s in fields),
            _spread_scratch(tiles.n_block_size, rows),
            *_product_scratch(tiles, d),
        ],
        compiler_params=_params(interpret),
        interpret=tpu_interpreter(interpret),
        name="fused_linear_cross_entropy_statistics",
    )(hidden, weight.astype(hidden.dtype), rows, *vectors)
    parts = [part.reshape(1, n) for part in found[len(kept) :]]
    merged = row_formulas.online_merge(jax.tree.unflatten(jax.tree.structure(state), parts), options.logit)
    exponentials, maxima = found[: len(kept)] or (None, None)
    return merged, exponentials, maxima


def _params(interpret: bool) -> pltpu.CompilerParams:
    return tpu_params(interpret, "parallel", "arbitrary", "arbitrary", vmem_limit_bytes=vmem_limit(vmem_bytes()))


# --- gradients by the logits ------------------------------------------------------------------------------------------


def _logit_gradients_kernel(_, hidden_ref, weight_ref, rows_ref, *refs, d, options, has, wanted):
    bias_ref, class_weights_ref, du_ref, spread_ref, x_ref, u_ref = with_absent(refs, has)
    n_block_size, v_block_size = u_ref.shape

    def write(first: int, width: int):
        part, columns = pl.ds(first, width), _columns(v_block_size, first, width)
        bias, class_weights = _vector_pieces(bias_ref, part), _vector_pieces(class_weights_ref, part)
        for own in _row_groups(n_block_size):
            u = _pieces(u_ref[own, part])
            labels, lse, *g = _read(spread_ref, own)
            du = row_formulas.logit_gradient(
                jnp.where(lse < jnp.inf, u if bias is None else u + bias, 0.0),
                columns,
                labels,
                lse,
                jax.tree.unflatten(wanted, g),
                class_weights,
                options.logit,
            )
            _write_pieces(du_ref, own, first, du)

    start_row_tile = functools.partial(_spread, rows_ref, spread_ref)
    _for_each_part(
        hidden_ref, weight_ref, x_ref, u_ref, d=d, options=options, start_row_tile=start_row_tile, epilogue=write
    )


def logit_gradients(
    inputs: Inputs,
    log_normalizer: jax.Array,
    cotangents: Cotangents,
    start: jax.Array | int,
    size: int,
    *,
    options: LinearOptions,
    interpret: bool,
) -> jax.Array:
    """du (N, size) in hidden's dtype for the vocabulary entries from `start` on, a multiple of the plan's slice.

    Rows on whose loss nothing depends are zeros, whatever hidden holds there. The kernel reads its slice of the weight
    in its place, where slices begin at whole tiles.
    """
    hidden, weight, labels, bias, class_weights = inputs
    n, d = hidden.shape
    tiles = config.tpu_config(n, size, d, hidden.dtype.itemsize, vmem_bytes())
    labels, first_tile = labels - start, jnp.full((1,), start // tiles.v_block_size, jnp.int32)
    if options.chunk_size % tiles.v_block_size and size < weight.shape[options.vocab_dim]:
        weight, first_tile = formulas.take(weight, start, size, options.vocab_dim), jnp.zeros_like(first_tile)
    present = [bias is not None, class_weights is not None, True, True, tiles.keeps_hidden, True]
    # An infinite lse marks a row on which nothing depends. The kernel finds it by one comparison; on v6e it would take
    # 21 % longer to look at the cotangents. No other row has an infinite lse: an infinite logit makes it NaN.
    lse = jnp.where(row_formulas.is_live(cotangents), log_normalizer, jnp.inf)
    rows = _row_operand(labels, lse, *(g for g in cotangents if g is not None))
    vectors = [formulas.take(x[None, :], start, size, 1) for x in (bias, class_weights) if x is not None]
    return pl.pallas_call(
        functools.partial(
            _logit_gradients_kernel, d=d, options=options, has=tuple(present), wanted=jax.tree.structure(cotangents)
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(cdiv(n, tiles.n_block_size), cdiv(size, tiles.v_block_size), cdiv(d, tiles.d_block_size)),
            in_specs=_specs(tiles, options, row_width=rows.shape[1], num_vectors=len(vectors)),
            out_specs=_tile_spec(tiles),
            scratch_shapes=[_spread_scratch(tiles.n_block_size, rows), *_product_scratch(tiles, d)],
        ),
        out_shape=out_like(hidden, (n, size), hidden.dtype),
        compiler_params=_params(interpret),
        interpret=tpu_interpreter(interpret),
        name="fused_linear_cross_entropy_logit_gradients",
    )(first_tile, hidden, weight, rows, *vectors)


def _make_logit_gradients_kernel(e_ref, maxima_ref, rows_ref, *refs, options, has, wanted, whole_d):
    class_weights_ref, du_ref, spread_ref = with_absent(refs, has)
    n_block_size, v_block_size = e_ref.shape

    pl.when(pl.program_id(1) == 0)(functools.partial(_spread, rows_ref, spread_ref))

    for first, width in _parts(v_block_size, whole_d):
        part, columns = pl.ds(first, width), _columns(v_block_size, first, width)
        class_weights = _vector_pieces(class_weights_ref, part)
        lane, lanes = _maximum_lane(v_block_size, whole_d, first)
        for own in _row_groups(n_block_size):
            labels, lse, *g = _read(spread_ref, own)
            e = _pieces(e_ref[own, part]).astype(jnp.float32)
            maximum = jnp.max(jnp.where(lanes == lane, maxima_ref[own, :], -jnp.inf), axis=1, keepdims=True)[None]
            p, log_e = e * jnp.exp(maximum - lse), None
            if options.softcap is not None or options.entropy:
                log_e = jnp.log(jnp.maximum(e, jnp.finfo(jnp.float32).tiny))
            du = row_formulas.scaled_logit_gradient(
                p,
                None if log_e is None else log_e + (maximum - lse),
                columns,
                labels,
                jax.tree.unflatten(wanted, g),
                class_weights,
            )
            du *= row_formulas.slope_of_logit(None if log_e is None else log_e + maximum, options)
            _write_pieces(du_ref, own, first, du)


def make_logit_gradients(
    exponentials: jax.Array,
    maxima: jax.Array,
    inputs: Inputs,
    log_normalizer: jax.Array,
    cotangents: Cotangents,
    *,
    options: LinearOptions,
    interpret: bool,
) -> jax.Array:
    """Writes du (N, V) where E is: p = E · exp(maximum − lse), and for the softcap z = maximum + log E."""
    hidden, class_weights = inputs.hidden, inputs.class_weights if options.logit.logit_sum else None
    (n, v), tiles = exponentials.shape, _tiles(inputs, options, keep=True)
    whole_d = tiles.d_block_size == hidden.shape[1]
    rows = _row_operand(inputs.labels, log_normalizer, *(g for g in cotangents if g is not None))
    _, _, row_spec, *vector_specs = _specs(tiles, options, rows.shape[1], int(class_weights is not None))
    return pl.pallas_call(
        functools.partial(
            _make_logit_gradients_kernel,
            options=options.logit,
            has=(class_weights is not None, True, True),
            wanted=jax.tree.structure(cotangents),
            whole_d=whole_d,
        ),
        grid=(cdiv(n, tiles.n_block_size), cdiv(v, tiles.v_block_size), 1),
        in_specs=[_tile_spec(tiles), _maxima_spec(tiles, whole_d), row_spec, *vector_specs],
        out_specs=_tile_spec(tiles),
        out_shape=out_like(hidden, (n, v), hidden.dtype),
        scratch_shapes=[_spread_scratch(tiles.n_block_size, rows)],
        # JAX's interpreter returns an array that is written in place with whole tiles.
        input_output_aliases={} if interpret else {0: 0},
        compiler_params=_params(interpret),
        interpret=tpu_interpreter(interpret),
        name="fused_linear_cross_entropy_logit_gradients",
    )(exponentials, maxima, rows, *([] if class_weights is None else [class_weights[None, :]]))


def empty(like: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike, interpret: bool) -> jax.Array:
    """An array to be filled, which takes no pass over memory as zeros would."""
    return pl.pallas_call(
        lambda _: None,
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=out_like(like, shape, dtype),
        interpret=tpu_interpreter(interpret),
        name="empty",
    )()
