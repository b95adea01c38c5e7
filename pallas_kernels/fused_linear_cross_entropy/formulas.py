"""The code around the kernels that all backends of the fused linear cross-entropy share: slices, products, backward.

"fast" goes over chunks of tokens: for each chunk it computes the logits, their statistics, and then both gradients,
with 3 products of 2·N·D·V operations. "lean" goes over slices of the vocabulary, first for the statistics and then for
the gradients, with 4 products and without a buffer as large as the weight.

The formulas of a row of logits are those of cross_entropy/formulas.py.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from liger_jax.pallas_kernels.cross_entropy.formulas import LEAST_MAXIMUM, NO_LABEL, Cotangents, is_live
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import (
    Gradients,
    HeadProducts,
    Inputs,
    LinearOptions,
    Needs,
)
from liger_jax.pallas_kernels.tiles import cdiv, full_like, is_symbolic

_FIRST = np.int32(0)  # of a Python 0, jax_enable_x64 makes a loop's counter int64, which meets int32


def over_slices(
    total: int, size: int, body: Callable[[Any, Any, int], Any], carry: Any, *, last_waits: bool = False
) -> Any:
    """carry = body(carry, start, slice_size) for each slice of `total`; the last slice may be shorter.

    XLA may begin a shorter last slice before the others, and hold its results in memory meanwhile. With `last_waits` it
    has to wait for them: its start comes out of their loop, since a CPU's compiler drops barriers before it orders
    its work.
    """
    whole = total // size
    start = whole * size
    if whole == 1:
        carry = body(carry, 0, size)
    elif whole > 1 and not (last_waits and total % size):
        carry = jax.lax.fori_loop(_FIRST, whole, lambda i, carry: body(carry, i * size, size), carry)
    elif whole > 1:
        step = lambda i, state: (body(state[0], i * size, size), (i + 1) * size)
        carry, start = jax.lax.fori_loop(_FIRST, whole, step, (carry, jnp.int32(0)))
    if total % size == 0:
        return carry
    if last_waits:
        carry, start = jax.lax.optimization_barrier((carry, jnp.asarray(start, jnp.int32)))
    return body(carry, start, total % size)


def take(x: jax.Array | None, start: Any, size: int, axis: int = 0) -> jax.Array | None:
    """The slice [start, start + size) along `axis`."""
    return None if x is None else jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def over_tokens(n: int, size: int, body: Callable[[Any, Any, Any], Any], carry: Any) -> Any:
    """carry = body(carry, start, own) for chunks of `size` tokens, of which the first `own` are this chunk's.

    All chunks have one size, so that one loop body serves all of them. The first chunk therefore overlaps with the
    second, which writes over the results of the tokens that both hold.
    """
    if not is_symbolic(n) and n <= size:
        return carry if n == 0 else body(carry, 0, size)
    chunks = cdiv(n, size)
    own_of_first = n - (chunks - 1) * size
    if is_symbolic(n):  # and at least `size`: plans are made for the least number of tokens
        chunks, own_of_first = jnp.asarray(chunks, jnp.int32), jnp.asarray(own_of_first, jnp.int32)

    def step(i, carry):
        start = jnp.maximum(own_of_first + (i - 1) * size, 0)
        return body(carry, start, jnp.where(i == 0, own_of_first, size))

    return jax.lax.fori_loop(_FIRST, chunks, step, carry)


def take_tokens(inputs: Inputs, terms: Any, start: Any, size: int, own: Any = None) -> tuple[Inputs, Any]:
    """The chunk of `size` tokens from `start` on, of which the first `own` are its own; all are if None.

    Tokens that do not count or are not its own become zeros without a label, because 0 · NaN is NaN.
    """
    is_own = jnp.arange(size) < (size if own is None else own)
    y = jnp.where(is_own, take(inputs.labels, start, size), NO_LABEL)
    x = take(inputs.hidden, start, size)
    x = jnp.where(y[:, None] == NO_LABEL, jnp.zeros((), x.dtype), x)
    masked = jax.tree.map(lambda c: jnp.where(is_own, take(c, start, size), jnp.zeros((), c.dtype)), terms)
    return inputs._replace(hidden=x, labels=y), masked


def put(x: jax.Array, update: jax.Array, start: Any, axis: int = 0) -> jax.Array:
    """x with `update` at `start` along `axis`; inside a loop, XLA writes it in place."""
    return jax.lax.dynamic_update_slice_in_dim(x, update.astype(x.dtype), start, axis)


def product(
    a: jax.Array, b: jax.Array, a_axis: int, b_axis: int, options: HeadProducts, dtype: Any = jnp.float32
) -> jax.Array:
    """Contracts a's axis with b's, in their dtype, accumulated in float32, and returned in `dtype`."""
    dimensions = (((a_axis,), (b_axis,)), ((), ()))
    # cuBLAS writes 16 bits for operands of the same dtype only.
    made = jnp.float32 if jnp.dtype(dtype).itemsize < 4 and dtype != a.dtype else dtype
    product = jax.lax.dot_general(a, b, dimensions, precision=options.precision, preferred_element_type=made)
    return product.astype(dtype)


def raw_logits(hidden: jax.Array, weight: jax.Array, bias: jax.Array | None, options: HeadProducts) -> jax.Array:
    """u = hidden · weightᵀ + bias in float32."""
    u = product(hidden, weight.astype(hidden.dtype), 1, 1 - options.vocab_dim, options)
    return u if bias is None else u + bias[None, :].astype(jnp.float32)


def live_rows(hidden: jax.Array, cotangents: Cotangents) -> jax.Array:
    """hidden (N, D), with zeros for tokens on whose loss nothing depends."""
    return jnp.where(is_live(cotangents)[:, None], hidden, jnp.zeros((), hidden.dtype))


def live_normalizer(log_normalizer: jax.Array, cotangents: Cotangents) -> jax.Array:
    """lse (N,), infinite for tokens on whose loss nothing depends.

    Their probabilities exp(z − lse) are 0 then. With a finite lse they could be infinite: these tokens' hidden states
    are zeros, so that a bias alone makes their logits, and exp of a logit above 88.7 is infinite. Then 0 · ∞ would be
    NaN. No other row has an infinite lse, because an infinite logit makes it NaN. There are two exceptions. If the
    logits of a shard are all −inf, its lse is −inf and has no cotangent, though the target's logit of every shard has
    one. If all are below `LEAST_MAXIMUM`, z − lse is what was rounded, and its exp may be infinite.
    """
    no_target = cotangents._replace(target_logit=jnp.zeros_like(cotangents.target_logit), logit_sum=None)
    is_finite_or_unused = (log_normalizer > -jnp.inf) | ~is_live(no_target)
    is_empty = (log_normalizer < LEAST_MAXIMUM) & is_finite_or_unused
    return jnp.where(is_live(cotangents) & ~is_empty, log_normalizer, jnp.inf)


def weight_operands(du: jax.Array, hidden: jax.Array, options: HeadProducts) -> tuple[jax.Array, jax.Array]:
    """The operands whose product over tokens is dW in the weight's layout."""
    return (du, hidden) if options.vocab_dim == 0 else (hidden, du)


def weight_gradient(du: jax.Array, hidden: jax.Array, options: HeadProducts, dtype: Any = jnp.float32) -> jax.Array:
    """duᵀ · X in the weight's layout."""
    return product(*weight_operands(du, hidden, options), 0, 0, options, dtype)


def lean_gradients(
    inputs: Inputs,
    log_normalizer: jax.Array,
    cotangents: Cotangents,
    *,
    options: LinearOptions,
    needs: Needs,
    logit_gradients: Callable[..., jax.Array],
    last_waits: bool = False,
) -> Gradients:
    """The lean backward: for each slice of the vocabulary du, then dX += du · W and dW = duᵀ · X.

    `logit_gradients` makes du. Rows on whose loss nothing depends must reach no product: they are zeros in a copy of
    hidden. `last_waits` is for `over_slices`.
    """
    hidden, weight, labels, bias, class_weights = inputs
    log_normalizer = live_normalizer(log_normalizer, cotangents)
    hidden = live_rows(hidden, cotangents)
    vocab_dim = options.vocab_dim
    v = weight.shape[vocab_dim]

    def body(grads, start, size):
        weight_slice = take(weight, start, size, vocab_dim).astype(hidden.dtype)
        own = Inputs(hidden, weight_slice, labels - start, take(bias, start, size), take(class_weights, start, size))
        du = logit_gradients(own, log_normalizer, cotangents, options=options)
        dhidden, dweight, dbias = grads
        if needs.hidden:
            dhidden += product(du, weight_slice, 1, vocab_dim, options)
        if needs.weight:
            dweight = put(dweight, weight_gradient(du, hidden, options), start, vocab_dim)
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
        last_waits=last_waits,
    )
    return grads._replace(hidden=grads.hidden.astype(hidden.dtype) if needs.hidden else None)
