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
from typing import Any

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels import _hopper
from liger_jax.pallas_kernels._hopper_product import ROWS
from liger_jax.pallas_kernels._tiles import full_like, round_up
from liger_jax.pallas_kernels.cross_entropy import formulas as row_formulas
from liger_jax.pallas_kernels.cross_entropy.formulas import Coefficients, Cotangents, Statistics
from liger_jax.pallas_kernels.fused_linear_cross_entropy import formulas
from liger_jax.pallas_kernels.fused_linear_cross_entropy import mosaic_gpu_kernels as kernels
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import Gradients, Inputs, LinearOptions, Needs, Typed

_PIECE = 64  # what the copy engine moves at once of an inner axis
_WIDEST_SOFTCAP = 40.0  # up to this |z|, exp(z − maximum) is a normal number, whose logarithm gives z back


def unsupported(hidden: Typed, weight: Typed, *others: jax.Array | None, options: LinearOptions) -> str | None:
    """16-bit operands, and in mode "fast" logits that can be recovered from what it keeps."""
    if hidden.dtype not in (jnp.bfloat16, jnp.float16):
        return f"Hopper's matrix units take bfloat16 and float16, and hidden is {hidden.dtype}; use 'xla'."
    softcap = (options.logit.softcap or 0.0) * abs(options.logit.scale)
    if options.mode != "lean" and softcap > _WIDEST_SOFTCAP:
        return (
            f"logit_scale · logit_softcap = {softcap} is above {_WIDEST_SOFTCAP}, where logits cannot be recovered "
            "from what mode='fast' keeps; use mode='lean', or 'xla'."
        )
    return None


def _extended(x: jax.Array, *sizes: int) -> jax.Array:
    """x with zeros behind each axis, up to `sizes`."""
    extra = [(0, size - old) for size, old in zip(sizes, x.shape, strict=True)]
    return jnp.pad(x, extra) if any(more for _, more in extra) else x


def _padded(inputs: Inputs, options: LinearOptions, *vectors: Any) -> Any:
    """The inputs and vectors of rows in sizes that the copy engine moves, with zeros and rows without labels.

    Rows come in whole tiles, and inner axes in pieces of 64. In mode "lean" no array but a weight (D, V) has the
    vocabulary as its inner axis; a weight (V, D) then needs whole tiles of shared memory only, which have 8 rows.
    Forward and backward ask for the same copy of the weight, and within one program XLA makes it once.
    """
    n, d = inputs.hidden.shape
    v = inputs.weight.shape[options.vocab_dim]
    rows, width = round_up(n, ROWS), round_up(d, _PIECE)
    entries = round_up(v, 8 if options.mode == "lean" and options.vocab_dim == 0 else _PIECE)
    weight = inputs.weight.astype(inputs.hidden.dtype)
    labels = jnp.pad(inputs.labels, (0, rows - n), constant_values=row_formulas.NO_LABEL)
    padded = Inputs(
        _extended(inputs.hidden, rows, width),
        _extended(weight, *((entries, width) if options.vocab_dim == 0 else (width, entries))),
        labels,
        *(None if x is None else _extended(x, entries) for x in (inputs.bias, inputs.class_weights)),
    )
    return padded, *jax.tree.map(lambda x: _extended(x, rows), vectors)


def _cut(grads: Gradients, like: Inputs, dtypes: Gradients) -> Gradients:
    """The gradients without what `_padded` added, in their dtypes."""
    cut = lambda grad, x, dtype: None if grad is None else grad[tuple(map(slice, x.shape))].astype(dtype)
    return Gradients(*map(cut, grads, (like.hidden, like.weight, like.bias), dtypes))


def _zeros_if(like: jax.Array, needed: bool | None, shape: tuple[int, ...], dtype: Any) -> jax.Array | None:
    """Zeros for a loop's carry, or None where nobody asks for them."""
    return full_like(like, shape, 0, dtype) if needed else None


def statistics(inputs: Inputs, *, options: LinearOptions) -> Statistics:
    """The statistics of all rows, each (N,)."""
    n, v = inputs.hidden.shape[0], inputs.weight.shape[options.vocab_dim]
    (inputs,) = _padded(inputs, options)
    parts, _ = kernels.partial_statistics(inputs, options, v, keep=False)
    return jax.tree.map(lambda x: x[:n], row_formulas.online_merge(parts, options.logit))


def gradients(
    inputs: Inputs, log_normalizer: jax.Array, cotangents: Cotangents, *, options: LinearOptions, needs: Needs
) -> Gradients:
    """The lean backward: for each slice of the vocabulary du, then dX += du · W and dW = duᵀ · X."""
    like, v = inputs, inputs.weight.shape[options.vocab_dim]
    dtypes = Gradients(inputs.hidden.dtype, inputs.weight.dtype, inputs.bias.dtype if needs.bias else None)
    inputs = inputs._replace(hidden=formulas.live_rows(inputs.hidden, cotangents))
    inputs, lse, cotangents = _padded(inputs, options, formulas.live_rows(log_normalizer, cotangents), cotangents)
    in_place = _hopper.can_write_in_place(inputs.hidden)
    # The copy engine cannot write to sizes that it cannot read. There XLA writes dW, so that no array holds it padded.
    puts_in_place = in_place and inputs.weight.shape == like.weight.shape

    def body(grads, start, size):
        dhidden, dweight, dbias = grads
        start = jnp.asarray(start, jnp.int32)[None]
        du = kernels.logit_gradients(inputs, lse, cotangents, start, size, options, v)
        if needs.hidden and _hopper.can_add_in_place(inputs.hidden):
            dhidden = kernels.add_product(dhidden, du, inputs, start, options)
        elif needs.hidden:
            part = formulas.take(inputs.weight, start[0], size, options.vocab_dim)
            dhidden += formulas.product(du[:, :size], part, 1, options.vocab_dim, options)
        if needs.weight and puts_in_place:
            dweight = kernels.put_product(dweight, du, inputs.hidden, start, options)
        elif needs.weight:
            part = formulas.weight_gradient(du, inputs.hidden, options, dtypes.weight)
            own = (size, like.hidden.shape[1]) if options.vocab_dim == 0 else (like.hidden.shape[1], size)
            dweight = formulas.put(dweight, part[: own[0], : own[1]], start[0], options.vocab_dim)
        if needs.bias:
            dbias = formulas.put(dbias, jnp.sum(du[:, :size].astype(jnp.float32), axis=0), start[0])
        return Gradients(dhidden, dweight, dbias)

    zeros_of = functools.partial(_zeros_if, inputs.hidden)
    zeros = Gradients(
        zeros_of(needs.hidden, inputs.hidden.shape, jnp.float32),
        None,
        zeros_of(needs.bias, (v,), dtypes.bias),
    )
    if needs.weight:
        # XLA (jaxlib 0.12.0) fails where it fuses the call that makes the whole with the writing of a slice.
        whole = jax.lax.optimization_barrier(_hopper.empty(inputs.hidden, like.weight.shape, dtypes.weight))
        zeros = zeros._replace(weight=whole)
    # Slices begin at whole tiles.
    grads = formulas.over_slices(v, min(round_up(options.chunk_size, 2 * ROWS), v), body, zeros)
    return _cut(grads, like, dtypes)


def gradients_in_forward(
    inputs: Inputs, coefficients: Coefficients, class_weight_sum: jax.Array, *, options: LinearOptions, needs: Needs
) -> tuple[Statistics, Gradients]:
    """The fast mode: for each chunk of tokens E and statistics, du in E's place, dX = du · W, and dW (+)= duᵀ · X."""
    like, n, v = inputs, inputs.hidden.shape[0], inputs.weight.shape[options.vocab_dim]
    dtypes = Gradients(inputs.hidden.dtype, inputs.weight.dtype, inputs.bias.dtype if needs.bias else None)
    inputs, coefficients = _padded(inputs, options, coefficients)
    padded = inputs.hidden.shape[0]
    chunk_size = min(round_up(options.chunk_size, ROWS), padded)
    one_chunk = chunk_size == padded
    in_bytes = (
        needs.weight and not one_chunk and dtypes.weight.itemsize == 2 and _hopper.can_write_in_place(inputs.hidden)
    )

    def body(carry, start, size):
        stats, (dhidden, dweight, dbias) = carry
        part, chunk_coefficients = formulas.take_tokens(inputs, coefficients, start, size)
        parts, exponentials = kernels.partial_statistics(part, options, v, keep=True)
        chunk_stats = row_formulas.online_merge(parts, options.logit)
        lse = chunk_stats.log_normalizer
        cotangents = row_formulas.row_cotangents(lse, chunk_coefficients, class_weight_sum)
        du = kernels.make_logit_gradients(exponentials, parts.maximum, part, lse, cotangents, options, v)
        if needs.weight and in_bytes:
            is_last = jnp.asarray(start + size == padded, jnp.int32)
            which = jnp.where(start == 0, kernels.FIRST_PART, is_last * kernels.LAST_PART)  # else 0
            dweight = kernels.add_to_sum(*dweight, du, part.hidden, which[None], options)
        elif needs.weight and one_chunk:
            dweight = formulas.weight_gradient(du, part.hidden, options, dtypes.weight)
        elif needs.weight and _hopper.can_add_in_place(inputs.hidden):
            dweight = kernels.put_product(dweight, du, part.hidden, jnp.zeros(1, jnp.int32), options, add=True)
        elif needs.weight:
            dweight += formulas.weight_gradient(du, part.hidden, options)
        if needs.hidden:
            if not one_chunk:  # dX comes after dW: then the chunk of dX can lie where the chunk of X did
                du, dweight = jax.lax.optimization_barrier((du, dweight))
            part_gradient = formulas.product(du, inputs.weight, 1, options.vocab_dim, options, dtypes.hidden)
            dhidden = formulas.put(dhidden, part_gradient, start)
        if needs.bias:
            dbias += jnp.sum(du.astype(jnp.float32), axis=0)
        stats = jax.tree.map(lambda whole, part: formulas.put(whole, part, start), stats, chunk_stats)
        return stats, Gradients(dhidden, dweight, dbias)

    zeros_of = functools.partial(_zeros_if, inputs.hidden)
    accumulators = zeros_of(needs.weight, inputs.weight.shape, dtypes.weight if one_chunk else jnp.float32)
    if in_bytes:
        unset = functools.partial(_hopper.empty, inputs.hidden, inputs.weight.shape)
        accumulators = unset(dtypes.weight), unset(jnp.uint8)
    kinds = Statistics(jnp.float32, jnp.float32, jnp.float32, jnp.float32, jnp.int32)
    wanted = Statistics(True, True, options.logit.logit_sum, options.logit.metrics, options.logit.metrics)
    zeros = Statistics(*(zeros_of(want, (padded,), kind) for want, kind in zip(wanted, kinds, strict=True)))
    start_carry = (
        zeros,
        Gradients(
            zeros_of(needs.hidden, inputs.hidden.shape, dtypes.hidden),
            accumulators,
            zeros_of(needs.bias, (inputs.weight.shape[options.vocab_dim],), jnp.float32),
        ),
    )
    stats, grads = formulas.over_slices(padded, chunk_size, body, start_carry, last_waits=True)
    if in_bytes:
        grads = grads._replace(weight=grads.weight[0])
    return jax.tree.map(lambda x: x[:n], stats), _cut(grads, like, dtypes)
