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
from typing import Any

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels import _hopper
from liger_jax.pallas_kernels._hopper_product import ROWS
from liger_jax.pallas_kernels._tiles import full_like, round_up
from liger_jax.pallas_kernels.cross_entropy import formulas as row_formulas
from liger_jax.pallas_kernels.cross_entropy.formulas import Cotangents, Statistics
from liger_jax.pallas_kernels.fused_linear_cross_entropy import formulas
from liger_jax.pallas_kernels.fused_linear_cross_entropy import mosaic_gpu_kernels as kernels
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import Gradients, Inputs, LinearOptions, Needs, Typed

_WIDEST_SOFTCAP = 40.0  # up to this |z|, exp(z − maximum) is a normal number, whose logarithm gives z back


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
    if options.mode == "fast" and options.logit.entropy:
        return "its mode='fast' keeps no logits to make entropies of; use mode='lean', or 'xla'."
    softcap = (options.logit.softcap or 0.0) * abs(options.logit.scale)
    if options.mode != "lean" and softcap > _WIDEST_SOFTCAP:
        return (
            f"logit_scale · logit_softcap = {softcap} is above {_WIDEST_SOFTCAP}, where logits cannot be recovered "
            "from what mode='fast' keeps; use mode='lean', or 'xla'."
        )
    return None


def _padded(inputs: Inputs, *vectors: Any) -> Any:
    """The inputs and vectors of rows in whole tiles. Rows that are added have no label, and are zeros."""
    n = inputs.hidden.shape[0]
    extra = round_up(n, ROWS) - n
    inputs = inputs._replace(weight=inputs.weight.astype(inputs.hidden.dtype))
    if extra:
        hidden = jnp.pad(inputs.hidden, ((0, extra), (0, 0)))
        labels = jnp.pad(inputs.labels, (0, extra), constant_values=row_formulas.NO_LABEL)
        inputs = inputs._replace(hidden=hidden, labels=labels)
        vectors = jax.tree.map(lambda x: jnp.pad(x, (0, extra)), vectors)
    return inputs, *vectors


def _zeros_if(like: jax.Array, needed: bool | None, shape: tuple[int, ...], dtype: Any) -> jax.Array | None:
    """Zeros for a loop's carry, or None where nobody asks for them."""
    return full_like(like, shape, 0, dtype) if needed else None


def statistics(inputs: Inputs, *, options: LinearOptions) -> Statistics:
    """The statistics of all rows, each (N,)."""
    n = inputs.hidden.shape[0]
    (inputs,) = _padded(inputs)
    parts, _ = kernels.partial_statistics(inputs, options, keep=False)
    return jax.tree.map(lambda x: x[:n], row_formulas.online_merge(parts, options.logit))


def gradients(
    inputs: Inputs, log_normalizer: jax.Array, cotangents: Cotangents, *, options: LinearOptions, needs: Needs
) -> Gradients:
    """The lean backward: for each slice of the vocabulary du, then dX += du · W and dW = duᵀ · X."""
    in_place = _hopper.can_write_in_place(inputs.hidden)
    n, v = inputs.hidden.shape[0], inputs.weight.shape[options.vocab_dim]
    dtypes = Gradients(inputs.hidden.dtype, inputs.weight.dtype, inputs.bias.dtype if needs.bias else None)
    inputs = inputs._replace(hidden=formulas.live_rows(inputs.hidden, cotangents))
    inputs, lse, cotangents = _padded(inputs, formulas.live_rows(log_normalizer, cotangents), cotangents)

    def body(grads, start, size):
        dhidden, dweight, dbias = grads
        start = jnp.asarray(start, jnp.int32)[None]
        du = kernels.logit_gradients(inputs, lse, cotangents, start, size, options)
        if not in_place:
            du = du[:, :size]
        if needs.hidden and _hopper.can_add_in_place(inputs.hidden):
            dhidden = kernels.add_product(dhidden, du, inputs, start, options)
        elif needs.hidden:
            part = formulas.take(inputs.weight, start[0], size, options.vocab_dim)
            dhidden += formulas.product(du[:, :size], part, 1, options.vocab_dim, options)
        if needs.weight and in_place:
            dweight = kernels.put_product(dweight, du, inputs.hidden, start, options)
        elif needs.weight:
            part = formulas.weight_gradient(du, inputs.hidden, options)
            dweight = formulas.put(dweight, part, start[0], options.vocab_dim)
        if needs.bias:
            dbias = formulas.put(dbias, jnp.sum(du[:, :size].astype(jnp.float32), axis=0), start[0])
        return Gradients(dhidden, dweight, dbias)

    zeros_of = functools.partial(_zeros_if, inputs.hidden)
    zeros = Gradients(
        zeros_of(needs.hidden, inputs.hidden.shape, jnp.float32),
        zeros_of(needs.weight, inputs.weight.shape, dtypes.weight),
        zeros_of(needs.bias, (v,), dtypes.bias),
    )
    if needs.weight and in_place:
        zeros = zeros._replace(weight=_hopper.empty(inputs.hidden, inputs.weight.shape, dtypes.weight))
    # Slices begin at whole tiles.
    grads = formulas.over_slices(v, min(round_up(options.chunk_size, 2 * ROWS), v), body, zeros)
    return grads._replace(hidden=grads.hidden[:n].astype(dtypes.hidden) if needs.hidden else None)


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
    n, v = inputs.hidden.shape[0], inputs.weight.shape[options.vocab_dim]
    dtypes = Gradients(inputs.hidden.dtype, inputs.weight.dtype, inputs.bias.dtype if needs.bias else None)
    inputs, terms = _padded(inputs, terms)
    padded = inputs.hidden.shape[0]
    chunk_size = min(round_up(options.chunk_size, ROWS), padded)
    one_chunk = chunk_size == padded
    in_bytes = (
        needs.weight and not one_chunk and dtypes.weight.itemsize == 2 and _hopper.can_write_in_place(inputs.hidden)
    )

    def body(carry, start, size):
        stats, (dhidden, dweight, dbias) = carry
        part, chunk_terms = formulas.take_tokens(inputs, terms, start, size)
        parts, exponentials = kernels.partial_statistics(part, options, keep=True)
        chunk_stats = row_formulas.online_merge(parts, options.logit)
        lse = chunk_stats.log_normalizer
        cotangents = row_cotangents(chunk_stats, chunk_terms, constants)
        du = kernels.make_logit_gradients(exponentials, parts.maximum, part, lse, cotangents, options)
        if needs.weight and in_bytes:
            is_last = jnp.asarray(start + size == padded, jnp.int32)
            which = jnp.where(start == 0, kernels.FIRST_PART, is_last * kernels.LAST_PART)  # else 0
            high, low = dweight
            dweight = kernels.add_to_sum(high, low, du, part.hidden, which[None], options)
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
    kinds = Statistics(*[jnp.float32] * 7)._replace(predicted_token=jnp.int32)
    metrics, entropy = options.logit.metrics, options.logit.entropy
    wanted = Statistics(True, True, options.logit.logit_sum, metrics, metrics, entropy, entropy)
    zeros = Statistics(*(zeros_of(want, (padded,), kind) for want, kind in zip(wanted, kinds, strict=True)))
    start_carry = (
        zeros,
        Gradients(
            zeros_of(needs.hidden, inputs.hidden.shape, dtypes.hidden),
            accumulators,
            zeros_of(needs.bias, (v,), jnp.float32),
        ),
    )
    stats, grads = formulas.over_slices(padded, chunk_size, body, start_carry, last_waits=True)
    return jax.tree.map(lambda x: x[:n], stats), Gradients(
        grads.hidden[:n] if needs.hidden else None,
        grads.weight[0] if in_bytes else grads.weight.astype(dtypes.weight) if needs.weight else None,
        grads.bias.astype(dtypes.bias) if needs.bias else None,
    )
