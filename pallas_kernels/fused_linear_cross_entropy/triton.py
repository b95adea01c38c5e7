"""Fused linear cross-entropy in Pallas-Triton (NVIDIA, Ampere and newer).

Statistics: a tile of logits lives in registers only, as the accumulator of its product. An online log-sum-exp folds it
into one number a row for each split of the vocabulary, and XLA merges the splits.
Gradients: the same product is made again for a slice of the vocabulary, with the softmax's gradient as its epilogue.
Only du (N, slice) is written, in hidden's dtype. The two products with du are XLA's.
Lean mode only: gradients in the forward would need a chunk's whole logits.
Rounding: logits and statistics are float32, by cross_entropy/formulas.py; float32 products
run in TF32 unless the precision is "highest", as XLA's do on these GPUs.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _triton as pltriton
from liger_jax.pallas_kernels.cross_entropy import formulas as row_formulas
from liger_jax.pallas_kernels.cross_entropy.formulas import Cotangents, Statistics
from liger_jax.pallas_kernels.fused_linear_cross_entropy import buffers, config, formulas
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import (
    Gradients,
    Inputs,
    LinearOptions,
    Needs,
    TritonConfig,
    Typed,
)
from liger_jax.pallas_kernels.tiles import cdiv, in_bounds, out_like, round_up, with_absent


def unsupported(hidden: Typed, weight: Typed, *others: jax.Array | None, options: LinearOptions) -> str | None:
    """Lean mode, float32 and narrower, a precision that Triton has."""
    if options.mode == "fast":
        return "it has no mode 'fast' (a chunk's logits would have to exist); use mode='lean', or 'xla'."
    if hidden.dtype == jnp.float64:
        return "the kernel computes in float32; use 'xla' for float64."
    if options.precision not in (None, jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGHEST):
        return f"Triton's products do not support precision={options.precision}; use None, 'highest', or 'xla'."
    return None


def _raw_logits_tile(hidden_ref, weight_ref, in_rows, start_v, *, v, d, tiles: TritonConfig, options: LinearOptions):
    """u of one tile (n_block, v_block), float32: the product over d, with everything past an edge read as zero."""
    v_dim = options.vocab_dim
    in_vocab = in_bounds(start_v, tiles.v_block_size, v, axis=v_dim)

    def step(i, u):
        start_d = i * tiles.d_block_size
        d_slice, v_slice = pl.ds(start_d, tiles.d_block_size), pl.ds(start_v, tiles.v_block_size)

        def in_width(axis):
            return in_bounds(start_d, tiles.d_block_size, d, axis=axis)

        x = pltriton.load(hidden_ref.at[:, d_slice], mask=in_rows & in_width(1), other=0.0)
        weight_tile = weight_ref.at[v_slice, d_slice] if v_dim == 0 else weight_ref.at[d_slice, v_slice]
        w = pltriton.load(weight_tile, mask=in_vocab & in_width(1 - v_dim), other=0.0)
        w = w.T if v_dim == 0 else w
        return u + jnp.dot(x, w, precision=options.precision, preferred_element_type=jnp.float32)

    u = jnp.zeros((tiles.n_block_size, tiles.v_block_size), jnp.float32)
    return jax.lax.fori_loop(0, cdiv(d, tiles.d_block_size), step, u)


def _row(ref, start_v, v, tiles):
    """A tile (1, v_block) of a vector over the vocabulary, float32, or None."""
    if ref is None:
        return None
    mask = in_bounds(start_v, tiles.v_block_size, v, axis=1)
    return pltriton.load(ref.at[:, pl.ds(start_v, tiles.v_block_size)], mask=mask, other=0.0).astype(jnp.float32)


def _vocab_inputs(weight, bias, class_weights, v_padded, d_padded, options):
    """The operands along the vocabulary with their block specs, absent ones left out."""
    block = (v_padded, d_padded) if options.vocab_dim == 0 else (d_padded, v_padded)
    vectors = [x[None, :] for x in (bias, class_weights) if x is not None]
    vector_spec = pl.BlockSpec((1, v_padded), lambda *_: (0, 0))
    return [weight, *vectors], [pl.BlockSpec(block, lambda *_: (0, 0)), *[vector_spec] * len(vectors)]


def _statistics_kernel(hidden_ref, labels_ref, weight_ref, *refs, n, v, d, tiles, tiles_per_split, options, has):
    bias_ref, class_weights_ref, *state_refs = with_absent(refs, has)
    split, labels = pl.program_id(1), labels_ref[...]
    in_rows = in_bounds(pl.program_id(0) * tiles.n_block_size, tiles.n_block_size, n, axis=0)

    def step(i, state):
        start_v = (split * tiles_per_split + i) * tiles.v_block_size
        u = _raw_logits_tile(hidden_ref, weight_ref, in_rows, start_v, v=v, d=d, tiles=tiles, options=options)
        bias = _row(bias_ref, start_v, v, tiles)
        columns = start_v + jax.lax.broadcasted_iota(jnp.int32, (1, tiles.v_block_size), 1)
        return row_formulas.online_update(
            state,
            row_formulas.transform(u if bias is None else u + bias, options.logit),
            columns,
            columns < v,
            labels,
            _row(class_weights_ref, start_v, v, tiles),
        )

    state = jax.lax.fori_loop(0, tiles_per_split, step, row_formulas.online_start(tiles.n_block_size, options.logit))
    for ref, field in zip(state_refs, jax.tree.leaves(state), strict=True):
        ref[...] = field[None]


def statistics(inputs: Inputs, *, options: LinearOptions, interpret: bool) -> Statistics:
    """The statistics of all rows, each (N,)."""
    hidden, weight, labels, bias, class_weights = inputs
    (n, d), v = hidden.shape, weight.shape[options.vocab_dim]
    tiles = config.triton_config(n, v, d, hidden.dtype)
    n_tiles, v_tiles = cdiv(n, tiles.n_block_size), cdiv(v, tiles.v_block_size)
    tiles_per_split = cdiv(v_tiles, config.triton_vocab_splits(n_tiles, v_tiles))
    splits = cdiv(v_tiles, tiles_per_split)
    d_padded = round_up(d, tiles.d_block_size)
    n_padded = n_tiles * tiles.n_block_size
    v_padded = splits * tiles_per_split * tiles.v_block_size
    operands, vocab_specs = _vocab_inputs(weight.astype(hidden.dtype), bias, class_weights, v_padded, d_padded, options)
    # Neighbouring programs take other rows and the same split of the vocabulary, so its tiles stay in L2.
    hidden_spec = pl.BlockSpec((tiles.n_block_size, d_padded), lambda row_tile, _: (row_tile, 0))
    row_spec = pl.BlockSpec((tiles.n_block_size, 1), lambda row_tile, _: (row_tile, 0))
    part_spec = pl.BlockSpec((1, tiles.n_block_size, 1), lambda row_tile, split: (split, row_tile, 0))
    state = jax.eval_shape(lambda: row_formulas.online_start(n, options.logit))
    fields = jax.tree.leaves(state)
    present = [bias is not None, class_weights is not None] + [True] * len(fields)
    kernel = functools.partial(
        _statistics_kernel,
        n=n, v=v, d=d, tiles=tiles, tiles_per_split=tiles_per_split, options=options, has=tuple(present),
    )  # fmt: skip
    padded_labels = jnp.pad(labels, (0, n_padded - n), constant_values=row_formulas.NO_LABEL)
    states = pl.pallas_call(
        kernel,
        grid=(n_tiles, splits),
        in_specs=[hidden_spec, row_spec, *vocab_specs],
        out_specs=[part_spec] * len(fields),
        out_shape=[out_like(hidden, (splits, n_padded, 1), s.dtype) for s in fields],
        compiler_params=pltriton.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="fused_linear_cross_entropy_statistics",
    )(hidden, padded_labels[:, None], *operands)
    states = jax.tree.unflatten(jax.tree.structure(state), [x[:, :n, 0] for x in states])
    return row_formulas.online_merge(states, options.logit)


def _logit_gradients_kernel(hidden_ref, labels_ref, *refs, n, v, d, tiles, options, has):
    *row_refs, weight_ref, bias_ref, class_weights_ref, du_ref = with_absent(refs, has)
    in_rows = in_bounds(pl.program_id(0) * tiles.n_block_size, tiles.n_block_size, n, axis=0)
    labels, lse, *g = (
        None if ref is None else pltriton.load(ref, mask=in_rows, other=0) for ref in (labels_ref, *row_refs)
    )
    start_v = pl.program_id(1) * tiles.v_block_size
    u = _raw_logits_tile(hidden_ref, weight_ref, in_rows, start_v, v=v, d=d, tiles=tiles, options=options)
    bias = _row(bias_ref, start_v, v, tiles)
    columns = start_v + jax.lax.broadcasted_iota(jnp.int32, (1, tiles.v_block_size), 1)
    du = row_formulas.logit_gradient(
        u if bias is None else u + bias,
        columns,
        labels,
        lse,
        Cotangents(*g),
        _row(class_weights_ref, start_v, v, tiles),
        options.logit,
    )
    pltriton.store(du_ref, du.astype(du_ref.dtype), mask=in_rows & (columns < v))


def logit_gradients(
    inputs: Inputs, log_normalizer: jax.Array, cotangents: Cotangents, *, options: LinearOptions, interpret: bool
) -> jax.Array:
    """du (N, v) in hidden's dtype for the vocabulary entries in `weight`; labels count from its first entry."""
    hidden, weight, labels, bias, class_weights = inputs
    (n, d), v = hidden.shape, weight.shape[options.vocab_dim]
    tiles = config.triton_config(n, v, d, hidden.dtype)
    n_tiles, v_tiles = cdiv(n, tiles.n_block_size), cdiv(v, tiles.v_block_size)
    d_padded = round_up(d, tiles.d_block_size)
    operands, vocab_specs = _vocab_inputs(weight, bias, class_weights, v_tiles * tiles.v_block_size, d_padded, options)
    hidden_spec = pl.BlockSpec((tiles.n_block_size, d_padded), lambda row_tile, _: (row_tile, 0))
    row_spec = pl.BlockSpec((tiles.n_block_size, 1), lambda row_tile, _: (row_tile, 0))
    du_spec = pl.BlockSpec(
        (tiles.n_block_size, tiles.v_block_size), lambda row_tile, vocab_tile: (row_tile, vocab_tile)
    )
    row_operands = [log_normalizer, *cotangents]
    present = [x is not None for x in (*row_operands, weight, bias, class_weights)] + [True]
    row_operands = [x[:, None] for x in row_operands if x is not None]
    return pl.pallas_call(
        functools.partial(_logit_gradients_kernel, n=n, v=v, d=d, tiles=tiles, options=options, has=tuple(present)),
        grid=(n_tiles, v_tiles),
        in_specs=[hidden_spec, row_spec, *[row_spec] * len(row_operands), *vocab_specs],
        out_specs=du_spec,
        out_shape=out_like(hidden, (n, v), hidden.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        interpret=interpret,
        name="fused_linear_cross_entropy_logit_gradients",
    )(hidden, labels[:, None], *row_operands, *operands)


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
        inputs, log_normalizer, cotangents, options=options, needs=needs, logit_gradients=kernel
    )


# --- memory -----------------------------------------------------------------------------------------------------------


def _lean_bytes(sizes: buffers.Sizes, entries: int) -> buffers.Buffers:
    """A slice has du, its rows of the weight in hidden's dtype, and its rows of dW in float32."""
    of_slice = _slice_bytes(sizes, entries)
    if not any(sizes.gradients):
        return buffers.Buffers(sizes.weight_copy_bytes + buffers.row_number_bytes(sizes.n), of_slice)
    masked_hidden = sizes.n * sizes.d * sizes.itemsize
    return buffers.Buffers(of_slice + sizes.hidden_sum_bytes + masked_hidden + sizes.weight_copy_bytes, of_slice)


def _slice_bytes(sizes: buffers.Sizes, entries: int) -> int:
    if sizes.weight_is_split:
        return buffers.gathered_slice_bytes(sizes, entries)
    return buffers.logit_gradient_bytes(sizes, max(sizes.n, 1), entries) + entries * sizes.d * (4 + sizes.itemsize)


MEMORY = buffers.Memory(
    lean=_lean_bytes, preferred_entries=lambda sizes: buffers.entries_of_128_mib(sizes, _slice_bytes(sizes, 1))
)
