"""The sum of the losses of a linear layer's rows, whose gradients are made in the forward: the fast way, 3 products.

A row's loss is any function of the row's statistics. The fused cross-entropy is one such sum. The fused token loss
takes any other function.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from liger_jax.ops.linear._statistics import (
    guarded_inputs,
    instantiated,
    kernel_of,
    needs_of,
    present,
    scaled,
    values,
)
from liger_jax.ops.linear.problem import Problem
from liger_jax.pallas_kernels.cross_entropy import formulas
from liger_jax.pallas_kernels.cross_entropy.formulas import Cotangents, Statistics
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import Gradients, LinearOptions


class RowLoss(NamedTuple):
    """How rows make their losses. Both functions take (statistics, terms, constants).

    `terms` is a tree of (N,) arrays, and a kernel has those of its chunk of rows. `constants` is a tree of arrays that
    are the same for all rows. A row without a label has zeros as its terms, and its loss must then be 0.
    """

    losses: Callable[[Statistics, Any, Any], jax.Array]  # (N,) float32
    cotangents: Callable[[Statistics, Any, Any], Cotangents]  # the losses' derivatives by the statistics
    is_shared: bool  # whether they are the same functions in every call, or close over what belongs to one


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8, 9))
def _sum_vjp(
    hidden, weight, bias, terms, class_weights, constants, labels, problem, options, row_loss
) -> tuple[jax.Array, Statistics]:
    kernel = kernel_of(problem, options, "statistics")
    statistics = kernel.run(*kernel.guarded(guarded_inputs(problem, hidden, weight, labels, bias, class_weights)))
    statistics = formulas.where(labels != formulas.NO_LABEL, statistics)
    return jnp.sum(row_loss.losses(statistics, terms, constants)), statistics


def _sum_forward_rule(hidden, weight, bias, terms, class_weights, constants, labels, problem, options, row_loss):
    needs = needs_of(hidden, weight, bias)
    hidden, weight, bias, terms, class_weights, constants, labels = values(
        hidden, weight, bias, terms, class_weights, constants, labels
    )
    inputs = guarded_inputs(problem, hidden, weight, labels, bias, class_weights)
    if any(needs):
        kernel = kernel_of(
            problem, options, "gradients_in_forward", needs,
            row_cotangents=row_loss.cotangents, is_shared=row_loss.is_shared,
        )  # fmt: skip
        statistics, grads = kernel.run(*kernel.guarded(inputs, terms, constants))
    else:  # only the terms or the constants are differentiated
        kernel = kernel_of(problem, options, "statistics")
        statistics = formulas.where(labels != formulas.NO_LABEL, kernel.run(*kernel.guarded(inputs)))
        grads = Gradients(None, None, None)
    loss = jnp.sum(row_loss.losses(statistics, terms, constants))
    return (loss, statistics), (present(grads), statistics, terms, constants)


def _sum_backward_rule(problem, options, row_loss, residuals, cotangents):
    # A residual that is a constant of the trace comes as a literal.
    grads, statistics, terms, constants = jax.tree.map(jnp.asarray, residuals)
    g = instantiated(cotangents[0])

    def loss_of(terms, constants):
        return jnp.sum(row_loss.losses(statistics, terms, constants))

    terms_grad, constants_grad = jax.vjp(loss_of, terms, constants)[1](g)
    return *scaled(grads, g), terms_grad, None, constants_grad, None


_sum_vjp.defvjp(_sum_forward_rule, _sum_backward_rule, symbolic_zeros=True)
# Outside of jit, shard_map runs no custom_vjp with symbolic zeros, but it runs a jitted one.
_shared_sum = jax.jit(_sum_vjp, static_argnums=(7, 8, 9), inline=True)


def linear_sum(
    *arrays: Any, problem: Problem, options: LinearOptions, row_loss: RowLoss
) -> tuple[jax.Array, Statistics]:
    """The sum of the rows' losses, and their statistics.

    `arrays` are hidden, weight, bias, terms, class_weights, constants and labels.
    """
    if row_loss.is_shared:
        return _shared_sum(*arrays, problem, options, row_loss)
    # jit keeps what it traced for as long as its function lives, and static arguments with it. So this call's functions
    # get a jit of their own.
    return jax.jit(lambda *arrays: _sum_vjp(*arrays, problem, options, row_loss), inline=True)(*arrays)
