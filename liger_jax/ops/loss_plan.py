"""How a linear loss is computed in the memory that there is: its mode, its chunk and its bytes.

A linear loss takes the softmax over logits = hidden (N, D) · weightᵀ (D, V). It holds only a part of the logits at a
time. It has two modes:

    "fast"  goes over chunks of tokens. It makes the gradients together with the loss, with 3 products of 2·N·D·V
            operations.
    "lean"  goes over slices of the vocabulary, once for the loss and once for the gradients. That takes 4 products,
            but what grows with a slice takes a quarter of the logits in 16 bits at most, or has `least_entries`.

The decision takes three steps, and nothing of it stands outside this file:

    problem_of    chooses the kernels and writes down all that the plan depends on: a `Problem`.
    choose_mode   takes "fast" if its chunks fit into the budget with 1,024 tokens or more, and need no more than the
                  unfused step's logits do, and else "lean".
    make_plan     chooses the chunk for the gradients that are asked for, and counts its bytes: a `Plan`.

There are two budgets, both for what is needed beside inputs and gradients. The hard one is the caller's
`memory_budget_bytes`: what does not fit into it is an error. The soft one is a share of the memory: where nothing fits
into it, the loss takes the lean mode, and more memory than the budget. It is read for mode "auto" alone, and only where
there is no hard one.

The names around a loss:

    Problem        the sizes, kernels, gradients and budgets of a loss on one device
    Plan           its kernels, mode, chunk and bytes
    Needs          which gradients are asked for
    LossOptions    the loss as its caller describes it: reduction, smoothing, …
    LogitOptions   what the kernels have to know of these: scale, softcap, and which statistics are wanted
    LinearOptions  what the kernels are compiled for: `LogitOptions`, layout, precision, and the plan's mode and chunk
"""

import bisect
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice

from liger_jax.ops._checks import current_precision
from liger_jax.ops._device import described, device_of
from liger_jax.ops._kernels import Implementation, Kernels
from liger_jax.pallas_kernels._tiles import cdiv, round_up
from liger_jax.pallas_kernels.cross_entropy.config import LogitOptions
from liger_jax.pallas_kernels.fused_linear_cross_entropy import config, mosaic_gpu, mosaic_tpu, triton, xla
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import LinearOptions, Needs

OP = "fused_linear_cross_entropy"
# On an H200 mosaic_gpu wins at every shape that it takes (benchmarks/results/fused_linear_cross_entropy.md).
KERNELS = Kernels(
    OP,
    {"xla": xla, "mosaic_gpu": mosaic_gpu, "triton": triton, "mosaic_tpu": mosaic_tpu},
    defaults={"gpu": ("mosaic_gpu",)},
)
ALL_GRADIENTS = Needs(hidden=True, weight=True, bias=True)

SHARE_OF_MEMORY = 8  # the soft budget is an eighth of the device's memory
LEAST_TOKENS = 128  # in a chunk of the fast mode
LEAST_TOKENS_OF_AUTO = 1024  # with shorter chunks the fast mode is no faster than the lean one
LEAST_ENTRIES = 512  # in a slice of the lean mode, but on a TPU, where a tile has 1,024
_TILE = 128  # sizes of chunks and slices are multiples of it
_MOST_SIZES = 4096  # of Hopper's chunks that are compared; for more than half a million tokens, in coarser steps
_CUBLAS_BYTES = 32 * 2**20  # cuBLAS's workspace on Hopper, for XLA's products


@dataclasses.dataclass(frozen=True)
class Problem:
    """All that the plan of a linear loss on one device depends on."""

    n: int  # tokens
    d: int  # width of the hidden states
    v: int  # entries of the vocabulary
    itemsize: int  # bytes of an element of hidden
    weight_itemsize: int
    platform: str  # "cpu", "gpu" or "tpu"
    implementation: str = "xla"  # the kernels' name, with ":interpret" behind it where they are interpreted
    mode: str = "auto"  # or "fast" or "lean"
    chunk_size: int | None = None  # tokens ("fast") or vocabulary entries ("lean"); None to choose
    gradients: Needs = ALL_GRADIENTS  # that may be asked for; the mode must be known before JAX says which ones are
    hard_budget_bytes: int | None = None
    soft_budget_bytes: int | None = None
    vocab_dim: int = 0  # which axis of the weight is the vocabulary
    op: str = OP  # for messages

    @property
    def kernels(self) -> str:
        """The name of the kernels' module."""
        return self.implementation.partition(":")[0]

    @property
    def budget_bytes(self) -> int | None:
        """The budget that counts."""
        if self.hard_budget_bytes is not None or self.mode != "auto":
            return self.hard_budget_bytes
        return self.soft_budget_bytes

    @property
    def weight_copy_bytes(self) -> int:
        """Products take hidden's dtype: a weight of another one is copied."""
        return 0 if self.weight_itemsize == self.itemsize else self.v * self.d * self.itemsize


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a linear loss is computed.

    Attributes:
        implementation: "xla", "triton", "mosaic_gpu" or "mosaic_tpu".
        mode: "fast" or "lean".
        chunk_size: tokens in a chunk ("fast"), vocabulary entries in a slice ("lean").
        extra_bytes: what the compiled loss and its gradients need beside inputs and gradients.
        slice_bytes: what of it grows with the slice, in mode "lean": the logits of the slice and their gradient, and
            the slice's part of the weight and of its gradient. The rest is dX's float32 sum, the statistics and a
            weight's copy in another dtype. In mode "fast", what grows with the chunk.
    """

    implementation: str
    mode: str
    chunk_size: int
    extra_bytes: int
    slice_bytes: int


# --- from arrays to the problem ---------------------------------------------------------------------------------------


def why_not_fast(reduction: str, vocab_axis: str | None, *dtypes: Any) -> str | None:
    """The reason why gradients of these dtypes cannot be made in the forward, or None."""
    if reduction == "none":
        return "the cotangent of each token's loss is unknown in the forward; use mode='lean' or reduction='sum'"
    if vocab_axis is not None:
        return "the log-normaliser of all shards is unknown while one is computed; use mode='lean'"
    if jnp.float16 in dtypes:
        return "float16 rounds gradients to 0 before a loss scale can reach them; use mode='lean' or bfloat16"
    return None


def problem_of(
    op: str,
    hidden: Any,
    weight: Any,
    *others: Any,
    options: LinearOptions,
    not_fast_because: str | None,
    implementation: Implementation = None,
    chunk_size: int | None = None,
    memory_budget_bytes: int | None = None,
    device_memory_bytes: int | None = None,
    device: AbstractDevice | None = None,
    gradients: Needs = ALL_GRADIENTS,
) -> Problem:
    """The problem of arrays, or of their types. `options.mode` may be "auto", and its chunk size is not read."""
    if options.mode == "fast" and not_fast_because is not None:
        raise ValueError(f"{op}: mode='fast' makes gradients in the forward, and here {not_fast_because}.")
    if options.mode == "auto" and not_fast_because is not None:
        options = dataclasses.replace(options, mode="lean")
    device = device or device_of(hidden, weight)
    kernels = dataclasses.replace(KERNELS, op=op)
    choice = kernels.choose(implementation, hidden, weight, *others, device=device, options=options)
    mode = options.mode
    if mode == "auto" and options.logit.entropy:  # which not every kernel makes in mode "fast"
        as_fast = dataclasses.replace(options, mode="fast")
        mode = "auto" if choice.module.unsupported(hidden, weight, *others, options=as_fast) is None else "lean"
    return Problem(
        *hidden.shape,
        v=weight.shape[options.vocab_dim],
        itemsize=hidden.dtype.itemsize,
        weight_itemsize=weight.dtype.itemsize,
        vocab_dim=options.vocab_dim,
        platform=device.platform,
        implementation=choice.name,
        mode=mode,
        chunk_size=chunk_size,
        gradients=gradients,
        hard_budget_bytes=memory_budget_bytes,
        soft_budget_bytes=None if device_memory_bytes is None else device_memory_bytes // SHARE_OF_MEMORY,
        op=op,
    )


def problem_of_sizes(
    n: int,
    d: int,
    v: int,
    *,
    dtype: jax.typing.DTypeLike,
    weight_dtype: jax.typing.DTypeLike,
    weight_layout: str = "vd",
    reduction: str = "mean",
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    mode: str = "auto",
    device: Any = None,
    **options: Any,
) -> Problem:
    """`problem_of` for arrays that need not be there, on a device that need not be there."""
    if device is None:
        device = device_of()
    elif not isinstance(device, AbstractDevice):
        device = described(device)
    logit = LogitOptions(float(logit_scale), None if logit_softcap is None else float(logit_softcap))
    return problem_of(
        OP,
        jax.ShapeDtypeStruct((n, d), dtype),
        jax.ShapeDtypeStruct((v, d) if weight_layout == "vd" else (d, v), weight_dtype),
        options=LinearOptions(logit, weight_layout, current_precision(None), mode, chunk_size=0),
        not_fast_because=why_not_fast(reduction, None, jnp.dtype(dtype), jnp.dtype(weight_dtype)),
        device=device,
        **options,
    )


# --- from the problem to the plan -------------------------------------------------------------------------------------


def choose_mode(problem: Problem) -> str:
    """ "fast" or "lean"; the same whichever gradients are asked for."""
    return problem.mode if problem.mode != "auto" else _plan_of_all_gradients(problem).mode


def make_plan(problem: Problem, needs: Needs | None = None) -> Plan:
    """The plan for the gradients that are asked for; None for all that the problem names.

    Raises:
        ValueError: the hard budget is too small.
    """
    mode = choose_mode(problem)
    asked = problem if needs is None else dataclasses.replace(problem, gradients=needs)
    plan = _first_that_fits(asked, mode, LEAST_TOKENS)
    if plan is not None:
        return plan
    hard = problem.hard_budget_bytes
    if problem.mode == "auto":
        # Fewer gradients may need more, because the weight's gradient has room for the weight's copy. The chunk that
        # was found for all of them serves then, unless all of them are too much for the hard budget, too.
        whole = _plan_of_all_gradients(problem)
        if hard is None or whole.extra_bytes <= hard:
            return _plan_of_size(asked, mode, whole.chunk_size)
    plans = [_plan_of_size(asked, mode, size) for size in _sizes(asked, mode, LEAST_TOKENS)]
    least = min(plans, key=lambda plan: (plan.extra_bytes, plan.chunk_size))
    raise ValueError(
        f"{problem.op}: memory_budget_bytes={hard} is too small: mode={mode!r} needs {least.extra_bytes} "
        f"bytes beside inputs and gradients with chunk_size={least.chunk_size}. "
        "Raise the budget, or split the tokens over several calls."
    )


def kernel_options(problem: Problem, options: LinearOptions, needs: Needs | None = None) -> LinearOptions:
    """The options with the plan's mode and chunk."""
    plan = make_plan(problem, needs)
    return dataclasses.replace(options, mode=plan.mode, chunk_size=plan.chunk_size)


@functools.lru_cache(maxsize=256)
def _plan_of_all_gradients(problem: Problem) -> Plan:
    """The first plan of mode "auto" that fits; where none does, the lean mode with the slices that it prefers."""
    least_tokens = LEAST_TOKENS if problem.platform == "cpu" else LEAST_TOKENS_OF_AUTO
    has_fast = hasattr(KERNELS.modules[problem.kernels], "gradients_in_forward")
    if has_fast and (plan := _first_that_fits(problem, "fast", least_tokens)):
        return plan
    if plan := _first_that_fits(problem, "lean", least_tokens):
        return plan
    return _plan_of_size(problem, "lean", _sizes(problem, "lean", least_tokens)[0])


def _first_that_fits(problem: Problem, mode: str, least_tokens: int) -> Plan | None:
    """The plan with the best of a mode's sizes that fits into the budget."""
    plans = (_plan_of_size(problem, mode, size) for size in _sizes(problem, mode, least_tokens))
    return next((plan for plan in plans if _fits(problem, plan)), None)


def _plan_of_size(problem: Problem, mode: str, size: int) -> Plan:
    if mode == "fast":
        return Plan(problem.kernels, mode, size, fast_bytes(problem, size), chunk_bytes(problem, size))
    return Plan(problem.kernels, mode, size, lean_bytes(problem, size), slice_bytes(problem, size))


def _fits(problem: Problem, plan: Plan) -> bool:
    """Whether a plan keeps to the budget, and if the mode was not named, does not need more than logits would."""
    if problem.mode == "auto" and plan.mode == "fast" and plan.extra_bytes > logits_bytes(problem):
        return False
    return problem.budget_bytes is None or plan.extra_bytes <= problem.budget_bytes


# --- chunk sizes ------------------------------------------------------------------------------------------------------


def _sizes(problem: Problem, mode: str, least_tokens: int) -> list[int]:
    """The sizes of chunks or slices to try, the best one first."""
    total = max(1, problem.n if mode == "fast" else problem.v)
    least = min(least_tokens if mode == "fast" else least_entries(problem), total)
    if problem.chunk_size:
        return [min(problem.chunk_size, total)]
    preferred = min(preferred_tokens(problem) if mode == "fast" else preferred_entries(problem), total)
    if mode == "fast" and problem.kernels == "mosaic_gpu":  # its last chunk may be shorter than the others
        return _by_cost(problem, preferred, least)
    part = largest_part(total, preferred, least, lambda size: _fits(problem, _plan_of_size(problem, mode, size)))
    return [part] if mode == "fast" else [preferred, part]  # the last slice may be shorter


def preferred_tokens(problem: Problem) -> int:
    """Tokens in a chunk of the fast mode where memory is no matter.

    dW's accumulator is read and written once a chunk. On an H200 chunks of 2,048 tokens come within 3 % of the whole
    batch at a width of 4,096 in XLA, where chunks of 512 cost 30 % more (benchmarks/results/token_chunks.md). Hopper's
    kernels need no accumulator where one chunk holds all tokens, which may take half as much more memory. A CPU is slow
    enough for 256.
    """
    if problem.platform == "cpu":
        return 256
    if problem.kernels != "mosaic_gpu" or not problem.gradients.weight:
        return 2048
    return max(problem.n, 1) if fast_bytes(problem, problem.n) <= 1.5 * fast_bytes(problem, 8192) else 8192


def preferred_entries(problem: Problem) -> int:
    """Vocabulary entries in a slice of the lean mode where memory is no matter.

    What grows with the slice takes up to a quarter of the logits in 16 bits, unless that is less than `least_entries`
    need. Of long vocabularies XLA and Triton take up to 128 MiB of logits and du, and a TPU up to 32 MiB of du.
    Hopper's kernels take up to 72 MiB of du, and of such slices those that leave few cores idle.
    """
    n, itemsize, least = max(problem.n, 1), problem.itemsize, least_entries(problem)
    quarter = n * problem.v // 2 // slice_bytes(problem, 1)
    if problem.kernels == "mosaic_gpu":
        most = max(least, min(max(4096, 72 * 2**20 // (itemsize * n)), 16384, quarter) // 256 * 256)
        sizes = range(min(4096, most), most + 1, 256)
        return min(sizes, key=lambda size: (config.mosaic_gpu_entry_cost(problem.n, problem.d, size), size))
    if problem.kernels == "mosaic_tpu":
        return max(least, min(max(2048, 2**25 // (itemsize * n)), quarter) // 1024 * 1024)
    return max(least, min(2**27 // ((4 + itemsize) * n), quarter) // 256 * 256)


def least_entries(problem: Problem) -> int:
    """The fewest entries of a slice: a few tiles, below which products take longer without needing much less."""
    return 1024 if problem.kernels == "mosaic_tpu" else LEAST_ENTRIES


def _by_cost(problem: Problem, most: int, least: int) -> list[int]:
    """Hopper's chunks in whole tiles, and the chunk of `most` tokens, the cheapest first."""
    step = _TILE * cdiv(most - least + 1, _TILE * _MOST_SIZES)
    sizes = {most, *range(round_up(least, _TILE), most, step)}
    return sorted(sizes, key=lambda tokens: (config.mosaic_gpu_chunk_cost(problem.n, problem.d, tokens), tokens))


def largest_part(total: int, preferred: int, least: int, fits: Callable[[int], bool]) -> int:
    """The largest of equal parts of `total` that fits, in whole tiles and up to the preferred size; or the least one.

    More bytes are needed for a larger part, so that bisection over the number of parts finds it.
    """

    def size_of(parts: int) -> int:
        return max(least, min(total, round_up(cdiv(total, parts), min(_TILE, least))))

    numbers = range(cdiv(total, preferred), total + 1)
    found = bisect.bisect_left(numbers, True, key=lambda parts: fits(size_of(parts)))
    return size_of(numbers[min(found, len(numbers) - 1)])


# --- bytes: those of the compiled programs, which tests/aot compares, with a term for each live buffer ----------------


def logits_bytes(problem: Problem) -> int:
    """What the unfused step needs: logits in float32 and their gradient in hidden's dtype, and cuBLAS's workspace."""
    workspace = _CUBLAS_BYTES if problem.kernels == "mosaic_gpu" else 0
    return (4 + problem.itemsize) * problem.n * problem.v + workspace


def fast_bytes(problem: Problem, tokens: int) -> int:
    """What the fast mode needs beside inputs and gradients, with chunks of so many tokens."""
    n, d, v, needs_weight = problem.n, problem.d, problem.v, problem.gradients.weight
    float32_dw = 4 * v * d if needs_weight and problem.weight_itemsize < 4 else 0
    chunk = chunk_bytes(problem, tokens)
    if problem.kernels == "mosaic_gpu":
        is_whole = tokens >= n
        dw_low_byte = 0 if is_whole else float32_dw // 4  # the lowest of the sum's three; dW holds the upper two
        # With one chunk dW is written last. Until then the weight's copy lies in its place.
        weight_copy = 0 if is_whole and needs_weight else problem.weight_copy_bytes
        of_parts = 0
        if not mosaic_gpu.takes(v, "fast", problem.vocab_dim):
            is_copied = mosaic_gpu.copies_slices(problem.vocab_dim)
            # The weight's whole tiles, and their part of dW until it is put in its place.
            weight_slice = v * d * problem.itemsize if is_copied and not problem.weight_copy_bytes else 0
            part_of_dw = v * d * problem.weight_itemsize if needs_weight and (is_copied or not is_whole) else 0
            of_parts = max(weight_slice, part_of_dw)  # one after the other
            if part_of_dw and not is_whole:  # at a time, and the largest buffer beside it lies where dW will be
                of_parts = weight_slice + part_of_dw - max(weight_slice, dw_low_byte, weight_copy)
        return chunk + _CUBLAS_BYTES + dw_low_byte + weight_copy + of_parts
    # dW is written last, from its float32 sum. Until then the largest buffer that fits lies in its place.
    room = v * d * problem.weight_itemsize if float32_dw else 0
    logits, du = 4 * tokens * v, tokens * v * problem.itemsize
    in_its_place = max((size for size in (logits, du) if size <= room), default=0)
    return chunk - in_its_place + float32_dw + problem.weight_copy_bytes


def chunk_bytes(problem: Problem, tokens: int) -> int:
    """What grows with the chunk of the fast mode: logits and du, or E. (du is written in the place of E.)"""
    du = tokens * problem.v * problem.itemsize
    if problem.kernels != "mosaic_gpu":
        return du + 4 * tokens * problem.v
    # Each tile of logits leaves a row's maximum; a tile has 128 columns where the depth is short, and else 256 or 192.
    tile_maxima = 4 * tokens * cdiv(problem.v, 128 if problem.d < config.SHORT_DEPTH else 256)
    hidden = tokens * problem.d * problem.itemsize  # without the rows that do not count, and then its gradient
    return du + tile_maxima + hidden


def lean_bytes(problem: Problem, entries: int) -> int:
    """What the lean mode needs beside inputs and gradients, with slices of so many vocabulary entries."""
    n, d, v, itemsize, weight_copy = problem.n, problem.d, problem.v, problem.itemsize, problem.weight_copy_bytes
    of_slice = slice_bytes(problem, entries)
    float32_dx = 4 * n * d if problem.gradients.hidden and itemsize < 4 else 0
    if problem.kernels == "mosaic_gpu":
        tile_statistics = 2 * 4 * n * cdiv(v, 256)
        # Beside slices of the weight, hidden without the rows that do not count finds no place in dX or dW.
        is_sliced = not mosaic_gpu.takes(v, "lean", problem.vocab_dim) and not weight_copy
        masked_hidden = n * d * itemsize if is_sliced else 0
        if is_sliced and not problem.gradients.weight and mosaic_gpu.copies_slices(problem.vocab_dim):
            tile_statistics += v * d * itemsize  # whole tiles of the weight, until they are read; else in dW's place
        of_slice += masked_hidden
        return weight_copy + max(of_slice + float32_dx, tile_statistics)
    if problem.kernels == "mosaic_tpu":
        return of_slice + float32_dx + 4 * 128 * n + weight_copy  # a token's numbers, in 128 lanes
    masked_hidden = n * d * itemsize
    # XLA casts a slice of the weight at a time.
    return of_slice + float32_dx + masked_hidden + (0 if problem.kernels == "xla" else weight_copy)


def slice_bytes(problem: Problem, entries: int) -> int:
    """What grows with the slice of the lean mode: logits, their gradient du, and parts of the weight and of dW."""
    n, d, itemsize = max(problem.n, 1), problem.d, problem.itemsize
    du = n * entries * itemsize
    if problem.kernels == "mosaic_gpu":
        if mosaic_gpu.takes(problem.v, "lean", problem.vocab_dim):
            return du
        part_of_dw = problem.weight_itemsize if mosaic_gpu.copies_slices(problem.vocab_dim) else 0
        return du + entries * d * (itemsize + part_of_dw)
    if problem.kernels == "mosaic_tpu":
        return du + entries * d * itemsize
    logits = 4 * n * entries if problem.kernels == "xla" else 0
    return du + logits + entries * d * (4 + itemsize)


# --- beside a model's layers ------------------------------------------------------------------------------------------


def budget_beside_layers(
    n: int,
    d: int,
    v: int,
    *,
    f: int,
    dtype: jax.typing.DTypeLike,
    weight_dtype: jax.typing.DTypeLike,
    layers_are_recomputed: bool,
    head_is_copied: bool,
    head_is_widened: bool,
    **options: Any,
) -> int | None:
    """The memory that the loss may use without being the peak of a model's training step, or without raising it far.

    Where layers are computed again in the backward, that is the memory of one layer: its norms, gate, up, product and
    sums. It is a soft budget. On one device a copy of the head in another dtype comes on top: it lies where the layers'
    gradients will be. On 8 H200, where these are small, the copy would cost LLaMA-3-8B, 16 × 4,096, 1.7 GiB.

    Where layers keep all, the loss has no bound, with one exception: a tied bfloat16 head, whose gradient is float32,
    beside one chunk of all tokens. Chunks of 2,048 tokens or more are taken instead. On an H200 that saves Qwen2-0.5B,
    8 × 512, 0.55 GiB for 2 % of its time, and 8 × 1,024 1.65 GiB for 1.3 %.

    `weight_dtype` is that of the head that the loss gets. `head_is_copied` says whether a copy of it, in the
    computation's `dtype`, may come on top, and `head_is_widened` whether it is a 16-bit table in float32. `options` are
    those of `plan_fused_linear_cross_entropy`. The result is a `memory_budget_bytes`, or None for no bound.
    """
    if not layers_are_recomputed and not head_is_widened:
        return None
    problem = problem_of_sizes(max(1, n), d, v, dtype=dtype, weight_dtype=weight_dtype, **options)

    def plan_within(budget_bytes: int) -> Plan:
        return make_plan(dataclasses.replace(problem, soft_budget_bytes=budget_bytes))

    if layers_are_recomputed:
        itemsize = jnp.dtype(dtype).itemsize
        layer = n * (5 * d + 3 * f) * itemsize
        allowed = layer + (v * d * itemsize if head_is_copied else 0)
        return max(allowed, plan_within(allowed).extra_bytes)
    unbounded = make_plan(problem)
    chunked = plan_within(unbounded.extra_bytes - 1)
    helps = unbounded.chunk_size >= n and chunked.mode == "fast" and chunked.chunk_size >= 2048
    return chunked.extra_bytes if helps else None
