"""How a linear loss is computed in the available memory: its mode, its chunk and its bytes.

A linear loss takes the softmax over logits = hidden (N, D) · weightᵀ (D, V). It holds only some of the logits at a
time. It has two modes:

    "fast"  goes over chunks of tokens. It makes the gradients together with the loss, with 3 products of 2·N·D·V
            operations. Some engines can also take all tokens at once, keep the exponentials of a share of the
            vocabulary and recompute the others, which costs 4 products minus that share.
    "lean"  goes over slices of the vocabulary, once for the loss and once for the gradients. That costs 4 products,
            but the buffers that grow with a slice take at most a quarter of the logits in 16 bits, or the slice has
            `least_entries`.

A `Problem` (problem.py) has all that the decision depends on. The chosen engine states the bytes of each mode and
chunk, and the sizes that it prefers: its `MEMORY` (pallas_kernels/fused_linear_cross_entropy/buffers.py). The decision
is made here, from these numbers alone:

    choose_mode   takes "fast" if its chunks of 1,024 tokens or more, or a share of the exponentials, fit into the
                  budget, need no more memory than the unfused step's logits, and cost no more products than "lean";
                  else "lean". If both need more memory than the logits, it takes the plan that needs least.
    make_plan     chooses the chunk for the gradients that are needed, and counts its bytes: a `Plan`.

There are two budgets, both for the memory beside inputs and gradients. The hard one is the caller's
`memory_budget_bytes`: if nothing fits into it, there is an error. The soft one is a share of the device's memory: if
nothing fits into it, the loss takes the lean mode and exceeds the budget. It applies to mode "auto" alone, and only
without a hard one.

distillation_plan.py decides for the distillation losses.
"""

import bisect
import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from liger_jax.ops.linear.problem import Problem, problem_of_sizes
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import KeptEntries, LinearOptions, Needs
from liger_jax.pallas_kernels.tiles import cdiv, round_up

LEAST_TOKENS = 128  # in a chunk of the fast mode
LEAST_TOKENS_OF_AUTO = 1024  # with shorter chunks the fast mode is no faster than the lean one
PRODUCTS_OF_LEAN = 4.13  # of 2·N·D·V operations, with its sums: 1.11 to 1.15 more than one chunk on an H200
TOKENS_OF_A_CPU = 256  # tokens in a chunk if memory does not matter; so few are enough on a CPU
_TILE = 128  # sizes of chunks and slices are multiples of it
_MOST_SIZES = 4096  # chunk sizes whose costs are compared; in coarser steps for more than half a million tokens


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a linear loss is computed."""

    implementation: str  # "xla", "triton", "mosaic_gpu" or "mosaic_tpu"
    mode: str  # "fast" or "lean"
    chunk_size: int  # tokens in a chunk ("fast"), vocabulary entries in a slice ("lean")
    extra_bytes: int  # bytes that the compiled loss and its gradients need beside inputs and gradients
    # The bytes of these that grow with the slice, in mode "lean": the logits of the slice and their gradient, and the
    # slice's rows of the weight and of its gradient. The rest is dX's float32 sum, the statistics and a copy of the
    # weight in another dtype. In mode "fast", the bytes that grow with the chunk.
    slice_bytes: int
    # In mode "fast" with one chunk, the share of the vocabulary whose exponentials are kept; None for all of it.
    kept: KeptEntries | None = None


# --- from the problem to the plan -------------------------------------------------------------------------------------


def choose_mode(problem: Problem) -> str:
    """The mode, "fast" or "lean". It does not depend on which gradients are asked for."""
    return problem.mode if problem.mode != "auto" else _plan_of_all_gradients(problem).mode


def make_plan(problem: Problem, needs: Needs | None = None) -> Plan:
    """The plan for the gradients in `needs`, or without it for all gradients that the problem names."""
    mode = choose_mode(problem)
    asked = problem if needs is None else dataclasses.replace(problem, gradients=needs)
    plan = _best_that_fits(asked, mode, LEAST_TOKENS)
    if plan is not None:
        return plan
    hard = problem.hard_budget_bytes
    if problem.mode == "auto":
        # Fewer gradients may need more memory, because the weight's copy can use the memory of its gradient. Then the
        # chunk of the plan for all gradients is taken, unless that exceeds the hard budget, too.
        whole = _plan_of_all_gradients(problem)
        if hard is None or whole.extra_bytes <= hard:
            return _plan_of_size(asked, mode, whole.chunk_size)
    plans = (_plan_of_size(asked, mode, size) for size in _sizes(asked, mode, LEAST_TOKENS))
    raise too_small(problem.op, hard, plans)


def too_small(op: str, hard_budget_bytes: int | None, plans: Iterable[Plan]) -> ValueError:
    """The error that none of the plans fits into the hard budget."""
    least = min(plans, key=lambda plan: (plan.extra_bytes, plan.chunk_size))
    return ValueError(
        f"{op}: memory_budget_bytes={hard_budget_bytes} is too small: mode={least.mode!r} needs "
        f"{least.extra_bytes} bytes in addition to inputs and gradients with chunk_size={least.chunk_size}. "
        "Raise the budget, or split the tokens over several calls."
    )


def kernel_options(problem: Problem, options: LinearOptions, needs: Needs | None = None) -> LinearOptions:
    """The options with the plan's mode and chunk."""
    plan = make_plan(problem, needs)
    return dataclasses.replace(options, mode=plan.mode, chunk_size=plan.chunk_size, kept=plan.kept)


@functools.lru_cache(maxsize=256)
def _plan_of_all_gradients(problem: Problem) -> Plan:
    """The first plan of mode "auto" that fits; if none does, the lean mode with the slices that it prefers.

    With a small vocabulary and wide hidden states, the lean mode may need more memory than logits. Then the plan that
    needs least is taken.
    """
    least_tokens = LEAST_TOKENS if problem.platform == "cpu" else LEAST_TOKENS_OF_AUTO
    has_fast = problem.memory.fast is not None
    modes = ["fast", "lean"] if has_fast else ["lean"]
    for mode in modes:
        if plan := _best_that_fits(problem, mode, least_tokens):
            # One chunk was faster than the lean mode in all measurements.
            is_split = plan.kept is not None or plan.chunk_size < problem.n
            counts = mode == "fast" and is_split and problem.memory.products is not None
            cheaper = counts and products(problem, plan) > PRODUCTS_OF_LEAN
            lean = _first_that_fits(problem, "lean", least_tokens) if cheaper else None
            return lean or plan
    lean, *others = (
        _plan_of_size(problem, mode, size) for mode in reversed(modes) for size in _sizes(problem, mode, least_tokens)
    )
    if has_fast:
        # Mode "fast" by name allows longer chunks. A longer chunk may need less memory: the gradients of one chunk are
        # not summed, and products with many tiles pad no weight.
        named = dataclasses.replace(problem, mode="fast")
        others.extend(_plan_of_size(problem, "fast", size) for size in _sizes(named, "fast", least_tokens))
    if lean.extra_bytes <= logits_bytes(problem):
        return lean
    return min((lean, *others), key=lambda plan: plan.extra_bytes)


def _best_that_fits(problem: Problem, mode: str, least_tokens: int) -> Plan | None:
    """The plan with the best of a mode's sizes that fits, or with a share of exponentials kept if that costs less."""
    plan = _first_that_fits(problem, mode, least_tokens)
    memory, budget = problem.memory, problem.budget_bytes
    if mode != "fast" or memory.kept is None or memory.products is None or problem.chunk_size or not problem.in_place:
        return plan
    if budget is None or plan is not None and plan.chunk_size >= problem.n:
        return plan
    unbounded = _plan_of_size(problem, mode, min(_preferred_tokens(problem), problem.n)).extra_bytes
    most = min(budget, unbounded, *[logits_bytes(problem)] * (problem.mode == "auto"))
    share = memory.kept(problem.sizes, most)
    if share is None:
        return plan
    kept, (extra, growing) = share
    own = Plan(problem.kernels, mode, problem.n, extra, growing, kept)
    return own if plan is None or products(problem, own) < products(problem, plan) else plan


def products(problem: Problem, plan: Plan) -> float:
    """The cost of a plan, in products of 2·N·D·V operations, for an engine that counts them."""
    assert problem.memory.products is not None
    if plan.mode == "lean":
        return PRODUCTS_OF_LEAN
    return problem.memory.products(problem.n, problem.d, problem.v, plan.chunk_size, plan.kept)


def _first_that_fits(problem: Problem, mode: str, least_tokens: int) -> Plan | None:
    """The plan with the best of a mode's sizes that fits into the budget."""
    plans = (_plan_of_size(problem, mode, size) for size in _sizes(problem, mode, least_tokens))
    return next((plan for plan in plans if _fits(problem, plan)), None)


def _plan_of_size(problem: Problem, mode: str, size: int) -> Plan:
    count = problem.memory.fast if mode == "fast" else problem.memory.lean
    if count is None:
        raise ValueError(f"{problem.op}: {problem.kernels!r} has no mode {mode!r}; use mode='lean', or 'xla'.")
    extra, growing = count(problem.sizes, size)
    return Plan(problem.kernels, mode, size, extra, growing)


def logits_bytes(problem: Problem) -> int:
    """Bytes of the unfused step: logits in float32, their gradient in hidden's dtype, and its products' workspace."""
    return (4 + problem.itemsize) * problem.n * problem.v + problem.memory.workspace_bytes


def _fits(problem: Problem, plan: Plan) -> bool:
    """Whether a plan fits into the budget and, in mode "auto", needs no more than logits."""
    if problem.mode == "auto" and plan.extra_bytes > logits_bytes(problem):
        return False
    return problem.budget_bytes is None or plan.extra_bytes <= problem.budget_bytes


# --- chunk sizes ------------------------------------------------------------------------------------------------------


def _sizes(problem: Problem, mode: str, least_tokens: int) -> list[int]:
    """The sizes of chunks or slices to try, the best one first."""
    total, memory = max(1, problem.n if mode == "fast" else problem.v), problem.memory
    least = min(least_tokens if mode == "fast" else memory.least_entries, total)
    if problem.chunk_size:
        return [min(problem.chunk_size, total)]
    preferred = min(_preferred_tokens(problem) if mode == "fast" else memory.preferred_entries(problem.sizes), total)
    if mode == "fast" and memory.chunk_cost is not None:  # the last chunk may be shorter than the others
        return list(_by_cost(memory.chunk_cost, problem.n, problem.d, preferred, least))
    share = largest_share(total, preferred, least, lambda size: _fits(problem, _plan_of_size(problem, mode, size)))
    if mode == "lean":
        return [preferred, share]  # the last slice may be shorter
    # A longer chunk may need less memory, such as if an engine need not pad the weight. Bisection can miss that.
    return [share, *(size for i in range(5) if (size := preferred >> i) > share)]


def _preferred_tokens(problem: Problem) -> int:
    """Tokens in a chunk of the fast mode if memory does not matter."""
    return TOKENS_OF_A_CPU if problem.platform == "cpu" else problem.memory.preferred_tokens(problem.sizes)


@functools.lru_cache(maxsize=256)
def _by_cost(cost: Callable[[int, int, int], float], n: int, d: int, most: int, least: int) -> tuple[int, ...]:
    """Chunks in whole tiles, and the chunk of `most` tokens, the cheapest first."""
    step = _TILE * cdiv(most - least + 1, _TILE * _MOST_SIZES)
    chunks = {most, *range(round_up(least, _TILE), most, step)}
    return tuple(sorted(chunks, key=lambda tokens: (cost(n, d, tokens), tokens)))


def largest_share(total: int, preferred: int, least: int, fits: Callable[[int], bool]) -> int:
    """The largest equal share of `total` that fits, in whole tiles and up to the preferred size; or the least one.

    More bytes are needed for a larger share, so that bisection over the number of shares finds it.
    """

    def size_of(shares: int) -> int:
        return max(least, min(total, round_up(cdiv(total, shares), min(_TILE, least))))

    numbers = range(cdiv(total, preferred), total + 1)
    index = bisect.bisect_left(numbers, True, key=lambda shares: fits(size_of(shares)))
    return size_of(numbers[min(index, len(numbers) - 1)])


# --- beside a model's layers ------------------------------------------------------------------------------------------


def budget_beside_layers(
    n: int,
    d: int,
    v: int,
    *,
    f: int,
    f_tokens: int,
    dtype: jax.typing.DTypeLike,
    weight_dtype: jax.typing.DTypeLike,
    layers_are_recomputed: bool,
    head_is_copied: bool,
    head_is_widened: bool,
    **options: Any,
) -> int | None:
    """The memory that the loss of a model's training step may use. A step's peak grows little by it, or not at all.

    If the backward computes layers again, the loss may use what one layer takes: its norms, gate, up, product and sums.
    Gate, up and product, of `f` values each, exist for `f_tokens` of the `n` tokens at once. It is a soft budget. If
    the head is copied to another dtype, one device may use the copy's bytes as well, because the copy is where the
    layers' gradients will be. On several devices these gradients are small: on 8 H200 the copy would cost LLaMA-3-8B,
    16 × 4,096, 1.7 GiB.

    If layers keep all that they need, the loss has no bound, with one exception. The gradient of a tied bfloat16 head
    is float32. Beside one chunk of all tokens it takes much, so chunks of 2,048 tokens or more are taken instead. On an
    H200 that saves Qwen2-0.5B 0.55 GiB for 2 % of its time (8 × 512), or 1.65 GiB for 1.3 % (8 × 1,024).

    `weight_dtype` is the dtype of the head that the loss gets. `head_is_copied` says whether the loss may also use the
    bytes of a copy of the head in the computation's `dtype`. `head_is_widened` says whether the head is a 16-bit table
    in float32. `options` are those of `plan_fused_linear_cross_entropy`. The result is a `memory_budget_bytes`, or None
    for no bound.
    """
    if not layers_are_recomputed and not head_is_widened:
        return None
    problem = problem_of_sizes(max(1, n), d, v, dtype=dtype, weight_dtype=weight_dtype, **options)

    def plan_within(budget_bytes: int) -> Plan:
        return make_plan(dataclasses.replace(problem, soft_budget_bytes=budget_bytes))

    if layers_are_recomputed:
        itemsize = jnp.dtype(dtype).itemsize
        layer = (5 * n * d + 3 * f_tokens * f) * itemsize
        allowed = layer + (v * d * itemsize if head_is_copied else 0)
        return max(allowed, plan_within(allowed).extra_bytes)
    unbounded = make_plan(problem)
    chunked = plan_within(unbounded.extra_bytes - 1)
    helps = unbounded.chunk_size >= n and chunked.mode == "fast" and chunked.chunk_size >= 2048
    return chunked.extra_bytes if helps else None
