"""The statistics of a linear layer's logits, with a gradient that recomputes the logits: the lean way, 4 products.

The fused cross-entropy and the fused log-probabilities are functions of these statistics.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from liger_jax.ops import _vocab_shards, meshes
from liger_jax.ops._forward_mode import reverse_only
from liger_jax.ops.kernels import Kernel
from liger_jax.ops.linear import _sliced_head
from liger_jax.ops.linear.plan import choose_mode, kernel_options, make_plan
from liger_jax.ops.linear.problem import KERNELS, Problem, problem_of, why_not_fast
from liger_jax.ops.place import place_of
from liger_jax.pallas_kernels.cross_entropy import formulas as row_formulas
from liger_jax.pallas_kernels.cross_entropy.formulas import Cotangents, Statistics
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import Inputs, LinearOptions, Needs
from liger_jax.pallas_kernels.tiles import is_symbolic

_SECOND_DERIVATIVES = "take cross_entropy(hidden @ weight.T, labels, implementation='xla')"
FORWARD_MODE = (
    "XLA's fast mode has it, where the loss is one number: pass implementation='xla' and mode='fast'; else make the "
    "logits, and take a loss in plain JAX."
)


def problem_on_device(
    op: str,
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    *others: jax.Array | None,
    options: LinearOptions,
    reduction: str,
    vocab_axis: str | None,
    merges_in_forward: bool = False,
    **limits: Any,
) -> Problem:
    """The problem of one device's arrays; a ValueError if the compiler would partition them over a mesh."""
    dtypes = [x.dtype for x in (hidden, weight, *others) if x is not None]
    is_free = options.mode == "auto" and limits.get("memory_budget_bytes") is None
    place = place_of(hidden, weight, beside=(labels, *others), memory_is_needed=is_free)
    problem = problem_of(
        op,
        hidden,
        weight,
        *others,
        options=options,
        not_fast_because=why_not_fast(reduction, vocab_axis is not None and not merges_in_forward, *dtypes),
        place=place,
        **limits,
    )
    if place.mesh_refusal is not None:
        call = meshes.loss_call(op, meshes.axes_of(hidden, weight))
        raise ValueError(f"{op}: {place.mesh_refusal} {call}".rstrip())
    if is_symbolic(hidden.shape[0]) and problem.hard_budget_bytes is not None and choose_mode(problem) == "lean":
        raise ValueError(
            f"{op}: memory_budget_bytes={problem.hard_budget_bytes} bounds no batch of the symbolic shape "
            f"{hidden.shape}, since mode 'lean' needs more for more tokens. Leave the budget out, or pass mode='fast'."
        )
    return problem


def kernel_of(
    problem: Problem, options: LinearOptions, function: str, needs: Needs | None = None, **static: Any
) -> Kernel:
    """A function of the chosen implementation. `needs` is for functions that make gradients, and None for others."""
    static = static if needs is None else {"needs": needs, **static}
    choice = KERNELS.named(problem.implementation)
    return choice.kernel(function, options=kernel_options(problem, options, needs), **static)


def guarded_inputs(problem: Problem, hidden: Any, weight: Any, labels: Any, bias: Any, class_weights: Any) -> Inputs:
    """The inputs of every kernel, guarded; XLA's, too, because its scan over chunks is not partitioned."""
    axes = meshes.axes_of(hidden, weight)
    return meshes.opaque(Inputs(hidden, weight, labels, bias, class_weights), problem.op, _SECOND_DERIVATIVES, axes)


def needs_of(hidden: Any, weight: Any, bias: Any) -> Needs:
    """Which of a forward rule's arguments are differentiated."""
    return Needs(hidden.perturbed, weight.perturbed, bias is not None and bias.perturbed)


def instantiated(cotangent: Any) -> Any:
    """The cotangent as an array, or None: JAX hands over a symbolic zero where nothing depends on an output."""
    if is_zero(cotangent):
        return jnp.zeros(cotangent.shape, cotangent.dtype)
    return cotangent


def present(grads: Any) -> list[jax.Array]:
    """The gradients with () zeros in place of those that are not needed, so that residuals have one tree."""
    return [jnp.zeros((), jnp.float32) if grad is None else grad for grad in grads]


def scaled(grads: Any, factor: jax.Array) -> list[jax.Array | None]:
    """The gradients of `present` times a number, in their dtypes; None for those that are not needed."""
    return [(factor * grad.astype(jnp.float32)).astype(grad.dtype) if grad.ndim else None for grad in grads]


def values(*primals: Any) -> list[Any]:
    """The arrays of a forward rule's arguments."""
    return [jax.tree.map(lambda p: p.value, primal) for primal in primals]


def is_zero(cotangent: Any) -> bool:
    """Whether it is JAX's symbolic zero."""
    return isinstance(cotangent, jax.custom_derivatives.SymbolicZero)


# JAX 0.10 gives a backward rule the tree of the residuals that was traced last, not its own. So the tree must not
# depend on which gradients are needed. That is stored in shapes: one element for yes, and none for no.
def as_shapes(needs: Needs) -> tuple[jax.Array, ...]:
    """`needs` among the residuals of a forward rule."""
    return tuple(jnp.zeros((int(need),), jnp.float32) for need in needs)


def from_shapes(shapes: tuple[jax.Array, ...]) -> Needs:
    """The `needs` of `as_shapes`."""
    return Needs(*(shape.size == 1 for shape in shapes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _statistics_vjp(hidden, weight, bias, class_weights, labels, problem, options) -> Statistics:
    return _run_statistics(guarded_inputs(problem, hidden, weight, labels, bias, class_weights), problem, options)


def _statistics_forward_rule(hidden, weight, bias, class_weights, labels, problem, options):
    needs = as_shapes(needs_of(hidden, weight, bias))
    hidden, weight, bias, class_weights, labels = values(hidden, weight, bias, class_weights, labels)
    inputs = guarded_inputs(problem, hidden, weight, labels, bias, class_weights)
    statistics = _run_statistics(inputs, problem, options)
    rows = statistics.log_normalizer, statistics.entropy
    return statistics, (needs, hidden, weight, bias, class_weights, labels, rows)


def _statistics_backward_rule(problem, options, residuals, cotangents):
    needs, hidden, weight, bias, class_weights, labels, (lse, entropy) = residuals
    g = Cotangents(*(instantiated(x) for x in cotangents[:3]))
    if entropy is not None and not is_zero(cotangents.entropy):
        g = row_formulas.with_entropy(g, entropy, cotangents.entropy)
    needs = from_shapes(needs)
    kernel = kernel_of(problem, options, "gradients", needs)
    run = lambda *arrays: kernel.run(*kernel.guarded(*arrays))
    inputs = guarded_inputs(problem, hidden, weight, labels, bias, class_weights)
    if problem.split is None:
        grads = run(inputs, lse, g)
    else:
        entries = make_plan(problem, needs).chunk_size
        grads = _sliced_head.gradients(run, inputs, problem.split, options, entries, lse, g, needs)
    return *grads, None, None


def _run_statistics(inputs: Inputs, problem: Problem, options: LinearOptions) -> Statistics:
    kernel = kernel_of(problem, options, "statistics")
    run = lambda inputs: kernel.run(*kernel.guarded(inputs))
    if problem.split is None:
        return run(inputs)
    return _sliced_head.statistics(run, inputs, problem.split, options, make_plan(problem).chunk_size)


_statistics_vjp.defvjp(_statistics_forward_rule, _statistics_backward_rule, symbolic_zeros=True)


def _statistics(hidden, weight, bias, class_weights, labels, problem, options) -> Statistics:
    head = reverse_only((hidden, weight, bias), problem.op, FORWARD_MODE)
    return _statistics_vjp(*head, class_weights, labels, problem, options)


# Outside of jit, shard_map runs no custom_vjp with symbolic zeros, but it runs a jitted one.
linear_statistics = jax.jit(_statistics, static_argnums=(5, 6), inline=True)


def statistics_of_tokens(
    *arrays: Any, counts: jax.Array, problem: Problem, options: LinearOptions, vocab_axis: str | None
) -> Statistics:
    """`linear_statistics` of these arrays over the whole vocabulary, with 0 for tokens that do not count."""
    statistics = row_formulas.where(counts, linear_statistics(*meshes.align_varying(*arrays), problem, options))
    if vocab_axis is None:
        return statistics
    return row_formulas.where(counts, _vocab_shards.merged_over(statistics, vocab_axis, problem.v))
