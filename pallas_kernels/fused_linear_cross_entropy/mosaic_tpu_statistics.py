"""The TPU kernel of the statistics, which in mode "fast" keeps exponentials too."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _mosaic_tpu as pltpu
from liger_jax.pallas_kernels.cross_entropy import formulas as row_formulas
from liger_jax.pallas_kernels.cross_entropy.formulas import Statistics
from liger_jax.pallas_kernels.fused_linear_cross_entropy import mosaic_tpu_tiles as shared
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import Inputs, LinearOptions
from liger_jax.pallas_kernels.tiles import cdiv, out_like, round_up, with_absent


def _statistics_kernel(hidden_ref, weight_ref, rows_ref, *refs, v, d, options, has, num_fields):
    bias_ref, class_weights_ref, e_ref, maxima_ref, *refs, spread_ref, x_ref, u_ref = with_absent(refs, has)
    out_refs, state_refs = refs[:num_fields], refs[num_fields:]
    n_block_size, v_block_size = u_ref.shape
    structure = jax.tree.structure(row_formulas.online_start(1, options.logit))

    def start_row_tile():
        shared.spread_rows(rows_ref, spread_ref)
        for ref, field in zip(state_refs, jax.tree.leaves(row_formulas.online_start(1, options.logit)), strict=True):
            ref[...] = jnp.broadcast_to(field, ref.shape)

    def fold(first: int, width: int):
        strip, columns = pl.ds(first, width), shared.columns_of_strip(v_block_size, first, width)
        bias, class_weights = shared.vector_pieces(bias_ref, strip), shared.vector_pieces(class_weights_ref, strip)
        in_vocab = columns < v if v % v_block_size else None
        for own in shared.row_groups(n_block_size):
            u = shared.pieces(u_ref[own, strip])
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
                ref[own, :] = jnp.broadcast_to(field[0], (u.shape[1], shared.LANES))
            if e_ref is not None:
                keep(own, first, z if in_vocab is None else jnp.where(in_vocab, z, -jnp.inf), state.maximum)

    def keep(own, first, z, maximum):
        shift = row_formulas.shift_of(maximum)
        shared.write_pieces(e_ref, own, first, jnp.exp(z - shift))
        lane, lanes = shared.maximum_lane(v_block_size, d == hidden_ref.shape[1], first)
        maxima_ref[own, :] = jnp.where(lanes == lane, maximum[0], maxima_ref[own, :])

    shared.for_each_part(
        hidden_ref, weight_ref, x_ref, u_ref, d=d, options=options, start_row_tile=start_row_tile, epilogue=fold
    )
    last_step = [pl.program_id(axis) == pl.num_programs(axis) - 1 for axis in (1, 2)]

    @pl.when(last_step[0] & last_step[1])
    def _():
        state = row_formulas.over_lanes(jax.tree.unflatten(structure, [ref[...] for ref in state_refs]))
        for ref, field in zip(out_refs, jax.tree.leaves(state), strict=True):
            ref[...] = field


def statistics(
    inputs: Inputs, *, options: LinearOptions, interpret: bool, keep: bool = False
) -> tuple[Statistics, jax.Array | None, jax.Array | None]:
    """The statistics of all rows, each (N,), and with `keep` E (N, V) and the rows' maxima that it is relative to.

    E = exp(z − maximum) has hidden's dtype. Each strip of a tile has its own maximum, in its own lane. It is
    taken over all of the row's columns from the first to the end of that strip.
    """
    hidden, weight, labels, bias, class_weights = inputs
    (n, d), v = hidden.shape, weight.shape[options.vocab_dim]
    state = jax.eval_shape(lambda: row_formulas.online_start(n, options.logit))
    fields = jax.tree.leaves(state)
    tiles = shared.tiles_of(inputs, options, keep)
    whole_d = tiles.d_block_size == d
    vectors = [x[None, :] for x in (bias, class_weights) if x is not None]
    rows = shared.row_operand(labels)
    present = [bias is not None, class_weights is not None, keep, keep, *[True] * (2 * len(fields) + 1)]
    present += [tiles.keeps_hidden, True]
    row_spec = pl.BlockSpec((tiles.n_block_size, 1), lambda row_tile, *_: (row_tile, 0))
    num_maxima = round_up(cdiv(v, tiles.v_block_size) * shared.maximum_lanes(tiles.v_block_size, whole_d), shared.LANES)
    kept = [out_like(hidden, (n, v), hidden.dtype), out_like(hidden, (n, num_maxima), jnp.float32)] if keep else []
    outputs = pl.pallas_call(
        functools.partial(_statistics_kernel, v=v, d=d, options=options, has=tuple(present), num_fields=len(fields)),
        grid=(cdiv(n, tiles.n_block_size), cdiv(v, tiles.v_block_size), cdiv(d, tiles.d_block_size)),
        in_specs=shared.operand_specs(tiles, options, row_width=1, num_vectors=len(vectors)),
        out_specs=([shared.tile_spec(tiles), shared.maxima_spec(tiles, whole_d)] if keep else [])
        + [row_spec] * len(fields),
        out_shape=kept + [out_like(hidden, s.shape, s.dtype) for s in fields],
        scratch_shapes=[
            *(pltpu.VMEM((tiles.n_block_size, shared.LANES), s.dtype) for s in fields),
            shared.spread_scratch(tiles.n_block_size, rows),
            *shared.product_scratch(tiles, d),
        ],
        **shared.launch_options(interpret),
        name="fused_linear_cross_entropy_statistics",
    )(hidden, weight.astype(hidden.dtype), rows, *vectors)
    states = [x.reshape(1, n) for x in outputs[len(kept) :]]
    merged = row_formulas.online_merge(jax.tree.unflatten(jax.tree.structure(state), states), options.logit)
    exponentials, maxima = outputs[: len(kept)] or (None, None)
    return merged, exponentials, maxima
