"""Fused linear cross-entropy in plain XLA: products by XLA's own library, logits in chunks.

fast: for each chunk of tokens the logits, their statistics, and at once both gradients (3 products of 2·N·D·V).
lean: statistics over slices of the vocabulary, then slices again for the gradients (4 products); dW is written
once, dX accumulates in float32.
Rounding: logits and statistics float32; the logits' gradient is rounded to hidden's dtype before its products, as
in an unfused step; dW is summed over chunks in float32.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels._tiles import full_like
from liger_jax.pallas_kernels.cross_entropy import formulas as rows
from liger_jax.pallas_kernels.cross_entropy.formulas import Coefficients, Cotangents, Statistics
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import Gradients, Inputs, LinearOptions, Needs, Typed


def unsupported(hidden: Typed, weight: Typed, *others: jax.Array | None, options: LinearOptions) -> str | None:
    """XLA runs every case."""
    return None


def over_slices(
    total: int, size: int, body: Callable[[Any, Any, int], Any], carry: Any, *, last_waits: bool = False
) -> Any:
    """carry = body(carry, start, slice_size) for each slice of `total`; the last may be shorter.

    last_waits: XLA may begin a shorter last slice before the others, and hold what it has made of it over them, unless
    it has to wait.
    """
    whole = total // size
    if whole == 1:
        carry = body(carry, 0, size)
    elif whole > 1:
        carry = jax.lax.fori_loop(0, whole, lambda i, carry: body(carry, i * size, size), carry)
    if total % size == 0:
        return carry
    start = whole * size
    if last_waits:
        carry, start = jax.lax.optimization_barrier((carry, jnp.int32(start)))
    return body(carry, start, total % size)


def take(x: jax.Array | None, start: Any, size: int, axis: int = 0) -> jax.Array | None:
    """The slice [start, start + size) along `axis`."""
    return None if x is None else jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def over_tokens(n: int, size: int, body: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
    """carry = body(carry, start, own) for chunks of `size` tokens, of which the first `own` are this chunk's.

    All chunks are of one size, so that one loop body serves all: the first chunk overlaps with the second, which
    writes over what both hold.
    """
    parts = -(-n // size)
    if parts <= 1:
        return carry if n == 0 else body(carry, 0, size)
    own_of_first = n - (parts - 1) * size

    def step(i, carry):
        start = jnp.maximum(own_of_first + (i - 1) * size, 0)
        return body(carry, start, jnp.where(i == 0, own_of_first, size))

    return jax.lax.fori_loop(0, parts, step, carry)


def take_tokens(
    inputs: Inputs, coefficients: Coefficients, start: Any, size: int, own: Any = None
) -> tuple[Inputs, Coefficients]:
    """A chunk of tokens; those that do not count, or are not its own, are zeros without a label: 0 · NaN is NaN."""
    is_own = jnp.arange(size) < (size if own is None else own)
    y = jnp.where(is_own, take(inputs.labels, start, size), rows.NO_LABEL)
    x = take(inputs.hidden, start, size)
    x = jnp.where(y[:, None] == rows.NO_LABEL, jnp.zeros((), x.dtype), x)
    masked = jax.tree.map(lambda c: jnp.where(is_own, take(c, start, size), 0.0), coefficients)
    return inputs._replace(hidden=x, labels=y), masked


def put(x: jax.Array, part: jax.Array, start: Any, axis: int = 0) -> jax.Array:
    """Writes `part` at `start` along `axis`, in place inside a loop."""
    return jax.lax.dynamic_update_slice_in_dim(x, part.astype(x.dtype), start, axis)


def product(
    a: jax.Array, b: jax.Array, a_axis: int, b_axis: int, options: LinearOptions, dtype: Any = jnp.float32
) -> jax.Array:
    """Contracts a's axis with b's, in their dtype, accumulated in float32, and returned in `dtype`."""
    dimensions = (((a_axis,), (b_axis,)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, precision=options.precision, preferred_element_type=dtype)


def raw_logits(hidden: jax.Array, weight: jax.Array, bias: jax.Array | None, options: LinearOptions) -> jax.Array:
    """u = hidden · weightᵀ + bias in float32."""
    u = product(hidden, weight.astype(hidden.dtype), 1, 1 - options.vocab_dim, options)
    return u if bias is None else u + bias[None, :].astype(jnp.float32)


def statistics(inputs: Inputs, *, options: LinearOptions) -> Statistics:
    """See `Inputs` → Statistics of (N,)."""
    hidden, weight, labels, bias, class_weights = inputs
    n, v = hidden.shape[0], weight.shape[options.vocab_dim]
    start_state = jax.tree.map(
        lambda field: full_like(hidden, field.shape, 0, field.dtype) + field, rows.online_start(n, options.logit)
    )

    def body(state, start, size):
        u = raw_logits(hidden, take(weight, start, size, options.vocab_dim), take(bias, start, size), options)
        columns = start + jnp.arange(size, dtype=jnp.int32)[None, :]
        weights = take(class_weights, start, size)
        return rows.online_update(
            state,
            rows.transform(u, options.logit),
            columns,
            jnp.ones_like(columns, dtype=bool),
            labels[:, None],
            None if weights is None else weights[None, :],
        )

    # As many logits at a time as a chunk of the fast mode holds.
    size = options.chunk_size if options.mode == "lean" else max(1, options.chunk_size * v // max(n, 1))
    state = over_slices(v, min(size, v), body, start_state)
    parts = jax.tree.map(lambda field: field.reshape(1, n), state)
    return rows.online_merge(parts, options.logit)


def logit_gradients(
    inputs: Inputs, log_normalizer: jax.Array, cotangents: Cotangents, *, options: LinearOptions
) -> jax.Array:
    """du (N, v) in hidden's dtype for the vocabulary entries in `weight`; labels count from its first entry."""
    hidden, weight, labels, bias, class_weights = inputs
    u = raw_logits(hidden, weight, bias, options)
    return rows.logit_gradient(
        u,
        jnp.arange(u.shape[1], dtype=jnp.int32)[None, :],
        labels[:, None],
        log_normalizer[:, None],
        jax.tree.map(lambda g: g[:, None], cotangents),
        None if class_weights is None else class_weights[None, :],
        options.logit,
    ).astype(hidden.dtype)


def live_rows(x: jax.Array, cotangents: Cotangents) -> jax.Array:
    """x (N,) or (N, D), with zeros for tokens on whose loss nothing depends."""
    live = rows.is_live(cotangents)
    return jnp.where(live if x.ndim == 1 else live[:, None], x, jnp.zeros((), x.dtype))


def gradients(
    inputs: Inputs,
    log_normalizer: jax.Array,
    cotangents: Cotangents,
    *,
    options: LinearOptions,
    needs: Needs,
    logit_gradients: Callable[..., jax.Array] = logit_gradients,
    mask_once: bool = True,
) -> Gradients:
    """The lean backward: slice by slice of the vocabulary, du, then dX += du · W and dW = duᵀ · X.

    `mask_once` makes a copy of hidden without the rows on which nothing depends. Otherwise `logit_gradients` leaves
    them out of du, and dW's product takes the mask along, as a TPU's can: N·D values less.
    """
    hidden, weight, labels, bias, class_weights = inputs
    log_normalizer = live_rows(log_normalizer, cotangents)
    hidden = live_rows(hidden, cotangents) if mask_once else hidden
    vocab_dim = options.vocab_dim
    v = weight.shape[vocab_dim]

    def body(grads, start, size):
        weight_slice = take(weight, start, size, vocab_dim).astype(hidden.dtype)
        part = Inputs(hidden, weight_slice, labels - start, take(bias, start, size), take(class_weights, start, size))
        du = logit_gradients(part, log_normalizer, cotangents, options=options)
        dhidden, dweight, dbias = grads
        if needs.hidden:
            dhidden += product(du, weight_slice, 1, vocab_dim, options)
        if needs.weight:
            x = hidden
            if not mask_once:  # a mask that seems to depend on the slice is not applied ahead of the loop
                x = live_rows(hidden, jax.lax.optimization_barrier((cotangents, start))[0])
            dweight = put(dweight, weight_gradient(du, x, options), start, vocab_dim)
        if needs.bias:
            dbias = put(dbias, jnp.sum(du.astype(jnp.float32), axis=0), start)
        return Gradients(dhidden, dweight, dbias)

    grads = over_slices(
        v,
        min(options.chunk_size, v),
        body,
        Gradients(
            full_like(hidden, hidden.shape, 0, jnp.float32) if needs.hidden else None,
            full_like(hidden, weight.shape, 0, weight.dtype) if needs.weight else None,
            full_like(hidden, (v,), 0, bias.dtype) if needs.bias else None,
        ),
    )
    return grads._replace(hidden=grads.hidden.astype(hidden.dtype) if needs.hidden else None)


def weight_gradient(du: jax.Array, hidden: jax.Array, options: LinearOptions, dtype: Any = jnp.float32) -> jax.Array:
    """duᵀ · X in the weight's layout."""
    operands = (du, hidden) if options.vocab_dim == 0 else (hidden, du)
    return product(*operands, 0, 0, options, dtype)


def gradients_in_forward(
    inputs: Inputs, coefficients: Coefficients, class_weight_sum: jax.Array, *, options: LinearOptions, needs: Needs
) -> tuple[Statistics, Gradients]:
    """The fast mode: chunk by chunk of tokens, logits, statistics, du, dX = du · W and dW += duᵀ · X."""
    hidden, weight, labels, bias, class_weights = inputs
    n, v = hidden.shape[0], weight.shape[options.vocab_dim]
    products_weight = weight.astype(hidden.dtype)
    empty = jax.eval_shape(lambda: rows.statistics(jnp.zeros((n, v)), labels, class_weights, options=options.logit))

    size = min(options.chunk_size, max(n, 1))

    def body(carry, start, own):
        stats, (dhidden, dweight, dbias) = carry
        (x, _, y, _, _), chunk_coefficients = take_tokens(inputs, coefficients, start, size, own)
        u = raw_logits(x, products_weight, bias, options)
        chunk_stats = rows.statistics(u, y, class_weights, options=options.logit)
        lse = chunk_stats.log_normalizer
        du = rows.logit_gradient(
            u,
            jnp.arange(v, dtype=jnp.int32)[None, :],
            y[:, None],
            lse[:, None],
            jax.tree.map(lambda g: g[:, None], rows.row_cotangents(lse, chunk_coefficients, class_weight_sum)),
            None if class_weights is None else class_weights[None, :],
            options.logit,
        )
        if needs.bias:
            dbias += jnp.sum(du, axis=0)
        du = du.astype(hidden.dtype)
        if needs.hidden:
            dhidden = put(dhidden, product(du, products_weight, 1, options.vocab_dim, options), start)
        if needs.weight:
            dweight += weight_gradient(du, x, options)
        stats = jax.tree.map(lambda whole, part: put(whole, part, start), stats, chunk_stats)
        return stats, Gradients(dhidden, dweight, dbias)

    start_carry = (
        jax.tree.map(lambda field: full_like(hidden, field.shape, 0, field.dtype), empty),
        Gradients(
            full_like(hidden, hidden.shape, 0, hidden.dtype) if needs.hidden else None,
            full_like(hidden, weight.shape, 0, jnp.float32) if needs.weight else None,
            full_like(hidden, (v,), 0, jnp.float32) if needs.bias else None,
        ),
    )
    stats, grads = over_tokens(n, size, body, start_carry)
    return stats, Gradients(
        grads.hidden,
        grads.weight.astype(weight.dtype) if needs.weight else None,
        grads.bias.astype(bias.dtype) if needs.bias else None,
    )
