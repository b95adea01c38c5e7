"""Fused linear cross-entropy in Pallas for TPU.

Statistics: the float32 tile of logits is the accumulator of its product over d, and stays in VMEM. An online
log-sum-exp folds it into one number for each row and lane. Lanes are summed once, at the end of a row tile.
lean: for each slice of the vocabulary the same product, with the softmax's gradient as its epilogue, writes du.
fast: the product of the statistics also writes E = exp(z − the row's maximum so far), and one pass over E writes du in
its place.
The two products with du are XLA's, which schedules them better than a kernel that would keep rewriting dX and dW.
Memory passes: fast writes E, reads and writes it once more as du, and reads du twice.
Memory: on tpu7x the compiler by default copies 16-bit arrays that a loop reads or writes, the weight and dW too, into
tiles of 16 rows; its option xla_tpu_control_large_2nd_minor_layout_for_x16=false avoids that.
Rounding: statistics and losses come from the float32 accumulators. E has hidden's dtype, so its rounding costs 2^-9 of
a probability, where the rounding of a logit z would cost |z| · 2^-9. du is rounded once more.
Nothing has run on a TPU. Times are counted from the compiler's schedules (benchmarks/results/tpu_schedule.md).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels.cross_entropy import formulas as row_formulas
from liger_jax.pallas_kernels.cross_entropy.formulas import Cotangents, Statistics
from liger_jax.pallas_kernels.fused_linear_cross_entropy import (
    buffers,
    formulas,
    mosaic_tpu_gradients,
    mosaic_tpu_statistics,
    mosaic_tpu_tiles,
)
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import Gradients, Inputs, LinearOptions, Needs, Typed
from liger_jax.pallas_kernels.tiles import cdiv, full_like, round_up

_WIDEST_SOFTCAP = 40.0  # up to this |z|, exp(z − maximum) is a normal number, whose logarithm gives z back


def unsupported(hidden: Typed, weight: Typed, *others: jax.Array | None, options: LinearOptions) -> str | None:
    """float32 and bfloat16, a precision that Mosaic has, and in mode "fast" logits that E gives back."""
    if hidden.dtype not in (jnp.float32, jnp.bfloat16):
        return f"the TPU kernel supports float32 and bfloat16, and hidden is {hidden.dtype}; use 'xla'."
    if options.precision not in (None, jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGHEST):
        return f"Mosaic's products do not support precision={options.precision}; use None, 'highest', or 'xla'."
    softcap = (options.logit.softcap or 0.0) * abs(options.logit.scale)
    if options.mode != "lean" and softcap > _WIDEST_SOFTCAP:
        return (
            f"logit_scale · logit_softcap = {softcap} is above {_WIDEST_SOFTCAP}, where logits cannot be recovered "
            "from what mode='fast' keeps; use mode='lean', or 'xla'."
        )
    return None


def statistics(inputs: Inputs, *, options: LinearOptions, interpret: bool) -> Statistics:
    """The statistics of all rows, each (N,)."""
    return mosaic_tpu_statistics.statistics(inputs, options=options, interpret=interpret)[0]


def gradients(
    inputs: Inputs,
    log_normalizer: jax.Array,
    cotangents: Cotangents,
    *,
    options: LinearOptions,
    needs: Needs,
    interpret: bool,
) -> Gradients:
    """The lean backward: for each slice of the vocabulary du, then dX += du · W and dW = duᵀ · X."""
    hidden, weight, _, bias, _ = inputs
    v, vocab_dim = weight.shape[options.vocab_dim], options.vocab_dim
    like, inputs = weight, inputs._replace(weight=weight.astype(hidden.dtype))
    log_normalizer = formulas.live_normalizer(log_normalizer, cotangents)
    du_of = functools.partial(mosaic_tpu_gradients.logit_gradients, inputs, log_normalizer, cotangents)

    def body(grads, start, size):
        dhidden, dweight, dbias = grads
        du = du_of(start, size, options=options, interpret=interpret)
        if needs.hidden:
            weight_slice = formulas.take(inputs.weight, start, size, vocab_dim)
            dhidden += formulas.product(du, weight_slice, 1, vocab_dim, options)
        if needs.weight:
            # The product masks its operand while it reads it. The barrier makes the mask seem to depend on the slice:
            # otherwise XLA makes a masked copy of hidden before the loop.
            x = formulas.live_rows(hidden, jax.lax.optimization_barrier((cotangents, start))[0])
            dweight = formulas.put(dweight, formulas.weight_gradient(du, x, options), start, vocab_dim)
        if needs.bias:
            dbias = formulas.put(dbias, jnp.sum(du.astype(jnp.float32), axis=0), start)
        return Gradients(dhidden, dweight, dbias)

    start_carry = Gradients(
        full_like(hidden, hidden.shape, 0, jnp.float32) if needs.hidden else None,
        mosaic_tpu_tiles.empty(hidden, like.shape, like.dtype, interpret) if needs.weight else None,
        full_like(hidden, (v,), 0, bias.dtype) if needs.bias and bias is not None else None,
    )
    grads = formulas.over_slices(v, min(options.chunk_size, v), body, start_carry)
    return grads._replace(hidden=grads.hidden.astype(hidden.dtype) if needs.hidden else None)


def gradients_in_forward(
    inputs: Inputs,
    terms: Any,
    constants: Any,
    *,
    options: LinearOptions,
    needs: Needs,
    row_cotangents: Callable[[Statistics, Any, Any], Cotangents],
    interpret: bool,
) -> tuple[Statistics, Gradients]:
    """The fast mode: for each chunk of tokens E and statistics, du in E's place, dX = du · W and dW (+)= duᵀ · X.

    `row_cotangents` makes the loss's derivatives from the statistics and the terms of a chunk's rows, and `constants`.
    """
    hidden, weight, _, bias, _ = inputs
    n, v, vocab_dim = hidden.shape[0], weight.shape[options.vocab_dim], options.vocab_dim
    inputs = inputs._replace(weight=weight.astype(hidden.dtype))

    def of_chunk(start, own, sum_dtype):
        """The chunk's statistics, its dX, and its terms of dW and of the bias's gradient."""
        chunk, chunk_terms = formulas.take_tokens(inputs, terms, start, size, own)
        stats, exponentials, maxima = mosaic_tpu_statistics.statistics(
            chunk, options=options, interpret=interpret, keep=True
        )
        cotangents = row_cotangents(stats, chunk_terms, constants)
        lse = formulas.live_normalizer(stats.log_normalizer, cotangents)
        du = mosaic_tpu_gradients.make_logit_gradients(
            exponentials, maxima, chunk, lse, cotangents, options=options, interpret=interpret
        )
        dweight = formulas.weight_gradient(du, chunk.hidden, options, sum_dtype) if needs.weight else None
        if needs.weight and needs.hidden:  # dX comes last: then it can be where the chunk of X did
            du, dweight = jax.lax.optimization_barrier((du, dweight))
        dhidden = formulas.product(du, chunk.weight, 1, vocab_dim, options, hidden.dtype) if needs.hidden else None
        dbias = jnp.sum(du.astype(jnp.float32), axis=0) if needs.bias else None
        return stats, Gradients(dhidden, dweight, dbias)

    def body(carry, start, own):
        stats, (dhidden, dweight, dbias) = carry
        chunk_stats, grads = of_chunk(start, own, jnp.float32)
        stats = jax.tree.map(lambda whole, chunk: formulas.put(whole, chunk, start), stats, chunk_stats)
        return stats, Gradients(
            formulas.put(dhidden, grads.hidden, start) if needs.hidden else None,
            dweight + grads.weight if needs.weight else None,
            dbias + grads.bias if needs.bias else None,
        )

    size = min(options.chunk_size, n)
    if size == n:
        stats, grads = of_chunk(0, n, weight.dtype)
    else:
        no_state = jax.tree.map(lambda field: field.reshape(1, n), row_formulas.online_start(n, options.logit))
        start_stats = jax.eval_shape(lambda: row_formulas.online_merge(no_state, options.logit))
        zeros = functools.partial(full_like, hidden, value=0)
        start_carry = (
            jax.tree.map(lambda field: zeros(shape=field.shape, dtype=field.dtype), start_stats),
            Gradients(
                zeros(shape=hidden.shape, dtype=hidden.dtype) if needs.hidden else None,
                zeros(shape=weight.shape, dtype=jnp.float32) if needs.weight else None,
                zeros(shape=(v,), dtype=jnp.float32) if needs.bias else None,
            ),
        )
        stats, grads = formulas.over_tokens(n, size, body, start_carry)
    return stats, Gradients(
        grads.hidden,
        grads.weight.astype(weight.dtype) if needs.weight else None,
        grads.bias.astype(bias.dtype) if needs.bias and bias is not None else None,
    )


# --- memory -----------------------------------------------------------------------------------------------------------


_LEAST_ENTRIES = 1024  # of a tile


def _fast_bytes(sizes: buffers.Sizes, tokens: int) -> buffers.Buffers:
    """A chunk holds E, which du overwrites, but no float32 logits."""
    du = buffers.logit_gradient_bytes(sizes, tokens, sizes.v)
    hidden = tokens * sizes.d * sizes.itemsize  # without the rows that do not count, and then its gradient
    strip_maxima = 4 * tokens * round_up(cdiv(sizes.v, 256), 128)
    chunk = du + strip_maxima + hidden + buffers.row_number_bytes(tokens)
    is_whole = tokens >= sizes.n  # then dW is one product
    of_weight = sizes.weight_copy_bytes if is_whole else buffers.summed_bytes(sizes, tokens, du)
    return buffers.Buffers(chunk + sizes.gathered_bytes + of_weight, chunk)


def _lean_bytes(sizes: buffers.Sizes, entries: int) -> buffers.Buffers:
    """A slice has du: the weight's slice is read, and dW's is written, in its place."""
    of_slice = _slice_bytes(sizes, entries)
    fixed = sizes.weight_copy_bytes + buffers.row_number_bytes(sizes.n)
    if not any(sizes.gradients):
        return buffers.Buffers(fixed, of_slice)
    return buffers.Buffers(of_slice + sizes.hidden_sum_bytes + fixed, of_slice)


def _slice_bytes(sizes: buffers.Sizes, entries: int) -> int:
    if sizes.weight_is_split:
        return buffers.gathered_slice_bytes(sizes, entries)
    return buffers.logit_gradient_bytes(sizes, max(sizes.n, 1), entries)


def _entries(sizes: buffers.Sizes) -> int:
    """Up to 64 MiB of du, and up to 7,168 entries."""
    most = min(max(2048, 2**26 // (sizes.itemsize * max(sizes.n, 1))), 7168)
    quarter = buffers.entries_of_a_quarter(sizes, _slice_bytes(sizes, 1))
    return max(_LEAST_ENTRIES, min(most, quarter) // 1024 * 1024)


MEMORY = buffers.Memory(
    fast=_fast_bytes,
    lean=_lean_bytes,
    preferred_tokens=lambda sizes: buffers.one_chunk_or_8192(sizes, _fast_bytes),
    preferred_entries=_entries,
    least_entries=_LEAST_ENTRIES,
)
