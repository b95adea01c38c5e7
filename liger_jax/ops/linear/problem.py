"""The problem of a linear loss: all that its plan depends on. It is made from arrays, or from sizes alone.

A linear loss takes the softmax over logits = hidden (N, D) · weightᵀ (D, V). The names around it:

    Problem        the sizes, kernels, gradients and budgets of a loss on one device
    Plan           its kernels, mode, chunk and bytes (plan.py)
    Needs          which gradients are asked for
    LossOptions    the loss as its caller describes it: reduction, smoothing, …
    LogitOptions   what the kernels have to know of these: scale, softcap, and which statistics are wanted
    LinearOptions  what the kernels are compiled for: `LogitOptions`, layout, precision, and the plan's mode and chunk
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice

from liger_jax.ops.checks import current_precision
from liger_jax.ops.kernels import Implementation, Kernels
from liger_jax.ops.linear.split_head import HeadSplit
from liger_jax.ops.place import Place, described, device_of
from liger_jax.pallas_kernels.cross_entropy.config import LogitOptions
from liger_jax.pallas_kernels.fused_linear_cross_entropy import mosaic_gpu, mosaic_tpu, triton, xla
from liger_jax.pallas_kernels.fused_linear_cross_entropy.buffers import Memory, Sizes
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import LinearOptions, Needs
from liger_jax.pallas_kernels.hopper import can_write_in_place
from liger_jax.pallas_kernels.tiles import least_size

OP = "fused_linear_cross_entropy"
# On an H200 mosaic_gpu wins at every shape that it takes (benchmarks/results/fused_linear_cross_entropy.md), and
# mosaic_tpu by the time that is counted from the TPU compiler's schedules (benchmarks/results/tpu_schedule.md).
KERNELS = Kernels(
    OP,
    {"xla": xla, "mosaic_gpu": mosaic_gpu, "triton": triton, "mosaic_tpu": mosaic_tpu},
    defaults={"gpu": ("mosaic_gpu",), "tpu": ("mosaic_tpu",)},
)
ALL_GRADIENTS = Needs(hidden=True, weight=True, bias=True)
SHARE_OF_MEMORY = 8  # the soft budget is an eighth of the device's memory


@dataclasses.dataclass(frozen=True)
class Problem:
    """All that the plan of a linear loss on one device depends on."""

    n: int  # tokens
    d: int  # width of the hidden states
    v: int  # entries of the vocabulary
    itemsize: int  # bytes of an element of hidden
    weight_itemsize: int
    platform: str  # "cpu", "gpu" or "tpu"
    implementation: str = "xla"  # the kernels' name, with ":interpret" after it where they are interpreted
    mode: str = "auto"  # or "fast" or "lean"
    chunk_size: int | None = None  # tokens ("fast") or vocabulary entries ("lean"); None to choose
    gradients: Needs = ALL_GRADIENTS  # those that may be needed: the mode is chosen before JAX says which ones are
    hard_budget_bytes: int | None = None
    soft_budget_bytes: int | None = None
    vocab_dim: int = 0  # which axis of the weight is the vocabulary
    op: str = OP  # for messages
    split: HeadSplit | None = None  # the number of shards of the weight over the devices that split the tokens
    in_place: bool = True  # whether kernels may change arrays in place

    @property
    def kernels(self) -> str:
        """The name of the kernels' module."""
        return self.implementation.partition(":")[0]

    @property
    def budget_bytes(self) -> int | None:
        """The budget that counts."""
        return budget_that_counts(self.mode, self.hard_budget_bytes, self.soft_budget_bytes)

    @property
    def memory(self) -> Memory:
        """The kernels' `MEMORY`."""
        return KERNELS.modules[self.kernels].MEMORY

    @functools.cached_property
    def sizes(self) -> Sizes:
        """The sizes that the kernels' bytes depend on."""
        return Sizes(
            self.n,
            self.d,
            self.v,
            self.itemsize,
            self.weight_itemsize,
            self.vocab_dim,
            self.platform,
            self.gradients,
            weight_is_split=self.split is not None,
        )


def budget_that_counts(mode: str, hard: int | None, soft: int | None) -> int | None:
    """The hard budget, or in mode "auto" without one the soft budget."""
    return hard if hard is not None or mode != "auto" else soft


def soft_budget_bytes(device_memory_bytes: int | None) -> int | None:
    """The share of a device's memory that a loss may take by default."""
    return None if device_memory_bytes is None else device_memory_bytes // SHARE_OF_MEMORY


def why_not_fast(reduction: str, split_vocabulary: bool, *dtypes: Any) -> str | None:
    """The reason why gradients of these dtypes cannot be made in the forward, or None."""
    if reduction == "none":
        return "the cotangent of each token's loss is unknown in the forward; use mode='lean' or reduction='sum'"
    if split_vocabulary:
        return "the log-normaliser of all shards is unknown while one is computed; use mode='lean'"
    if jnp.float16 in dtypes:
        return "float16 rounds gradients to 0 before a loss scale can reach them; use mode='lean' or bfloat16"
    return None


def possible_mode(op: str, mode: str, not_fast_because: str | None) -> str:
    """The mode, or "lean" if it is "auto" and cannot be fast. Raises a ValueError if it is "fast" and cannot be."""
    if mode == "fast" and not_fast_because is not None:
        raise ValueError(f"{op}: mode='fast' makes gradients in the forward, and here {not_fast_because}.")
    return "lean" if mode == "auto" and not_fast_because is not None else mode


def problem_of(
    op: str,
    hidden: Any,
    weight: Any,
    *others: Any,
    options: LinearOptions,
    not_fast_because: str | None,
    place: Place,
    implementation: Implementation = None,
    chunk_size: int | None = None,
    memory_budget_bytes: int | None = None,
    gradients: Needs = ALL_GRADIENTS,
    split: HeadSplit | None = None,
) -> Problem:
    """The problem of arrays, or of their types. `options.mode` may be "auto", and its chunk size is not read."""
    options = dataclasses.replace(options, mode=possible_mode(op, options.mode, not_fast_because))
    weight = weight if split is None else split.whole(weight, hidden)
    kernels = dataclasses.replace(KERNELS, op=op)
    choice = kernels.choose(implementation, hidden, weight, *others, place=place, options=options)
    mode = options.mode
    if mode == "auto" and options.logit.entropy:  # which not every kernel makes in mode "fast"
        as_fast = dataclasses.replace(options, mode="fast")
        is_possible = choice.name == "xla" or not choice.module.unsupported(hidden, weight, *others, options=as_fast)
        mode = "auto" if is_possible else "lean"
    n, d = hidden.shape
    return Problem(
        least_size(n),
        d,
        v=weight.shape[options.vocab_dim],
        itemsize=hidden.dtype.itemsize,
        weight_itemsize=weight.dtype.itemsize,
        vocab_dim=options.vocab_dim,
        platform=place.platform,
        implementation=choice.name,
        mode=mode,
        chunk_size=chunk_size,
        gradients=gradients,
        hard_budget_bytes=memory_budget_bytes,
        soft_budget_bytes=soft_budget_bytes(place.memory_bytes),
        op=op,
        split=split,
        in_place=not isinstance(hidden, jax.Array) or can_write_in_place(hidden),
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
    device_memory_bytes: int | None = None,
    weight_is_split: bool = False,
    **options: Any,
) -> Problem:
    """`problem_of` for sizes alone, on a device that need not be attached.

    `weight_is_split` says whether the devices that split the tokens have shards of the weight.
    """
    if device is None:
        device = device_of()
    elif not isinstance(device, AbstractDevice):
        device = described(device)
    logit = LogitOptions(float(logit_scale), None if logit_softcap is None else float(logit_softcap))
    return problem_of(
        OP,
        jax.ShapeDtypeStruct((n, d), dtype),
        jax.ShapeDtypeStruct((v, d) if weight_layout == "vd" else (d, v), weight_dtype),
        options=LinearOptions(logit, weight_layout, current_precision(OP, None), mode, chunk_size=0),
        not_fast_because=why_not_fast(reduction, False, jnp.dtype(dtype), jnp.dtype(weight_dtype)),
        place=Place(device, device_memory_bytes),
        split=HeadSplit(((), ()), (1, 1)) if weight_is_split else None,  # of whole sizes
        **options,
    )
