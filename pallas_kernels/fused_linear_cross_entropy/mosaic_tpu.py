"""Fused linear cross-entropy in Pallas for TPU.

Statistics: the float32 tile of logits is the accumulator of its product over d, and stays in VMEM. An online
log-sum-exp folds it into one number for each row and lane. Lanes are summed once, at the end of a row tile.
Gradients: the same product is made for a slice of the vocabulary, with the softmax's gradient as its epilogue. So only
du (N, slice) is written. The two products with du are XLA's, which schedules them better than a kernel that would keep
rewriting dX and dW. There is no fast mode.
Memory: on tpu7x the compiler by default copies 16-bit arrays that a loop reads or writes, the weight and dW too, into
tiles of 16 rows; with its option xla_tpu_control_large_2nd_minor_layout_for_x16=false it does not: 176 MiB instead of
1,327 at (8192, 4096, 128256).
Spills: only the float32 sums of a part of a tile's columns are left, 1 MiB, for which no core has registers
(benchmarks/results/tpu_schedule.md).
Rounding: logits and statistics float32 (see cross_entropy/formulas.py). Not measured on a
TPU: no speed is claimed.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from liger_jax.pallas_kernels._tiles import (
    cdiv,
    out_like,
    tpu_interpreter,
    tpu_params,
    vmem_bytes,
    vmem_limit,
    with_absent,
)
from liger_jax.pallas_kernels.cross_entropy import formulas as row_formulas
from liger_jax.pallas_kernels.cross_entropy.formulas import Cotangents, Statistics
from liger_jax.pallas_kernels.fused_linear_cross_entropy import config, formulas
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import Gradients, Inputs, LinearOptions, Needs, Typed

LANES = 128
PART = 256  # columns of a tile that are multiplied, and then folded, at a time
ROW_GROUP = 32  # rows whose values are kept in registers while the epilogue goes through their columns


def unsupported(hidden: Typed, weight: Typed, *others: jax.Array | None, options: LinearOptions) -> str | None:
    """Lean mode, float32 and bfloat16, a precision that Mosaic has."""
    if options.mode == "fast":
        return "it has no mode 'fast' (a chunk's logits would have to exist); use mode='lean', or 'xla'."
    if hidden.dtype not in (jnp.float32, jnp.bfloat16):
        return f"the TPU kernel takes float32 and bfloat16, and hidden is {hidden.dtype}; use 'xla'."
    if options.precision not in (None, jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGHEST):
        return f"Mosaic's products have no precision {options.precision}; use None, 'highest', or 'xla'."
    return None


def _float32(ref, part):
    return None if ref is None else ref[:, part].astype(jnp.float32)


def _for_each_part(hidden_ref, weight_ref, x_ref, u_ref, *, d, options: LinearOptions, start_row_tile, epilogue):
    """Calls epilogue(first column, width) for each part of a tile, once u_ref holds the part's logits.

    Where a tile has all of d, no branch lies between products and epilogues. Then the compiler schedules one part's
    epilogue among the next part's products: 17.8 million cycles on v6e at (8192, 4096, 128256), and 18.0 in one part.
    """
    d_tile, d_block_size, v_block_size = pl.program_id(2), hidden_ref.shape[1], u_ref.shape[1]
    parts = [(first, min(PART, v_block_size - first)) for first in range(0, v_block_size, PART)]

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
        for first, width in parts:
            u_ref[:, pl.ds(first, width)] = product(x, first, width)
            epilogue(first, width)
        return

    @pl.when(d_tile == 0)
    def _():
        u_ref[...] = jnp.zeros_like(u_ref)

    u_ref[...] += product(hidden_ref[...], 0, v_block_size)

    pl.when(d_tile == pl.num_programs(2) - 1)(lambda: epilogue(0, v_block_size))


def _columns(u_ref, first, width):
    return pl.program_id(1) * u_ref.shape[1] + first + jax.lax.broadcasted_iota(jnp.int32, (1, width), 1)


def _row_groups(u_ref):
    n_block_size = u_ref.shape[0]
    return [pl.ds(start, min(ROW_GROUP, n_block_size - start)) for start in range(0, n_block_size, ROW_GROUP)]


def _pieces(x: jax.Array) -> jax.Array:
    """(m, v) → (v / 128, m, 128), whose sums over the first axis add up whole registers."""
    return jnp.stack([x[:, start : start + LANES] for start in range(0, x.shape[1], LANES)])


def _statistics_kernel(hidden_ref, weight_ref, labels_ref, *refs, v, d, options, has, num_fields):
    bias_ref, class_weights_ref, *refs, x_ref, u_ref = with_absent(refs, has)
    out_refs, state_refs = refs[:num_fields], refs[num_fields:]
    structure = jax.tree.structure(row_formulas.online_start(1, options.logit))

    def start_row_tile():
        for ref, field in zip(state_refs, jax.tree.leaves(row_formulas.online_start(1, options.logit)), strict=True):
            ref[...] = jnp.broadcast_to(field, ref.shape)

    def fold(first: int, width: int):
        part = pl.ds(first, width)
        columns, bias, class_weights = (
            None if x is None else _pieces(x)
            for x in (_columns(u_ref, first, width), _float32(bias_ref, part), _float32(class_weights_ref, part))
        )
        for own in _row_groups(u_ref):
            u = _pieces(u_ref[own, part])
            state = row_formulas.online_update(
                jax.tree.unflatten(structure, [ref[own, :][None] for ref in state_refs]),
                row_formulas.transform(u if bias is None else u + bias, options.logit),
                columns,
                columns < v if v % u_ref.shape[1] else None,
                labels_ref[own, :],
                class_weights,
                axis=0,
            )
            for ref, field in zip(state_refs, jax.tree.leaves(state), strict=True):
                ref[own, :] = field[0]

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
    """Block specs over the grid (row_tile, vocab_tile, d_tile) of hidden, the weight, rows' numbers, and vectors."""

    def weight_index_map(_, vocab_tile, d_tile):
        return (vocab_tile, d_tile) if options.vocab_dim == 0 else (d_tile, vocab_tile)

    block = (tiles.v_block_size, tiles.d_block_size)
    hidden_spec = pl.BlockSpec((tiles.n_block_size, tiles.d_block_size), lambda row_tile, _, d_tile: (row_tile, d_tile))
    weight_spec = pl.BlockSpec(block if options.vocab_dim == 0 else block[::-1], weight_index_map)
    row_spec = pl.BlockSpec((tiles.n_block_size, row_width), lambda row_tile, *_: (row_tile, 0))
    vector_spec = pl.BlockSpec((1, tiles.v_block_size), lambda _, vocab_tile, __: (0, vocab_tile))
    return [hidden_spec, weight_spec, row_spec, *[vector_spec] * num_vectors]


def _product_scratch(tiles: config.TpuConfig, d: int):
    """Scratch for a tile of hidden, where it is kept, and for the logits."""
    kept = [pltpu.VMEM((tiles.n_block_size // 2, d), jnp.uint32)] if tiles.keeps_hidden else []
    return [*kept, pltpu.VMEM((tiles.n_block_size, tiles.v_block_size), jnp.float32)]


def statistics(inputs: Inputs, *, options: LinearOptions, interpret: bool) -> Statistics:
    """The statistics of all rows, each (N,)."""
    hidden, weight, labels, bias, class_weights = inputs
    (n, d), v = hidden.shape, weight.shape[options.vocab_dim]
    vmem = vmem_bytes()
    state = jax.eval_shape(lambda: row_formulas.online_start(n, options.logit))
    fields = jax.tree.leaves(state)
    tiles = config.tpu_config(n, v, d, hidden.dtype.itemsize, vmem, len(fields))
    vectors = [x[None, :] for x in (bias, class_weights) if x is not None]
    present = [bias is not None, class_weights is not None, *[True] * (2 * len(fields)), tiles.keeps_hidden, True]
    row_spec = pl.BlockSpec((tiles.n_block_size, 1), lambda row_tile, *_: (row_tile, 0))
    parts = pl.pallas_call(
        functools.partial(_statistics_kernel, v=v, d=d, options=options, has=tuple(present), num_fields=len(fields)),
        grid=(cdiv(n, tiles.n_block_size), cdiv(v, tiles.v_block_size), cdiv(d, tiles.d_block_size)),
        in_specs=_specs(tiles, options, row_width=1, num_vectors=len(vectors)),
        out_specs=[row_spec] * len(fields),
        out_shape=[out_like(hidden, s.shape, s.dtype) for s in fields],
        scratch_shapes=[pltpu.VMEM((tiles.n_block_size, LANES), s.dtype) for s in fields] + _product_scratch(tiles, d),
        compiler_params=tpu_params(interpret, "parallel", "arbitrary", "arbitrary", vmem_limit_bytes=vmem_limit(vmem)),
        interpret=tpu_interpreter(interpret),
        name="fused_linear_cross_entropy_statistics",
    )(hidden, weight.astype(hidden.dtype), labels[:, None], *vectors)
    parts = jax.tree.unflatten(jax.tree.structure(state), [part.reshape(1, n) for part in parts])
    return row_formulas.online_merge(parts, options.logit)


def _logit_gradients_kernel(hidden_ref, weight_ref, rows_ref, *refs, d, options, has, wanted):
    bias_ref, class_weights_ref, du_ref, x_ref, u_ref = with_absent(refs, has)

    def write(first: int, width: int):
        part = pl.ds(first, width)
        columns, bias = _columns(u_ref, first, width), _float32(bias_ref, part)
        class_weights = _float32(class_weights_ref, part)
        for own in _row_groups(u_ref):
            u = u_ref[own, part]
            labels, *fields = [rows_ref[own, i : i + 1] for i in range(rows_ref.shape[1])]
            lse, *g = [pltpu.bitcast(field, jnp.float32) for field in fields]
            du = row_formulas.logit_gradient(
                jnp.where(lse < jnp.inf, u if bias is None else u + bias, 0.0),
                columns,
                labels,
                lse,
                jax.tree.unflatten(wanted, g),
                class_weights,
                options.logit,
            )
            du_ref[own, part] = du.astype(du_ref.dtype)

    _for_each_part(
        hidden_ref, weight_ref, x_ref, u_ref, d=d, options=options, start_row_tile=lambda: None, epilogue=write
    )


def logit_gradients(
    inputs: Inputs, log_normalizer: jax.Array, cotangents: Cotangents, *, options: LinearOptions, interpret: bool
) -> jax.Array:
    """du (N, v) in hidden's dtype for the vocabulary entries in `weight`; labels count from its first entry.

    Rows on whose loss nothing depends are zeros, whatever hidden holds there.
    """
    hidden, weight, labels, bias, class_weights = inputs
    (n, d), v = hidden.shape, weight.shape[options.vocab_dim]
    vmem = vmem_bytes()
    tiles = config.tpu_config(n, v, d, hidden.dtype.itemsize, vmem)
    present = [bias is not None, class_weights is not None, True, tiles.keeps_hidden, True]
    # An infinite lse marks a row on which nothing depends. The kernel finds it by one comparison; on v6e it would take
    # 21 % longer to look at the cotangents. No other row has an infinite lse: an infinite logit makes it NaN.
    lse = jnp.where(row_formulas.is_live(cotangents), log_normalizer, jnp.inf)
    fields = [lse, *(g for g in cotangents if g is not None)]
    # All numbers of a row come in one operand, because a row takes 512 bytes of HBM in any case, for 1 lane or for 128.
    as_int32 = [jax.lax.bitcast_convert_type(field, jnp.int32) for field in fields]
    row_operand = jnp.stack([labels, *as_int32], axis=1)
    vectors = [x[None, :] for x in (bias, class_weights) if x is not None]
    du_spec = pl.BlockSpec(
        (tiles.n_block_size, tiles.v_block_size), lambda row_tile, vocab_tile, _: (row_tile, vocab_tile)
    )
    return pl.pallas_call(
        functools.partial(
            _logit_gradients_kernel, d=d, options=options, has=tuple(present), wanted=jax.tree.structure(cotangents)
        ),
        grid=(cdiv(n, tiles.n_block_size), cdiv(v, tiles.v_block_size), cdiv(d, tiles.d_block_size)),
        in_specs=_specs(tiles, options, row_width=row_operand.shape[1], num_vectors=len(vectors)),
        out_specs=du_spec,
        out_shape=out_like(hidden, (n, v), hidden.dtype),
        scratch_shapes=_product_scratch(tiles, d),
        compiler_params=tpu_params(interpret, "parallel", "arbitrary", "arbitrary", vmem_limit_bytes=vmem_limit(vmem)),
        interpret=tpu_interpreter(interpret),
        name="fused_linear_cross_entropy_logit_gradients",
    )(hidden, weight, row_operand, *vectors)


def gradients(
    inputs: Inputs,
    log_normalizer: jax.Array,
    cotangents: Cotangents,
    *,
    options: LinearOptions,
    needs: Needs,
    interpret: bool,
) -> Gradients:
    """The lean backward, with du from this module's kernel."""
    kernel = functools.partial(logit_gradients, interpret=interpret)
    return formulas.lean_gradients(
        inputs, log_normalizer, cotangents, options=options, needs=needs, logit_gradients=kernel, mask_once=False
    )
