"""Fused linear cross-entropy in plain XLA: products by XLA's own library, logits in chunks.

fast: for each chunk of tokens the logits, their statistics, and at once both gradients.
lean: statistics over slices of the vocabulary, then slices again for the gradients. dW is written once, dX is summed in
float32.
Rounding: logits and statistics are float32. The gradient by the logits is rounded to hidden's dtype before its
products, as in an unfused step. In mode fast, dW is summed over chunks in float32.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels.cross_entropy import formulas as row_formulas
from liger_jax.pallas_kernels.cross_entropy import xla as cross_entropy
from liger_jax.pallas_kernels.cross_entropy.formulas import Cotangents, Statistics
from liger_jax.pallas_kernels.fused_linear_cross_entropy import buffers, formulas
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import Gradients, Inputs, LinearOptions, Needs
from liger_jax.pallas_kernels.fused_linear_cross_entropy.formulas import product, put, take
from liger_jax.pallas_kernels.tiles import full_like, is_symbolic

_ENTRIES_OF_SYMBOLIC = 2048  # in a slice of logits where the number of tokens is not known


def statistics(inputs: Inputs, *, options: LinearOptions) -> Statistics:
    """The statistics of all rows, each (N,)."""
    hidden, weight, labels, bias, class_weights = inputs
    n, v = hidden.shape[0], weight.shape[options.vocab_dim]
    start_state = row_formulas.online_start(n, options.logit)
    start_state = jax.tree.map(lambda x: full_like(hidden, x.shape, 0, x.dtype) + x, start_state)

    def body(state, start, size):
        u = formulas.raw_logits(hidden, take(weight, start, size, options.vocab_dim), take(bias, start, size), options)
        columns = start + jnp.arange(size, dtype=jnp.int32)[None, :]
        weights = take(class_weights, start, size)
        return row_formulas.online_update(
            state,
            row_formulas.transform(u, options.logit),
            columns,
            jnp.ones_like(columns, dtype=bool),
            labels[:, None],
            None if weights is None else weights[None, :],
            # XLA may make z twice and round it in two ways, so that no z need be equal to the maximum.
            first_of=lambda z, _, columns, axis: columns[:, :1] + jnp.argmax(z, axis, keepdims=True).astype(jnp.int32),
        )

    # As many logits at a time as a chunk of the fast mode holds.
    as_many = _ENTRIES_OF_SYMBOLIC if is_symbolic(n) else max(1, options.chunk_size * v // max(n, 1))
    size = options.chunk_size if options.mode == "lean" else as_many
    state = formulas.over_slices(v, min(size, v), body, start_state, last_waits=True)
    states = jax.tree.map(lambda field: field.reshape(1, n), state)
    return row_formulas.online_merge(states, options.logit)


def logit_gradients(
    inputs: Inputs, log_normalizer: jax.Array, cotangents: Cotangents, *, options: LinearOptions
) -> jax.Array:
    """du (N, v) in hidden's dtype for the vocabulary entries in `weight`; labels count from its first entry."""
    hidden, weight, labels, bias, class_weights = inputs
    u = formulas.raw_logits(hidden, weight, bias, options)
    return row_formulas.logit_gradient(
        u,
        jnp.arange(u.shape[1], dtype=jnp.int32)[None, :],
        labels[:, None],
        log_normalizer[:, None],
        jax.tree.map(lambda g: g[:, None], cotangents),
        None if class_weights is None else class_weights[None, :],
        options.logit,
    ).astype(hidden.dtype)


def gradients(
    inputs: Inputs, log_normalizer: jax.Array, cotangents: Cotangents, *, options: LinearOptions, needs: Needs
) -> Gradients:
    """The lean backward, with du from XLA."""
    return formulas.lean_gradients(
        inputs,
        log_normalizer,
        cotangents,
        options=options,
        needs=needs,
        logit_gradients=logit_gradients,
        last_waits=True,
    )


def gradients_in_forward(
    inputs: Inputs,
    terms: Any,
    constants: Any,
    *,
    options: LinearOptions,
    needs: Needs,
    row_cotangents: Callable[[Statistics, Any, Any], Cotangents],
) -> tuple[Statistics, Gradients]:
    """The fast mode: for each chunk of tokens logits, statistics, du, dX = du · W and dW += duᵀ · X.

    `row_cotangents` makes the loss's derivatives from the statistics and the terms of a chunk's rows, and `constants`.
    """
    hidden, weight, labels, bias, class_weights = inputs
    n, v = hidden.shape[0], weight.shape[options.vocab_dim]
    products_weight = weight.astype(hidden.dtype)
    logit_statistics = functools.partial(cross_entropy.statistics, options=options.logit)
    empty = jax.eval_shape(lambda: logit_statistics(jnp.zeros((n, v), jnp.float32), labels, class_weights))
    size = min(options.chunk_size, max(n, 1))

    def body(carry, start, own):
        stats, (dhidden, dweight, dbias) = carry
        (x, _, y, _, _), chunk_terms = formulas.take_tokens(inputs, terms, start, size, own)
        u = formulas.raw_logits(x, products_weight, bias, options)
        chunk_stats = logit_statistics(u, y, class_weights)
        cotangents = row_cotangents(chunk_stats, chunk_terms, constants)
        du = row_formulas.logit_gradient(
            u,
            jnp.arange(v, dtype=jnp.int32)[None, :],
            y[:, None],
            formulas.live_normalizer(chunk_stats.log_normalizer, cotangents)[:, None],
            jax.tree.map(lambda g: g[:, None], cotangents),
            None if class_weights is None else class_weights[None, :],
            options.logit,
        )
        if needs.bias:
            dbias += jnp.sum(du, axis=0)
        du = du.astype(hidden.dtype)
        if needs.hidden:
            dhidden = put(dhidden, product(du, products_weight, 1, options.vocab_dim, options), start)
        if needs.weight:
            dweight += formulas.weight_gradient(du, x, options)
        stats = jax.tree.map(lambda whole, chunk: put(whole, chunk, start), stats, chunk_stats)
        return stats, Gradients(dhidden, dweight, dbias)

    start_carry = (
        jax.tree.map(lambda field: full_like(hidden, field.shape, 0, field.dtype), empty),
        Gradients(
            full_like(hidden, hidden.shape, 0, hidden.dtype) if needs.hidden else None,
            full_like(hidden, weight.shape, 0, jnp.float32) if needs.weight else None,
            full_like(hidden, (v,), 0, jnp.float32) if needs.bias else None,
        ),
    )
    stats, grads = formulas.over_tokens(n, size, body, start_carry)
    return stats, Gradients(
        grads.hidden,
        grads.weight.astype(weight.dtype) if needs.weight else None,
        grads.bias.astype(bias.dtype) if needs.bias else None,
    )


# --- memory -----------------------------------------------------------------------------------------------------------


def _fast_bytes(sizes: buffers.Sizes, tokens: int) -> buffers.Buffers:
    """A chunk has float32 logits and du."""
    logits, du = 4 * tokens * sizes.v, buffers.logit_gradient_bytes(sizes, tokens, sizes.v)
    # A GPU adds a chunk's dX to what there is of it; on a CPU it is where the logits were.
    dx = tokens * sizes.d * sizes.itemsize if sizes.platform == "gpu" else 0
    chunk = logits + du + dx
    return buffers.Buffers(chunk + sizes.gathered_bytes + buffers.summed_bytes(sizes, tokens, logits, du), chunk)


def _lean_bytes(sizes: buffers.Sizes, entries: int) -> buffers.Buffers:
    """A slice has float32 logits, du, its rows of the weight in hidden's dtype, and its rows of dW."""
    n, d, itemsize = sizes.n, sizes.d, sizes.itemsize
    of_slice = _slice_bytes(sizes, entries)
    if not any(sizes.gradients):
        return buffers.Buffers(4 * n * entries + entries * d * itemsize, of_slice)
    if _writes_in_place(sizes):
        # The forward holds a slice. The backward holds its logits, its weights, the masked hidden states, and dX.
        of_gradients = 4 * (n * entries + entries * d + 2 * n * d)
        return buffers.Buffers(max(of_slice, of_gradients) + 7 * 4 * n, of_slice)  # seven numbers a token
    masked_hidden = n * d * itemsize
    return buffers.Buffers(of_slice + sizes.hidden_sum_bytes + masked_hidden, of_slice)


def _slice_bytes(sizes: buffers.Sizes, entries: int) -> int:
    n, weights = max(sizes.n, 1), entries * sizes.d
    du, logits = buffers.logit_gradient_bytes(sizes, n, entries), 4 * n * entries
    if _writes_in_place(sizes):
        return logits + max(logits, 4 * weights)
    # On a GPU a float32 dW's slice is written where it belongs.
    is_written_in_place = sizes.platform == "gpu" and sizes.weight_itemsize == 4
    return du + logits + weights * (sizes.itemsize if is_written_in_place else 4 + sizes.itemsize)


def _writes_in_place(sizes: buffers.Sizes) -> bool:
    """Float32 on a CPU: the compiler writes du over the logits, and dW's slice where it belongs."""
    is_float32 = sizes.itemsize == sizes.weight_itemsize == 4
    return sizes.platform == "cpu" and is_float32 and not sizes.weight_is_split


MEMORY = buffers.Memory(
    fast=_fast_bytes,
    lean=_lean_bytes,
    preferred_entries=lambda sizes: buffers.entries_of_128_mib(sizes, _slice_bytes(sizes, 1)),
)
