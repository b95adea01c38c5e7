"""The fused loss on Hopper with kept exponentials for a share of the vocabulary: between modes "fast" and "lean".

The statistics' product goes over all logits, and keeps E of some entries. Their du is computed from E, as in mode
"fast", and that of the others by another product, as in mode "lean". That costs 3 products plus the share that is not
kept. Most of E needs no separate memory: until the weight's gradient is written, blocks of E are stored in its place
(`KeptEntries`). The du of all slices share one array of `first` entries, so that a block is no longer needed when its
rows are overwritten.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels import hopper
from liger_jax.pallas_kernels.cross_entropy.formulas import NO_LABEL, Cotangents, Statistics
from liger_jax.pallas_kernels.fused_linear_cross_entropy import formulas
from liger_jax.pallas_kernels.fused_linear_cross_entropy import mosaic_gpu_gradients as kernels
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import Gradients, Inputs, LinearOptions, Needs
from liger_jax.pallas_kernels.fused_linear_cross_entropy.mosaic_gpu_operands import Span, cut, padded, span_of_whole
from liger_jax.pallas_kernels.fused_linear_cross_entropy.mosaic_gpu_statistics import (
    Blocks,
    merged,
    partial_statistics,
)
from liger_jax.pallas_kernels.tiles import full_like


def gradients_in_forward(
    inputs: Inputs,
    terms: Any,
    constants: Any,
    *,
    options: LinearOptions,
    needs: Needs,
    row_cotangents: Callable[[Statistics, Any, Any], Cotangents],
) -> tuple[Statistics, Gradients]:
    """Statistics and gradients with the exponentials of `options.kept`; the weight is (V, D), of hidden's dtype."""
    kept, like, v = options.kept, inputs, inputs.weight.shape[0]
    assert kept is not None
    dtypes = Gradients(inputs.hidden.dtype, inputs.weight.dtype, inputs.bias.dtype if needs.bias else None)
    inputs, terms = padded(inputs, options, terms)
    n = inputs.hidden.shape[0]
    inputs, terms = formulas.take_tokens(inputs, terms, 0, n)
    blocks = Blocks(hopper.empty(inputs.hidden, (v, kept.width), dtypes.weight), kept.first_row(n, v), n, kept.width)

    bounds = [0, kept.first, kept.first + kept.in_blocks, kept.total, v]
    spans = [span_of_whole(inputs, start, end - start) for start, end in zip(bounds, bounds[1:], strict=False)]
    first, middle, *others = [span for span in spans if span.size]
    states = []
    state, own = partial_statistics(first, options, keep=True)
    states.append(state)
    state, array = partial_statistics(middle, options, keep=True, blocks=blocks)
    states.append(state)
    rest = others.pop(0) if kept.rest else None
    of_rest = None
    if rest is not None:
        state, of_rest = partial_statistics(rest, options, keep=True)
        states.append(state)
    states += [partial_statistics(span, options, keep=False)[0] for span in others]
    maxima = [state.maximum for state in states]
    statistics = merged(states, options)
    cotangents = row_cotangents(statistics, terms, constants)
    # Gradients begin after all statistics. Only the loss needs some, whose tiles XLA would hold until the end.
    statistics, cotangents = jax.lax.optimization_barrier((statistics, cotangents))
    lse = formulas.live_normalizer(statistics.log_normalizer, cotangents)
    put = functools.partial(_put, inputs=inputs, options=options, needs=needs)
    grads = Gradients(None, array, full_like(lse, (v,), 0, dtypes.bias) if needs.bias else None)
    du_of = functools.partial(_made_of_exponentials, inputs=inputs, lse=lse, cotangents=cotangents, options=options)
    grads = put(grads, du_of(own, maxima[0], 0, kept.first), 0, kept.first)

    def of_blocks(grads, start, size):
        in_place = blocks._replace(array=grads.weight)
        per_tile = kept.in_blocks // maxima[1].shape[0]
        own = formulas.take(maxima[1], start // per_tile, size // per_tile)
        du = du_of(in_place, own, kept.first + start, size, first_block=start // kept.width)
        return put(grads, du, kept.first + start, size)

    grads = formulas.over_slices(kept.in_blocks, kept.first, of_blocks, grads)
    if of_rest is not None:
        grads = put(grads, du_of(of_rest, maxima[2], bounds[2], kept.rest), bounds[2], kept.rest)

    def of_logits(grads, start, size):
        first = jnp.asarray(kept.total + start, jnp.int32)
        du = kernels.logit_gradients(inputs, lse, cotangents, first[None], size, options, v)
        return put(grads, du, first, size)

    grads = formulas.over_slices(v - kept.total, kept.first, of_logits, grads)
    # dX in 16 bits is computed last, so that XLA can place it where hidden was, which dW reads.
    dhidden, dweight = jax.lax.optimization_barrier((grads.hidden, grads.weight))
    grads = grads._replace(hidden=dhidden, weight=dweight)
    return jax.tree.map(lambda x: x[: like.hidden.shape[0]], statistics), cut(grads, like, dtypes)


def _made_of_exponentials(
    exponentials: Any,
    maximum: jax.Array,
    start: Any,
    size: int,
    first_block: Any = None,
    *,
    inputs: Inputs,
    lse: jax.Array,
    cotangents: Cotangents,
    options: LinearOptions,
) -> jax.Array:
    """du of the entries from `start` on."""
    labels = inputs.labels - start
    labels = jnp.where((labels >= 0) & (labels < size), labels, NO_LABEL)
    class_weights = formulas.take(inputs.class_weights, start, size)
    span = Span(0, size, inputs._replace(labels=labels, class_weights=class_weights, bias=None), False)
    block = None if first_block is None else jnp.asarray(first_block, jnp.int32)[None]
    return kernels.make_logit_gradients(span, exponentials, maximum, lse, cotangents, options, block)


def _put(
    grads: Gradients, du: jax.Array, start: Any, size: int, *, inputs: Inputs, options: LinearOptions, needs: Needs
) -> Gradients:
    """The gradients with a slice's share: dX += du · W, dW = duᵀ · X. Before the first slice dX is None."""
    dhidden, dweight, dbias = grads
    first = jnp.asarray(start, jnp.int32)[None]
    if needs.hidden and hopper.can_add_in_place(inputs.hidden):
        dhidden = kernels.add_product(dhidden, du, inputs, first, options)
    elif needs.hidden:
        weight = formulas.take(inputs.weight, start, size)
        own = formulas.product(du[:, :size], weight, 1, 0, options)
        dhidden = own if dhidden is None else dhidden + own
    dweight = kernels.put_product(dweight, du, inputs.hidden, first, options)
    if dbias is not None:
        dbias = formulas.put(dbias, jnp.sum(du[:, :size].astype(jnp.float32), axis=0), start)
    return Gradients(dhidden, dweight, dbias)
