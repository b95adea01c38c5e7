"""How the distillation losses go over tokens and vocabulary, whatever backend makes the products.

A chunk of tokens has all of the vocabulary, so that its losses and the gradient by its logits are made at once:

- "fast": dX = du · W and dW += duᵀ · X follow at once, in the forward. That is three products of the student, and one
  of the teacher. The backend says how dW is summed over chunks. A chunk of all tokens holds du for all of them instead,
  made from the logits of 1,024 tokens at a time: dW is then one product, without a sum.
- "lean": the forward makes dX for a cotangent of 1, which the backward only multiplies by each token's own. The
  backward makes the logits once more, in slices of the vocabulary, and writes each slice of dW once. That is four
  products of the student, and two of the teacher.

A teacher whose log-probabilities are stored costs no product.

Rounding: raw logits and the gradient by them are rounded to hidden's dtype, as in an unfused step, which halves what 16
bits move between memory and the passes over a chunk. All else is float32.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import Needs
from liger_jax.pallas_kernels.fused_linear_cross_entropy.formulas import (
    over_slices,
    over_tokens,
    product,
    put,
    raw_logits,
    take,
    weight_gradient,
)
from liger_jax.pallas_kernels.fused_linear_distillation import cosine_formulas, formulas, topk_formulas
from liger_jax.pallas_kernels.fused_linear_distillation.config import Head, HeadOptions
from liger_jax.pallas_kernels.fused_linear_distillation.topk_formulas import TopK
from liger_jax.pallas_kernels.tiles import full_like

TOKENS_OF_LOGITS = 1024  # at a time, where the gradient by all logits is held
Gradients = tuple[jax.Array | None, jax.Array | None, jax.Array | None]


class Backend(NamedTuple):
    """What a backend makes of a chunk of tokens."""

    # x (n, D), weight in its dtype, bias, the head's options → raw logits (n, V), and log Σ exp(z) (n,) or None
    logits: Callable[..., tuple[jax.Array, jax.Array | None]]
    # like, shape, dtype → an array for du, all of which will be written
    empty: Callable[..., jax.Array]
    # like, the weight's shape and dtype → what dW's sum is before the first chunk
    start_of_sum: Callable[..., Any]
    # the sum, du (n, V), x (n, D), the head's options, whether it is the first chunk, the last → the sum with duᵀ · X
    add_to_sum: Callable[..., Any]
    # the sum after the last chunk, the weight's dtype → dW
    end_of_sum: Callable[..., jax.Array]
    chunk_multiple: int  # tokens of a chunk are a multiple of it


def by_tokens(
    student: Head,
    teacher: Head | TopK,
    labels: jax.Array,
    scale: jax.Array,
    *,
    options: Any,
    needs: Needs,
    backend: Backend,
) -> tuple[jax.Array, Any, Gradients]:
    """Each token's loss (N,), not scaled; its statistics; and the gradients of Σ scale · loss that are asked for.

    `scale` is (N,) float32. A token whose scale is 0 has zeros, whatever its hidden states hold.
    """
    n, vocab_dim = student.hidden.shape[0], options.student.vocab_dim
    size, is_whole, is_summed = _chunks(n, options.tokens, needs, backend.chunk_multiple)
    weight = student.weight.astype(student.hidden.dtype)
    teacher = _in_dtype_of_products(teacher)
    loss_formulas = _formulas_of(teacher, options)

    def chunk(first, own):
        scales = jnp.where(jnp.arange(size) < own, take(scale, first, size), 0.0)
        x = live_rows(take(student.hidden, first, size), scales)
        raw, lse = backend.logits(x, weight, student.bias, options.student)
        of_teacher, teacher_lse = _of_tokens(teacher, first, size, scales, options, backend)
        y = take(labels, first, size)
        losses, statistics = loss_formulas.reduced(raw, of_teacher, y, options, (lse, teacher_lse))
        # The barrier keeps XLA from writing float32 arrays of the chunk for both passes: the second makes them again.
        raw, of_teacher, known = jax.lax.optimization_barrier((raw, of_teacher, statistics))
        # The bias's gradient is a sum of what is not rounded.
        dtype = jnp.float32 if needs.bias else x.dtype
        arrays = raw, of_teacher, y, known, scales
        return losses, statistics, x, lambda: loss_formulas.logit_gradient(*arrays, 0, options, dtype)

    def body(carry, first, own):
        rows, (dhidden, dweight, dbias, all_du) = carry
        losses, statistics, x, gradient = chunk(first, own)
        rows = jax.tree.map(lambda whole, chunk: put(whole, chunk, first), rows, (losses, statistics))
        if any(needs):
            du, entries = gradient()
            if needs.bias:
                du, entries = formulas.with_entries(du, entries), None
                dbias += jnp.sum(du, axis=0)
            du = du.astype(x.dtype)
            if is_whole:
                all_du = formulas.with_entries(put(all_du, du, first), entries, first)
                return rows, (dhidden, dweight, dbias, all_du)
            du = formulas.with_entries(du, entries)
            if needs.hidden:
                dhidden = put(dhidden, product(du, weight, 1, vocab_dim, options.student, x.dtype), first)
            if is_summed:
                dweight = backend.add_to_sum(dweight, du, x, options.student, first == 0, first + size == n)
            elif needs.weight:
                dweight = weight_gradient(du, x, options.student, student.weight.dtype)
        return rows, (dhidden, dweight, dbias, all_du)

    of_chunk = jax.eval_shape(lambda: chunk(0, size)[:2])
    rows = jax.tree.map(lambda x: full_like(student.hidden, (n, *x.shape[1:]), 0, x.dtype), of_chunk)
    start = rows, _before_first_chunk(student, vocab_dim, needs, is_whole, is_summed, backend)
    (losses, statistics), (dhidden, dweight, dbias, du) = over_tokens(n, size, body, start)
    if is_whole:
        x = live_rows(student.hidden, scale)
        dhidden = product(du, weight, 1, vocab_dim, options.student, x.dtype) if needs.hidden else None
        dweight = weight_gradient(du, x, options.student, student.weight.dtype)
    elif is_summed:
        dweight = backend.end_of_sum(dweight, student.weight.dtype)
    return losses, statistics, (dhidden, dweight, None if dbias is None else dbias.astype(student.bias.dtype))


def _chunks(n: int, tokens: int, needs: Needs, multiple: int) -> tuple[int, bool, bool]:
    """How many tokens a chunk has; whether du is held for all tokens; and whether dW is a sum over chunks."""
    is_whole = needs.weight and tokens >= n > TOKENS_OF_LOGITS  # without dW, dX of a chunk follows at once
    wanted = TOKENS_OF_LOGITS if is_whole else tokens
    size = min(max(multiple, wanted // multiple * multiple), n)
    return size, is_whole, needs.weight and not is_whole and not size == n > 0


def _before_first_chunk(
    student: Head, vocab_dim: int, needs: Needs, is_whole: bool, is_summed: bool, backend: Backend
) -> tuple[Any, Any, Any, Any]:
    """What dX, dW's sum, the bias's gradient and du are before the first chunk; None for those that are not made."""
    x, weight = student.hidden, student.weight
    return (
        full_like(x, x.shape, 0, x.dtype) if needs.hidden and not is_whole else None,
        backend.start_of_sum(x, weight.shape, weight.dtype) if is_summed else None,
        full_like(x, (weight.shape[vocab_dim],), 0, jnp.float32) if needs.bias else None,
        backend.empty(x, (x.shape[0], weight.shape[vocab_dim]), x.dtype) if is_whole else None,
    )


def by_vocabulary(
    student: Head,
    teacher: Head | TopK,
    labels: jax.Array,
    statistics: Any,
    scale: jax.Array,
    *,
    options: Any,
    needs: Needs,
) -> Gradients:
    """The gradients of Σ scale · loss by the student's weight and bias, from the statistics of `by_tokens`."""
    vocab_dim = options.student.vocab_dim
    v = student.weight.shape[vocab_dim]
    x = live_rows(student.hidden, scale)
    statistics = jax.tree.map(lambda field: live_rows(field, scale), statistics)
    gradient_of = _formulas_of(teacher, options).logit_gradient

    def body(grads, first, size):
        dweight, dbias = grads
        rows_of_weight = take(student.weight, first, size, vocab_dim).astype(x.dtype)
        raw = logits(x, rows_of_weight, take(student.bias, first, size), options.student)
        of_teacher = _of_entries(teacher, first, size, scale, options)
        dtype = jnp.float32 if needs.bias else x.dtype
        gradient = gradient_of(raw, of_teacher, labels, statistics, scale, first, options, dtype)
        du = formulas.with_entries(*gradient)
        if needs.bias:
            dbias = put(dbias, jnp.sum(du, axis=0), first)
        if needs.weight:
            own = weight_gradient(du.astype(x.dtype), x, options.student, dweight.dtype)
            dweight = put(dweight, own, first, vocab_dim)
        return dweight, dbias

    start = (
        full_like(x, student.weight.shape, 0, student.weight.dtype) if needs.weight else None,
        full_like(x, (v,), 0, student.bias.dtype) if needs.bias else None,
    )
    return None, *over_slices(v, min(options.entries, v), body, start, last_waits=True)


def _formulas_of(teacher: Head | TopK, options: Any) -> ModuleType:
    """The module with the loss's `reduced` and `logit_gradient`."""
    if isinstance(teacher, TopK):
        return topk_formulas
    return cosine_formulas if options.divergence == "cosine" else formulas


def _in_dtype_of_products(teacher: Head | TopK) -> Head | TopK:
    if isinstance(teacher, TopK):
        return teacher
    return teacher._replace(weight=teacher.weight.astype(teacher.hidden.dtype))


def _of_tokens(teacher: Head | TopK, first: Any, size: int, scales: jax.Array, options: Any, backend: Backend) -> Any:
    """What the teacher says of a chunk of tokens: raw logits (size, V) and normaliser, or what is stored and None."""
    if isinstance(teacher, TopK):
        return TopK(*(live_rows(take(field, first, size), scales) for field in teacher)), None
    x = live_rows(take(teacher.hidden, first, size), scales)
    return backend.logits(x, teacher.weight, teacher.bias, options.teacher)


def _of_entries(teacher: Head | TopK, first: Any, size: int, scale: jax.Array, options: Any) -> Any:
    """What the teacher says of a slice of the vocabulary: raw logits (N, size), or what is stored.

    The teacher's hidden states are taken as they are, because a copy would have (N, D) entries. The gradient by logits
    is 0 for the tokens that do not count, whatever their logits are.
    """
    if isinstance(teacher, TopK):
        return TopK(*(live_rows(field, scale) for field in teacher))
    weight = take(teacher.weight, first, size, options.teacher.vocab_dim).astype(teacher.hidden.dtype)
    return logits(teacher.hidden, weight, take(teacher.bias, first, size), options.teacher)


def live_rows(x: jax.Array, scale: jax.Array) -> jax.Array:
    """x (N, …) with zeros for tokens on whose loss nothing depends: 0 · NaN is NaN."""
    return jnp.where((scale != 0).reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros((), x.dtype))


def logits(x: jax.Array, weight: jax.Array, bias: jax.Array | None, head: HeadOptions) -> jax.Array:
    """u = x · weightᵀ + bias, summed in float32 and rounded to x's dtype.

    The barrier keeps XLA from leaving the rounding out for some of those who read them. With a normaliser of logits
    that are not rounded, exp(z − lse) of a likely token is off by its logit's rounding, 3 % at 11: more than 1, where
    a divergence compares it with another.
    """
    if bias is None:
        return jax.lax.optimization_barrier(product(x, weight, 1, 1 - head.vocab_dim, head, x.dtype))
    return jax.lax.optimization_barrier(raw_logits(x, weight, bias, head).astype(x.dtype))
