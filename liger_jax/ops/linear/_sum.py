"""The sum of the losses of a linear layer's rows, whose gradients are made in the forward: the fast way, 3 products.

A row's loss is any function of the row's statistics. The fused cross-entropy is one such sum. The fused token loss
takes any other function.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import zero_from_primal

from liger_jax.ops._forward_mode import reverse_only
from liger_jax.ops.eager import made_once
from liger_jax.ops.linear._statistics import (
    FORWARD_MODE,
    guarded_inputs,
    instantiated,
    is_zero,
    kernel_of,
    needs_of,
    present,
    scaled,
    values,
)
from liger_jax.ops.linear.problem import Problem
from liger_jax.pallas_kernels.cross_entropy import formulas
from liger_jax.pallas_kernels.cross_entropy.formulas import Cotangents, Statistics
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import Gradients, LinearOptions, Needs
from liger_jax.pallas_kernels.tiles import full_like


class RowLoss(NamedTuple):
    """How rows make their losses. Both functions take (statistics, terms, constants).

    `terms` is a tree of (N,) arrays, and a kernel has those of its chunk of rows. `constants` is a tree of arrays that
    are the same for all rows. A row without a label has zeros as its terms, and its loss must then be 0.
    """

    losses: Callable[[Statistics, Any, Any], jax.Array]  # (N,) float32
    cotangents: Callable[[Statistics, Any, Any], Cotangents]  # the losses' derivatives by the statistics
    is_shared: bool  # whether they are the same functions in every call, or close over values of one call
    # The devices that make the same losses from shards of the vocabulary. Their mean is what the caller differentiates,
    # and each device's sum then gets that share of the cotangent. A shard's gradients need the whole of it.
    copies: int = 1


def _sum(hidden, weight, bias, terms, class_weights, constants, labels, problem, options, row_loss):
    """The sum and the statistics, without gradients."""
    kernel = kernel_of(problem, options, "statistics")
    statistics = kernel.run(*kernel.guarded(guarded_inputs(problem, hidden, weight, labels, bias, class_weights)))
    statistics = formulas.where(labels != formulas.NO_LABEL, statistics)
    return jnp.sum(row_loss.losses(statistics, terms, constants)), statistics


def _sum_and_gradients(arrays, needs, problem, options, row_loss):
    """The sum and the statistics, and with them the gradients by hidden, weight and bias."""
    hidden, weight, bias, terms, class_weights, constants, labels = arrays
    if not any(needs):  # only the terms or the constants are differentiated
        of_all = terms, class_weights, constants, labels, problem, options, row_loss
        return *_sum(hidden, weight, bias, *of_all), Gradients(None, None, None)
    inputs = guarded_inputs(problem, hidden, weight, labels, bias, class_weights)
    kernel = kernel_of(
        problem,
        options,
        "gradients_in_forward",
        needs,
        row_cotangents=row_loss.cotangents,
        is_shared=row_loss.is_shared,
    )
    statistics, grads = kernel.run(*kernel.guarded(inputs, terms, constants))
    return jnp.sum(row_loss.losses(statistics, terms, constants)), statistics, grads


# --- kernels: gradients alone -----------------------------------------------------------------------------------------

_sum_vjp = jax.custom_vjp(_sum, nondiff_argnums=(7, 8, 9))


def _sum_forward_rule(hidden, weight, bias, terms, class_weights, constants, labels, problem, options, row_loss):
    needs = needs_of(hidden, weight, bias)
    arrays = values(hidden, weight, bias, terms, class_weights, constants, labels)
    loss, statistics, grads = _sum_and_gradients(arrays, needs, problem, options, row_loss)
    return (loss, statistics), (present(grads), statistics, arrays[3], arrays[5])


def _sum_backward_rule(problem, options, row_loss, residuals, cotangents):
    # A residual that is a constant of the trace comes as a literal.
    grads, statistics, terms, constants = jax.tree.map(jnp.asarray, residuals)
    g = instantiated(cotangents[0])

    def loss_of(terms, constants):
        return jnp.sum(row_loss.losses(statistics, terms, constants))

    terms_grad, constants_grad = jax.vjp(loss_of, terms, constants)[1](g)
    return *scaled(grads, row_loss.copies * g), terms_grad, None, constants_grad, None


_sum_vjp.defvjp(_sum_forward_rule, _sum_backward_rule, symbolic_zeros=True)

# --- XLA: the derivative along a direction is the gradients' product with it ------------------------------------------

_sum_jvp = jax.custom_jvp(_sum, nondiff_argnums=(7, 8, 9))


def _sum_tangent_rule(problem, options, row_loss, arrays, tangents):
    of_head = tangents[:3]
    needs = Needs(*(x is not None and not is_zero(x) for x in of_head))
    loss, statistics, grads = _undivided(arrays, needs, problem, options, row_loss)
    needed = zip(grads, of_head, needs, strict=True)
    summands = [row_loss.copies * _product(grad, x) for grad, x, need in needed if need]
    if not all(map(is_zero, jax.tree.leaves((tangents[3], tangents[5])))):

        def loss_of(terms, constants):
            return jnp.sum(row_loss.losses(statistics, terms, constants))

        primals = arrays[3], arrays[5]
        summands.append(jax.jvp(loss_of, primals, jax.tree.map(_as_tangent, primals, (tangents[3], tangents[5])))[1])
    no_tangents = jax.tree.map(_no_tangent, statistics)  # they are metrics
    return (loss, statistics), (functools.reduce(jnp.add, summands, _no_tangent(loss)), no_tangents)


# When JAX splits a program into its known and its linear part, it hoists constants out of loops: a chunk's logits of
# zeros would be held beside the real ones. It does not split a function with its own rule.
_undivided = jax.custom_jvp(_sum_and_gradients, nondiff_argnums=(1, 2, 3, 4))


@_undivided.defjvp
def _second_derivatives(needs, problem, options, row_loss, primals, tangents):
    return jax.jvp(lambda arrays: _sum_and_gradients(arrays, needs, problem, options, row_loss), primals, tangents)


@functools.partial(jax.checkpoint, prevent_cse=False)  # else jax.grad would keep the gradient in float32
def _product(grad: jax.Array, tangent: jax.Array) -> jax.Array:
    return jnp.sum(grad.astype(jnp.float32) * tangent.astype(jnp.float32))


def _no_tangent(x: jax.Array) -> Any:
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return full_like(x, x.shape, 0, x.dtype) if is_float else zero_from_primal(x, symbolic_zeros=True)


def _as_tangent(primal: jax.Array, tangent: Any) -> Any:
    return _no_tangent(primal) if is_zero(tangent) else tangent


_sum_jvp.defjvp(_sum_tangent_rule, symbolic_zeros=True)


# --- both -------------------------------------------------------------------------------------------------------------


def _sum_of_rows(hidden, weight, bias, terms, class_weights, constants, labels, problem, options, row_loss):
    of_all = terms, class_weights, constants, labels, problem, options, row_loss
    # JAX (0.12) keeps a custom_jvp's functions, and so the values that a call's own loss closes over.
    if problem.kernels == "xla" and row_loss.is_shared:
        return _sum_jvp(hidden, weight, bias, *of_all)
    cure = FORWARD_MODE if row_loss.is_shared else "Make the logits, and take a loss in plain JAX."
    return _sum_vjp(*reverse_only((hidden, weight, bias), problem.op, cure), *of_all)


# Outside of jit, shard_map runs no custom_vjp with symbolic zeros, but it runs a jitted one.
_shared_sum = jax.jit(_sum_of_rows, static_argnums=(7, 8, 9), inline=True)


def linear_sum(
    *arrays: Any, problem: Problem, options: LinearOptions, row_loss: RowLoss
) -> tuple[jax.Array, Statistics]:
    """The sum of the rows' losses, and their statistics.

    `arrays` are hidden, weight, bias, terms, class_weights, constants and labels.
    """
    if row_loss.is_shared:
        return _shared_sum(*arrays, problem, options, row_loss)
    # jit keeps what it traced for as long as its function lives, and static arguments with it. So this call's functions
    # get their own jit.
    return _own_sum(problem, options, row_loss)(*arrays)


@made_once
def _own_sum(problem: Problem, options: LinearOptions, row_loss: RowLoss) -> Callable[..., Any]:
    own = functools.partial(_sum_of_rows, problem=problem, options=options, row_loss=row_loss)
    return jax.jit(own, inline=True)
