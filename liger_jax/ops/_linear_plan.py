"""How a fused linear cross-entropy is computed: the kernels, the mode and the chunk, from shapes, device and memory."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice

from liger_jax.ops import _checks, _dispatch
from liger_jax.ops._loss import check_logit_options
from liger_jax.pallas_kernels.cross_entropy.config import LogitOptions
from liger_jax.pallas_kernels.fused_linear_cross_entropy import mosaic_gpu, mosaic_tpu, triton, xla
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import LinearOptions, Needs
from liger_jax.pallas_kernels.fused_linear_cross_entropy.plan import Plan, Problem, plan

OP = "fused_linear_cross_entropy"
KERNELS = {"xla": xla, "mosaic_gpu": mosaic_gpu, "triton": triton, "mosaic_tpu": mosaic_tpu}
# On an H200 mosaic_gpu wins at every shape that it takes (benchmarks/results/fused_linear_cross_entropy.md).
DEFAULTS: dict[str, tuple[str, ...]] = {"gpu": ("mosaic_gpu",)}
MODES = ("auto", "fast", "lean")
LAYOUTS = ("vd", "dv")
SHARE_OF_MEMORY = 8  # without a budget the loss takes an eighth of the device's memory at most


@dataclasses.dataclass(frozen=True)
class Decision:
    """The kernels chosen, and what a plan is made from once it is known which gradients are wanted."""

    op: str  # for messages
    choice: str
    options: LinearOptions
    problem: Problem
    chunk_size: int | None
    budget_bytes: int | None
    planned: Plan | None  # for "auto": of all gradients, within the budget, or beyond where that is a wish

    def plan(self, needs: Needs | None = None) -> Plan:
        """The plan for these gradients, or for those that the decision was made for; the mode stays."""
        problem = self.problem
        if needs is not None:
            problem = dataclasses.replace(problem, hidden_gradient=needs.hidden, weight_gradient=needs.weight)
        try:
            return plan(problem, self.options.mode, self.chunk_size, self.budget_bytes)
        except ValueError:
            # Fewer gradients may need more: that of the weight has room for the weight's copy.
            if self.planned is None:
                raise
            return plan(problem, self.options.mode, self.planned.chunk_size)

    def linear_options(self, needs: Needs | None = None) -> LinearOptions:
        return dataclasses.replace(self.options, chunk_size=self.plan(needs).chunk_size)


def why_not_fast(reduction: str, vocab_axis: str | None, *dtypes: Any) -> str | None:
    """The reason why gradients of these dtypes cannot be made in the forward, or None."""
    if reduction == "none":
        return "the cotangent of each token's loss is unknown in the forward; use mode='lean' or reduction='sum'"
    if vocab_axis is not None:
        return "the log-normaliser of all shards is unknown while one is computed; use mode='lean'"
    if jnp.float16 in dtypes:
        return "float16 rounds gradients to 0 before a loss scale can reach them; use mode='lean' or bfloat16"
    return None


def decide(
    hidden: Any,
    weight: Any,
    *others: Any,
    options: LinearOptions,
    fast_is_impossible: str | None,
    implementation: _dispatch.Implementation,
    chunk_size: int | None,
    memory_budget_bytes: int | None,
    differentiated: tuple[str, ...] = ("hidden", "weight"),
    device: AbstractDevice | None = None,
    device_memory_bytes: int | None = None,
    op: str = OP,
) -> Decision:
    """Chooses kernels for arrays, or for their types; `options.mode` may be "auto", and its chunk size is not read."""
    if options.mode == "fast" and fast_is_impossible is not None:
        raise ValueError(f"{op}: mode='fast' makes gradients in the forward, and here {fast_is_impossible}.")
    if options.mode == "auto" and fast_is_impossible is not None:
        options = dataclasses.replace(options, mode="lean")
    device = device or _dispatch.device_of(hidden, weight)
    choice = _dispatch.choose(
        op, KERNELS, DEFAULTS, implementation, hidden, weight, *others, device=device, options=options
    )
    name = choice.partition(":")[0]
    problem = Problem(
        *hidden.shape,
        weight.shape[options.vocab_dim],
        itemsize=hidden.dtype.itemsize,
        weight_itemsize=weight.dtype.itemsize,
        platform=device.platform,
        implementation=name,
        hidden_gradient="hidden" in differentiated,
        weight_gradient="weight" in differentiated,
    )
    budget, planned = memory_budget_bytes, None
    if options.mode == "auto":
        if budget is None and device_memory_bytes is not None:
            budget = device_memory_bytes // SHARE_OF_MEMORY
        mode = "auto" if hasattr(KERNELS[name], "gradients_in_forward") else "lean"
        planned = plan(problem, mode, chunk_size, budget, budget_is_a_wish=True)
        options = dataclasses.replace(options, mode=planned.mode)
        if memory_budget_bytes is not None and planned.extra_bytes > memory_budget_bytes:
            planned = None  # whoever named the budget hears of it when it is known which gradients are wanted
    return Decision(op, choice, options, problem, chunk_size, budget, planned)


def plan_fused_linear_cross_entropy(
    n: int,
    d: int,
    v: int,
    *,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    weight_dtype: jax.typing.DTypeLike | None = None,
    weight_layout: str = "vd",
    reduction: str = "mean",
    differentiated: tuple[str, ...] = ("hidden", "weight"),
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    mode: str = "auto",
    chunk_size: int | None = None,
    memory_budget_bytes: int | None = None,
    implementation: _dispatch.Implementation = None,
    device: Any = None,
    device_memory_bytes: int | None = None,
) -> Plan:
    """How `fused_linear_cross_entropy` would compute a loss of this shape, and the memory that it would need.

    Nothing is compiled or allocated. The op makes the same plan from the same arguments; `mode`, `chunk_size`,
    `memory_budget_bytes` and `implementation` given to the op override it.

    Args:
        n: tokens.
        d: width of the hidden states.
        v: entries of the vocabulary.
        dtype: of the hidden states.
        weight_dtype: of the weight; None for `dtype`.
        weight_layout: "vd" or "dv".
        reduction: "mean", "sum" or "none".
        differentiated: which of "hidden" and "weight" get gradients.
        logit_scale: as the op takes it.
        logit_softcap: as the op takes it.
        mode: "auto", "fast" or "lean".
        chunk_size: tokens in a chunk ("fast"), or vocabulary entries in a slice ("lean"); None to choose.
        memory_budget_bytes: what may be used beside inputs and gradients; None for no bound.
        implementation: as the op takes it.
        device: a `jax.Device`, or a `jax.sharding.AbstractDevice` that need not be there; None for the default one.
        device_memory_bytes: its memory, of which "auto" takes an eighth at most where there is no budget, or what
            "lean" needs if that is more; None for no bound.

    Returns:
        A plan: `implementation`, `mode`, `chunk_size` and `extra_bytes`, the predicted bytes beside inputs and
        gradients.

    Raises:
        TypeError: `logit_scale` or `logit_softcap` is no Python number.
        ValueError: a size, a number or a name is out of range, the budget is too small, or an implementation cannot
            run this.

    Example:
        >>> from jax.sharding import AbstractDevice
        >>> h200 = AbstractDevice("NVIDIA H200", 132, "gpu")
        >>> plan = plan_fused_linear_cross_entropy(8192, 4096, 128256, device=h200)
        >>> plan.implementation, plan.mode, plan.chunk_size, plan.extra_bytes // 2**20
        ('mosaic_gpu', 'fast', 8192, 2082)
    """
    for name, size in dict(n=n, d=d, v=v).items():
        if size < 1:
            raise ValueError(f"plan_{OP}: {name}={size} must be at least 1.")
    for name in differentiated:
        _checks.check_choice(f"plan_{OP}", "differentiated", name, ("hidden", "weight"))
    check_choices(f"plan_{OP}", weight_layout, mode, chunk_size)
    check_logit_options(f"plan_{OP}", logit_scale, logit_softcap)
    if device is None:
        device = _dispatch.device_of()
    elif not isinstance(device, AbstractDevice):
        device = _dispatch.described(device)
    softcap = None if logit_softcap is None else float(logit_softcap)
    decision = decide(
        jax.ShapeDtypeStruct((n, d), dtype),
        jax.ShapeDtypeStruct((v, d) if weight_layout == "vd" else (d, v), weight_dtype or dtype),
        options=LinearOptions(
            LogitOptions(float(logit_scale), softcap), weight_layout, _dispatch.current_precision(None), mode, 0
        ),
        fast_is_impossible=why_not_fast(reduction, None, jnp.dtype(dtype), jnp.dtype(weight_dtype or dtype)),
        implementation=implementation,
        chunk_size=chunk_size,
        memory_budget_bytes=memory_budget_bytes,
        differentiated=differentiated,
        device=device,
        device_memory_bytes=device_memory_bytes,
    )
    return decision.plan()


def check_choices(op: str, weight_layout: str, mode: str, chunk_size: int | None) -> None:
    """Raises a ValueError for a name or a chunk size out of range."""
    _checks.check_choice(op, "weight_layout", weight_layout, LAYOUTS)
    _checks.check_choice(op, "mode", mode, MODES)
    if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
        raise ValueError(f"{op}: chunk_size={chunk_size!r} must be a Python int of at least 1; None chooses one.")
