"""Fused linear cross-entropy in Pallas Mosaic GPU (Hopper): products at the matrix units' speed, with our epilogues.

Statistics: each tile of logits is folded, in the registers that hold it, into one number a row. XLA merges the tiles'
numbers.
lean: for each slice of the vocabulary the same product, with the softmax's gradient as its epilogue, writes du. A
second product adds du · W to dX, and a third writes duᵀ · X to its place in dW.
fast: the product also writes E = exp(z − the tile's maximum), and one pass over E writes du in its place. If one chunk
holds all tokens, dW is one product. Otherwise it is summed over chunks, in float32, or in three bytes if the weight has
16 bits.
Memory passes: fast writes E, reads and writes it once more as du, and reads du twice.
Rounding: statistics and losses come from the float32 accumulators. E is relative to its tile's maximum. So its rounding
costs 2^-9 of a probability, where the rounding of a logit z would cost |z| · 2^-9. du is rounded once more.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels import hopper
from liger_jax.pallas_kernels._hopper_tiles import ROWS
from liger_jax.pallas_kernels.cross_entropy.formulas import Cotangents, Statistics
from liger_jax.pallas_kernels.fused_linear_cross_entropy import formulas, mosaic_gpu_kept
from liger_jax.pallas_kernels.fused_linear_cross_entropy import mosaic_gpu_gradients as kernels
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import Gradients, Inputs, LinearOptions, Needs, Typed
from liger_jax.pallas_kernels.fused_linear_cross_entropy.mosaic_gpu_buffers import MEMORY
from liger_jax.pallas_kernels.fused_linear_cross_entropy.mosaic_gpu_operands import (
    TILE_COLUMNS,
    Span,
    bounds_of_spans,
    cut,
    padded,
    span_of,
    spans_of,
    takes,
)
from liger_jax.pallas_kernels.fused_linear_cross_entropy.mosaic_gpu_statistics import (
    merged,
    partial_statistics,
    statistics,
)
from liger_jax.pallas_kernels.tiles import full_like, round_up

__all__ = ["MEMORY", "gradients", "gradients_in_forward", "statistics", "unsupported"]

_WIDEST_SOFTCAP = 40.0  # up to this |z|, exp(z − maximum) is a normal number, whose logarithm gives z back


def unsupported(hidden: Typed, weight: Typed, *others: jax.Array | None, options: LinearOptions) -> str | None:
    """16-bit operands, and in mode "fast" logits that can be recovered from what it keeps."""
    if hidden.dtype not in (jnp.bfloat16, jnp.float16):
        return f"Hopper's matrix units support bfloat16 and float16, and hidden is {hidden.dtype}; use 'xla'."
    if options.mode == "fast" and options.logit.entropy:
        return "its mode='fast' keeps no logits to make entropies of; use mode='lean', or 'xla'."
    softcap = (options.logit.softcap or 0.0) * abs(options.logit.scale)
    if options.mode != "lean" and softcap > _WIDEST_SOFTCAP:
        return (
            f"logit_scale · logit_softcap = {softcap} is above {_WIDEST_SOFTCAP}, where logits cannot be recovered "
            "from what mode='fast' keeps; use mode='lean', or 'xla'."
        )
    return None


# --- lean -------------------------------------------------------------------------------------------------------------


def gradients(
    inputs: Inputs, log_normalizer: jax.Array, cotangents: Cotangents, *, options: LinearOptions, needs: Needs
) -> Gradients:
    """The lean backward: for each slice of the vocabulary du, then dX += du · W and dW = duᵀ · X."""
    like, v = inputs, inputs.weight.shape[options.vocab_dim]
    dtypes = Gradients(inputs.hidden.dtype, inputs.weight.dtype, inputs.bias.dtype if needs.bias else None)
    inputs = inputs._replace(hidden=formulas.live_rows(inputs.hidden, cotangents))
    inputs, lse, cotangents = padded(inputs, options, log_normalizer, cotangents)
    lse = formulas.live_normalizer(lse, cotangents)  # nothing depends on the rows that were added, either
    # Otherwise each slice of the weight is copied, and padded if need be.
    reads_in_place = takes(v, options.mode, options.vocab_dim)
    writes_in_place = reads_in_place and hopper.can_write_in_place(inputs.hidden)
    width = like.hidden.shape[1]

    def body(grads, first, size):
        dhidden, dweight, dbias = grads
        own, start = inputs, jnp.asarray(first, jnp.int32)[None]
        if not reads_in_place:
            own, start = span_of(inputs, first, size, options).inputs, jnp.zeros_like(start)
        du = kernels.logit_gradients(own, lse, cotangents, start, size, options, v if reads_in_place else size)
        if needs.hidden and hopper.can_add_in_place(inputs.hidden):
            dhidden = kernels.add_product(dhidden, du, own, start, options)
        elif needs.hidden:
            weight = formulas.take(own.weight, start[0], size, options.vocab_dim)
            dhidden += formulas.product(du[:, :size], weight, 1, options.vocab_dim, options)
        if needs.weight and writes_in_place:
            dweight = kernels.put_product(dweight, du, inputs.hidden, start, options)
        elif needs.weight:
            product = kernels.weight_gradient(du, inputs.hidden, options, dtypes.weight)
            rows, columns = (size, width) if options.vocab_dim == 0 else (width, size)
            dweight = formulas.put(dweight, product[:rows, :columns], first, options.vocab_dim)
        if needs.bias:
            dbias = formulas.put(dbias, jnp.sum(du[:, :size].astype(jnp.float32), axis=0), first)
        return Gradients(dhidden, dweight, dbias)

    zeros_of = functools.partial(_zeros_if, inputs.hidden)
    shape = inputs.weight.shape if writes_in_place else like.weight.shape
    start_carry = Gradients(
        zeros_of(needs.hidden, inputs.hidden.shape, jnp.float32),
        hopper.empty_for_slices(inputs.hidden, shape, dtypes.weight) if needs.weight else None,
        zeros_of(needs.bias, (v,), dtypes.bias),
    )
    # Slices begin at whole tiles.
    size = min(round_up(options.chunk_size, TILE_COLUMNS), v)
    grads = formulas.over_slices(v, size, body, start_carry, last_waits=not reads_in_place)
    return cut(grads, like, dtypes)


def _zeros_if(like: jax.Array, needed: bool | None, shape: tuple[int, ...], dtype: Any) -> jax.Array | None:
    """Zeros for a loop's carry, or None where nobody asks for them."""
    return full_like(like, shape, 0, dtype) if needed else None


# --- fast -------------------------------------------------------------------------------------------------------------


def gradients_in_forward(
    inputs: Inputs,
    terms: Any,
    constants: Any,
    *,
    options: LinearOptions,
    needs: Needs,
    row_cotangents: Callable[[Statistics, Any, Any], Cotangents],
) -> tuple[Statistics, Gradients]:
    """The fast mode: for each chunk of tokens E and statistics, du in E's place, dX = du · W, and dW (+)= duᵀ · X.

    `row_cotangents` makes the loss's derivatives from the statistics and the terms of a chunk's rows, and `constants`.
    """
    if options.kept is not None and needs.weight and hopper.can_write_in_place(inputs.hidden):
        return mosaic_gpu_kept.gradients_in_forward(
            inputs, terms, constants, options=options, needs=needs, row_cotangents=row_cotangents
        )
    like, n = inputs, inputs.hidden.shape[0]
    dtypes = Gradients(inputs.hidden.dtype, inputs.weight.dtype, inputs.bias.dtype if needs.bias else None)
    inputs, terms = padded(inputs, options, terms)
    total = inputs.hidden.shape[0]
    chunk_size = min(round_up(options.chunk_size, ROWS), total)
    one_chunk = chunk_size == total
    sum_of_weight = _WeightSum.over_chunks(inputs.hidden, one_chunk, dtypes.weight, options)

    def body(carry, start, size):
        stats, (dhidden, dweight, dbias) = carry
        chunk, chunk_terms = formulas.take_tokens(inputs, terms, start, size)
        spans = spans_of(chunk, options)
        chunk_stats, dus = _logit_gradients(
            spans, options, lambda statistics: row_cotangents(statistics, chunk_terms, constants)
        )
        if needs.weight:
            is_last = jnp.asarray(start + size == total, jnp.int32)
            which = jnp.where(start == 0, kernels.FIRST_CHUNK, is_last * kernels.LAST_CHUNK)[None]  # else 0
            dweight = [sum_of_weight.added(*each, which) for each in zip(dweight, spans, dus, strict=True)]
        if needs.hidden:
            if not one_chunk:  # dX comes after dW: then the chunk of dX can be where the chunk of X did
                dus, dweight = jax.lax.optimization_barrier((dus, dweight))
            dhidden = formulas.put(dhidden, _hidden_gradient(spans, dus, options, dtypes.hidden), start)
        if needs.bias:
            own = [jnp.sum(du[:, : span.size].astype(jnp.float32), axis=0) for span, du in zip(spans, dus, strict=True)]
            dbias += jnp.concatenate(own)
        stats = jax.tree.map(lambda whole, chunk: formulas.put(whole, chunk, start), stats, chunk_stats)
        return stats, Gradients(dhidden, dweight, dbias)

    zeros_of = functools.partial(_zeros_if, inputs.hidden)
    accumulators = sum_of_weight.start(inputs) if needs.weight else None
    start_carry = (
        _no_statistics(inputs.hidden, options),
        Gradients(
            zeros_of(needs.hidden, inputs.hidden.shape, dtypes.hidden),
            accumulators,
            zeros_of(needs.bias, (like.weight.shape[options.vocab_dim],), jnp.float32),
        ),
    )
    stats, grads = formulas.over_slices(total, chunk_size, body, start_carry, last_waits=True)
    if needs.weight:
        # After dX, so that until then a copy of the weight can be where dW will.
        after = grads.hidden if needs.hidden else inputs.hidden
        grads = grads._replace(weight=sum_of_weight.whole(grads.weight, like.weight.shape, after))
    return jax.tree.map(lambda x: x[:n], stats), cut(grads, like, dtypes)


def _logit_gradients(
    spans: list[Span], options: LinearOptions, cotangents_of: Callable[[Statistics], Cotangents]
) -> tuple[Statistics, list[jax.Array]]:
    """The statistics of a chunk of tokens, and du of each span of the vocabulary, where E was."""
    states, kept = [], []
    for span in spans:
        state, exponentials = partial_statistics(span, options, keep=True)
        states.append(state)
        kept.append(exponentials)
    statistics = merged(states, options)
    cotangents = cotangents_of(statistics)
    lse = formulas.live_normalizer(statistics.log_normalizer, cotangents)
    dus = [
        kernels.make_logit_gradients(span, e, state.maximum, lse, cotangents, options)
        for span, e, state in zip(spans, kept, states, strict=True)
    ]
    return statistics, dus


def _hidden_gradient(spans: list[Span], dus: list[jax.Array], options: LinearOptions, dtype: Any) -> jax.Array:
    """du · W of a chunk of tokens, over all spans of the vocabulary."""

    def of_span(span, du):
        if span.is_slice:
            return kernels.hidden_gradient(du, span.inputs.weight, options, dtype)
        own_dtype = jnp.float32 if span.first else dtype
        return formulas.product(du, span.inputs.weight, 1, options.vocab_dim, options, own_dtype)

    dx, *rest = [of_span(span, du) for span, du in zip(spans, dus, strict=True)]
    for more in rest:  # of one tile, in float32
        dx = dx.astype(jnp.float32) + more
    return dx


def _no_statistics(hidden: jax.Array, options: LinearOptions) -> Statistics:
    """Zeros (N,) in place of the statistics that are asked for."""
    kinds = Statistics(*[jnp.float32] * 7)._replace(predicted_token=jnp.int32)
    metrics, entropy = options.logit.metrics, options.logit.entropy
    wanted = Statistics(True, True, options.logit.logit_sum, metrics, metrics, entropy, entropy)
    zeros = [_zeros_if(hidden, want, hidden.shape[:1], kind) for want, kind in zip(wanted, kinds, strict=True)]
    return Statistics(*zeros)


class _WeightSum(NamedTuple):
    """How dW comes together over chunks of tokens, with a sum for each span of the vocabulary.

    One chunk of all tokens makes dW at once. Several chunks are added up: in float32, or if the weight has 16 bits, in
    three bytes. dW holds the upper two of these.
    """

    one_chunk: bool
    in_bytes: bool
    dtype: Any
    options: LinearOptions

    @classmethod
    def over_chunks(cls, hidden: jax.Array, one_chunk: bool, dtype: Any, options: LinearOptions) -> "_WeightSum":
        """The way to sum in one chunk, or in several."""
        in_bytes = not one_chunk and dtype.itemsize == 2 and hopper.can_write_in_place(hidden)
        return cls(one_chunk, in_bytes, dtype, options)

    def start(self, inputs: Inputs) -> list[Any]:
        """What each span's sum is before the first chunk."""
        like, shapes = inputs.hidden, [span.inputs.weight.shape for span in spans_of(inputs, self.options)]
        if self.in_bytes:
            return [(hopper.empty(like, s, self.dtype), hopper.empty(like, s, jnp.uint8)) for s in shapes]
        return [_zeros_if(like, not self.one_chunk, shape, jnp.float32) for shape in shapes]

    def added(self, total: Any, span: Span, du: jax.Array, which: jax.Array) -> Any:
        """A span's sum with a chunk's duᵀ · X; `which` says whether the chunk is the first or the last."""
        hidden, options = span.inputs.hidden, self.options
        if self.in_bytes:
            high, low = total
            return kernels.add_to_sum(high, low, du, hidden, which, options)
        if self.one_chunk and span.is_slice:
            return kernels.weight_gradient(du, hidden, options, self.dtype)
        if self.one_chunk:
            return formulas.weight_gradient(du, hidden, options, self.dtype)
        if hopper.can_add_in_place(hidden):
            return kernels.put_product(total, du, hidden, jnp.zeros(1, jnp.int32), options, add=True)
        return total + formulas.weight_gradient(du, hidden, options)

    def whole(self, totals: list[Any], shape: tuple[int, ...], after: jax.Array) -> jax.Array:
        """dW from its spans' sums. From jaxlib 0.11 on, XLA has the first span's product write to its place there."""
        pieces = [total[0] if self.in_bytes else total for total in totals]
        if len(pieces) == 1:
            return pieces[0]
        vocab_dim = self.options.vocab_dim
        whole, width = hopper.empty_for_slices(after, shape, self.dtype), shape[1 - vocab_dim]
        bounds = bounds_of_spans(shape[vocab_dim], self.options)
        for piece, (start, size) in reversed(list(zip(pieces, bounds, strict=True))):
            piece = piece[:size, :width] if vocab_dim == 0 else piece[:width, :size]
            whole = formulas.put(whole, piece, start, vocab_dim)
        return whole
