"""The statistics of the fused loss on Hopper: a product whose epilogue folds each tile of logits into numbers a row."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from liger_jax.pallas_kernels import hopper
from liger_jax.pallas_kernels._hopper_product import Factors, product
from liger_jax.pallas_kernels._hopper_tiles import Epilogue, Tile, row_staging, staging, store_rows, store_tile
from liger_jax.pallas_kernels.cross_entropy import formulas as row_formulas
from liger_jax.pallas_kernels.cross_entropy.formulas import OnlineState, Statistics
from liger_jax.pallas_kernels.fused_linear_cross_entropy import config
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import Inputs, LinearOptions
from liger_jax.pallas_kernels.fused_linear_cross_entropy.mosaic_gpu_operands import (
    Span,
    column_vectors,
    padded,
    spans_of,
    tile_logits,
)
from liger_jax.pallas_kernels.tiles import cdiv, out_like

_LOG2_E = math.log2(math.e)
_NO_COLUMN = 2**30
_LEAST_EXPONENT = row_formulas.LEAST_EXPONENT * _LOG2_E  # of 2


class _Wanted(NamedTuple):
    """Which numbers a tile writes for each of its rows, in this order.

    If the maximum is not requested, the tile's log-sum-exp replaces maximum and sum.
    """

    maximum: bool
    target: bool
    logit_sum: bool
    entropy: bool
    predicted: bool

    @property
    def dtypes(self) -> list[Any]:
        """The numbers' dtypes."""
        num_sums = 1 + self.maximum + self.target + self.logit_sum + 2 * self.entropy
        return [jnp.float32] * num_sums + [jnp.int32] * self.predicted


def statistics(inputs: Inputs, *, options: LinearOptions) -> Statistics:
    """The statistics of all rows, each (N,)."""
    n = inputs.hidden.shape[0]
    (inputs,) = padded(inputs, options)
    states = []
    for span in spans_of(inputs, options):
        states.append(partial_statistics(span, options, keep=False)[0])
    return jax.tree.map(lambda x: x[:n], merged(states, options))


def merged(states: list[OnlineState], options: LinearOptions) -> Statistics:
    """Joins the tiles' statistics, from all spans of the vocabulary, into whole rows'."""
    tiles = jax.tree.map(lambda *fields: jnp.concatenate(fields), *states)
    return row_formulas.online_merge(tiles, options.logit)


class Blocks(NamedTuple):
    """Blocks (N, width) of a matrix in an array whose rows have `width` elements, from `first_row` on."""

    array: jax.Array
    first_row: int
    n: int
    width: int

    def place(self, row: Any, column: Any, first_block: Any = 0) -> tuple[Any, Any]:
        """Where the element at (row, column) of the matrix is, which begins at block `first_block`."""
        block = jax.lax.div(column, self.width)
        in_array = self.first_row + (first_block + block) * self.n + row
        return pl.multiple_of(in_array, 64), pl.multiple_of(column - block * self.width, 64)


def partial_statistics(
    span: Span, options: LinearOptions, keep: bool, blocks: Blocks | None = None
) -> tuple[OnlineState, jax.Array | None]:
    """The statistics of each tile of a span, (tiles, N); with `keep` also E = exp(z − the tile's maximum).

    Only the first `span.size` of the weight's entries count. E is 0 for the others. With `blocks` E is written there,
    in place, and the array is returned.
    """
    inputs, vocab_size = span.inputs, span.size
    (n, d), v = inputs.hidden.shape, inputs.weight.shape[options.vocab_dim] if span.offset is None else span.size
    tiles = (config.mosaic_gpu_block_tiles if blocks else config.mosaic_gpu_logit_tiles)(d, n, v)
    has_bias, has_weights = inputs.bias is not None, inputs.class_weights is not None and options.logit.logit_sum
    logit = options.logit
    # The search for the label takes three operations a logit, which cost time where the depth is short. On an H200 the
    # forward without them is 4 % faster at D = 896, and 1 % slower at 2,304 and 4,096 (benchmarks/results/tiles.md).
    wanted = _Wanted(keep or logit.metrics, not tiles.in_turn, logit.logit_sum, logit.entropy, logit.metrics)
    dtypes = wanted.dtypes

    def finish(tile: Tile, refs, scratch):
        z = tile_logits(tile, has_bias, logit)
        weights = tile.column_vectors[-1] if has_weights else None
        fields, exponentials = _tile_statistics(tile, z, weights, vocab_size, vocab_size % tiles.columns > 0, wanted)
        store_rows(tile, fields, scratch[: len(fields)], refs[: len(fields)])
        if keep:
            place = blocks.place(tile.row, tile.column) if blocks else (tile.row, tile.column)
            store_tile(tile, exponentials, scratch[-1], refs[-1], *place)

    out_types = [out_like(inputs.hidden, (cdiv(v, tiles.columns), n), dtype) for dtype in dtypes]
    scratch = [row_staging(tiles, dtype) for dtype in dtypes]
    in_place = []
    if keep:
        scratch.append(staging(inputs.hidden.dtype))
    if keep and blocks:
        in_place = [*(hopper.empty(inputs.hidden, out.shape, out.dtype) for out in out_types), blocks.array]
        out_types = []
    elif keep:
        out_types.append(out_like(inputs.hidden, (n, v), inputs.hidden.dtype))
    labels, vectors = [inputs.labels] * wanted.target, column_vectors(inputs, has_weights)
    first_column = None if span.offset is None else jnp.full(1, span.offset, jnp.int32)
    fields = list(
        product(
            Factors(inputs.hidden, inputs.weight, (1, 1 - options.vocab_dim), first_column=first_column, num_columns=v),
            tiles,
            Epilogue(
                finish,
                out_types=out_types,
                in_place=in_place,
                scratch=scratch,
                row_vectors=labels,
                column_vectors=vectors,
            ),
            name="fused_linear_cross_entropy_statistics",
        )
    )
    exponentials = fields.pop() if keep else None
    target = None if wanted.target else _target_logits(inputs, options, vocab_size, span.offset or 0)[None, :]
    return _state(fields, wanted, target, span.first), exponentials


def _tile_statistics(
    tile: Tile, z: jax.Array, weights: jax.Array | None, vocab_size: int, is_cut: bool, wanted: _Wanted
) -> tuple[list[jax.Array], jax.Array]:
    """The numbers of a tile's rows, and exp(z − maximum); columns from `vocab_size` on do not count if `is_cut`."""
    columns = tile.column_indices()
    in_vocab = columns < vocab_size - tile.column
    masked = jnp.where(in_vocab, z, -jnp.inf) if is_cut else z
    maximum = jnp.max(masked, axis=1)
    # With log2 e multiplied in, z costs one fused operation.
    shift = tile.over_rows(row_formulas.shift_of(maximum) * _LOG2_E)
    exponents = masked * _LOG2_E - shift
    exponentials = jnp.exp2(exponents)
    exp_sum = jnp.sum(exponentials, axis=1)
    fields = [maximum, exp_sum] if wanted.maximum else [row_formulas.log_normalizer(maximum, exp_sum)]
    if wanted.target:
        (labels,) = tile.row_vectors
        is_target = columns == tile.over_rows(labels - tile.column)
        fields.append(jnp.sum(jnp.where(is_target, z, 0.0), axis=1))
    if wanted.logit_sum:
        weighted = z if weights is None else z * tile.over_columns(weights)
        fields.append(jnp.sum(jnp.where(in_vocab, weighted, 0.0), axis=1))
    if wanted.entropy:
        weighted_sum = jnp.sum(exponentials * jnp.maximum(exponents, _LEAST_EXPONENT), axis=1) * (1 / _LOG2_E)
        square_sum = jnp.sum(exponentials * exponentials, axis=1)
        if not wanted.maximum:  # as sums of z − lse
            share = 1.0 / jnp.maximum(exp_sum, 0.5)  # 0 only where all logits are −inf
            weighted_sum = weighted_sum * share - jnp.log(exp_sum)
            square_sum = square_sum * (share * share)
        fields += [weighted_sum, square_sum]
    if wanted.predicted:
        at_maximum = jnp.where(masked == tile.over_rows(maximum), columns, _NO_COLUMN)
        fields.append(jnp.min(at_maximum, axis=1) + tile.column)
    return fields, exponentials


def _state(fields: list[jax.Array], wanted: _Wanted, target: jax.Array | None, first: int) -> OnlineState:
    """The tiles' numbers (tiles, N) under their names; the vocabulary's first column is `first`."""
    maximum, *rest = fields
    exp_sum = rest.pop(0) if wanted.maximum else jnp.ones_like(maximum)
    target = rest.pop(0) if wanted.target else target
    logit_sum = rest.pop(0) if wanted.logit_sum else None
    weighted_sum, square_sum = (rest.pop(0), rest.pop(0)) if wanted.entropy else (None, None)
    predicted = rest.pop(0) + first if wanted.predicted else None
    return OnlineState(maximum, exp_sum, target, logit_sum, predicted, weighted_sum, square_sum)


def _target_logits(inputs: Inputs, options: LinearOptions, vocab_size: int, offset: int) -> jax.Array:
    """The target logits (N,), made from the labels' rows of the weight; 0 where a label is not in the vocabulary."""
    labels, entries = inputs.labels, inputs.labels + offset
    weight = jnp.take(inputs.weight, entries, axis=options.vocab_dim, mode="clip").astype(jnp.float32)
    u = jnp.sum(inputs.hidden.astype(jnp.float32) * (weight.T if options.vocab_dim else weight), axis=1)
    if inputs.bias is not None:
        u += jnp.take(inputs.bias, entries, mode="clip").astype(jnp.float32)
    return jnp.where((labels >= 0) & (labels < vocab_size), row_formulas.transform(u, options.logit), 0.0)
