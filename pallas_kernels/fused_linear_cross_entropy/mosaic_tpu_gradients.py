"""The TPU kernels of the gradient by the logits: from hidden and the weight, or from kept exponentials."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import _mosaic_tpu as pltpu
from liger_jax.pallas_kernels.cross_entropy import formulas as row_formulas
from liger_jax.pallas_kernels.cross_entropy.formulas import Cotangents
from liger_jax.pallas_kernels.fused_linear_cross_entropy import config, formulas
from liger_jax.pallas_kernels.fused_linear_cross_entropy import mosaic_tpu_tiles as shared
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import Inputs, LinearOptions
from liger_jax.pallas_kernels.tiles import cdiv, out_like, vmem_bytes, with_absent


def _logit_gradients_kernel(_, hidden_ref, weight_ref, rows_ref, *refs, d, options, has, wanted):
    bias_ref, class_weights_ref, du_ref, spread_ref, x_ref, u_ref = with_absent(refs, has)
    n_block_size, v_block_size = u_ref.shape

    def write(first: int, width: int):
        strip, columns = pl.ds(first, width), shared.columns_of_strip(v_block_size, first, width)
        bias, class_weights = shared.vector_pieces(bias_ref, strip), shared.vector_pieces(class_weights_ref, strip)
        for own in shared.row_groups(n_block_size):
            u = shared.pieces(u_ref[own, strip])
            labels, lse, *g = shared.read_rows(spread_ref, own)
            du = row_formulas.logit_gradient(
                jnp.where(lse < jnp.inf, u if bias is None else u + bias, 0.0),
                columns,
                labels,
                lse,
                jax.tree.unflatten(wanted, g),
                class_weights,
                options.logit,
            )
            shared.write_pieces(du_ref, own, first, du)

    start_row_tile = functools.partial(shared.spread_rows, rows_ref, spread_ref)
    shared.for_each_part(
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

    Rows on whose loss nothing depends have an infinite `log_normalizer`, and are zeros, whatever hidden holds there.
    The kernel finds them by one comparison; on v6e it would take 21 % longer to look at the cotangents. It reads its
    slice of the weight in its place, where slices begin at whole tiles.
    """
    hidden, weight, labels, bias, class_weights = inputs
    n, d = hidden.shape
    tiles = config.tpu_config(n, size, d, hidden.dtype.itemsize, vmem_bytes(), num_vectors=inputs.num_vectors)
    labels, first_tile = labels - start, jnp.full((1,), start // tiles.v_block_size, jnp.int32)
    if options.chunk_size % tiles.v_block_size and size < weight.shape[options.vocab_dim]:
        weight, first_tile = formulas.take(weight, start, size, options.vocab_dim), jnp.zeros_like(first_tile)
    present = [bias is not None, class_weights is not None, True, True, tiles.keeps_hidden, True]
    rows = shared.row_operand(labels, log_normalizer, *(g for g in cotangents if g is not None))
    vectors = [formulas.take(x[None, :], start, size, 1) for x in (bias, class_weights) if x is not None]
    return pl.pallas_call(
        functools.partial(
            _logit_gradients_kernel, d=d, options=options, has=tuple(present), wanted=jax.tree.structure(cotangents)
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(cdiv(n, tiles.n_block_size), cdiv(size, tiles.v_block_size), cdiv(d, tiles.d_block_size)),
            in_specs=shared.operand_specs(tiles, options, row_width=rows.shape[1], num_vectors=len(vectors)),
            out_specs=shared.tile_spec(tiles),
            scratch_shapes=[shared.spread_scratch(tiles.n_block_size, rows), *shared.product_scratch(tiles, d)],
        ),
        out_shape=out_like(hidden, (n, size), hidden.dtype),
        **shared.launch_options(interpret),
        name="fused_linear_cross_entropy_logit_gradients",
    )(first_tile, hidden, weight, rows, *vectors)


def _make_logit_gradients_kernel(e_ref, maxima_ref, rows_ref, *refs, options, has, wanted, whole_d):
    class_weights_ref, du_ref, spread_ref = with_absent(refs, has)
    n_block_size, v_block_size = e_ref.shape

    pl.when(pl.program_id(1) == 0)(functools.partial(shared.spread_rows, rows_ref, spread_ref))

    for first, width in shared.parts_of_tile(v_block_size, whole_d):
        strip, columns = pl.ds(first, width), shared.columns_of_strip(v_block_size, first, width)
        class_weights = shared.vector_pieces(class_weights_ref, strip)
        lane, lanes = shared.maximum_lane(v_block_size, whole_d, first)
        for own in shared.row_groups(n_block_size):
            labels, lse, *g = shared.read_rows(spread_ref, own)
            e = shared.pieces(e_ref[own, strip]).astype(jnp.float32)
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
            shared.write_pieces(du_ref, own, first, du)


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
    (n, v), tiles = exponentials.shape, shared.tiles_of(inputs, options, keep=True)
    whole_d = tiles.d_block_size == hidden.shape[1]
    has_whole_tiles = n % tiles.n_block_size == 0 and v % tiles.v_block_size == 0
    rows = shared.row_operand(inputs.labels, log_normalizer, *(g for g in cotangents if g is not None))
    _, _, row_spec, *vector_specs = shared.operand_specs(tiles, options, rows.shape[1], int(class_weights is not None))
    return pl.pallas_call(
        functools.partial(
            _make_logit_gradients_kernel,
            options=options.logit,
            has=(class_weights is not None, True, True),
            wanted=jax.tree.structure(cotangents),
            whole_d=whole_d,
        ),
        grid=(cdiv(n, tiles.n_block_size), cdiv(v, tiles.v_block_size), 1),
        in_specs=[shared.tile_spec(tiles), shared.maxima_spec(tiles, whole_d), row_spec, *vector_specs],
        out_specs=shared.tile_spec(tiles),
        out_shape=out_like(hidden, (n, v), hidden.dtype),
        scratch_shapes=[shared.spread_scratch(tiles.n_block_size, rows)],
        # JAX's interpreter returns whole tiles of an array that is written in place.
        input_output_aliases={} if interpret and not has_whole_tiles else {0: 0},
        **shared.launch_options(interpret),
        name="fused_linear_cross_entropy_logit_gradients",
    )(exponentials, maxima, rows, *([] if class_weights is None else [class_weights[None, :]]))
