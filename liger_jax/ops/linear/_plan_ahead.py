"""The plan of `fused_linear_cross_entropy` beforehand: its mode, chunk and memory for a shape and a device."""

from typing import Any

import jax
import jax.numpy as jnp

from liger_jax.ops import checks
from liger_jax.ops.kernels import Implementation
from liger_jax.ops.linear.plan import Plan, make_plan
from liger_jax.ops.linear.problem import OP, problem_of_sizes
from liger_jax.ops.loss_terms import check_logit_options
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import Needs


def plan_fused_linear_cross_entropy(
    n: int,
    d: int,
    v: int,
    *,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    weight_dtype: jax.typing.DTypeLike | None = None,
    weight_layout: str = "vd",
    weight_is_split: bool = False,
    reduction: str = "mean",
    differentiated: tuple[str, ...] = ("hidden", "weight"),
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    mode: str = "auto",
    chunk_size: int | None = None,
    memory_budget_bytes: int | None = None,
    implementation: Implementation = None,
    device: Any = None,
    device_memory_bytes: int | None = None,
) -> Plan:
    """How `fused_linear_cross_entropy` would compute a loss of this shape, and the memory that it would need.

    Nothing is compiled or allocated. The op makes the same plan from the same arguments; `mode`, `chunk_size`,
    `memory_budget_bytes` and `implementation` given to the op override it.

    Arguments that are not listed here are those of `fused_linear_cross_entropy`.

    Args:
        n: tokens.
        d: width of the hidden states.
        v: entries of the vocabulary.
        dtype: dtype of the hidden states.
        weight_dtype: dtype of the weight; None for `dtype`.
        weight_is_split: whether the weight is sharded over the same devices as the tokens, as under FSDP. Mode "lean"
            gathers it in slices, and "fast" as a whole.
        differentiated: which of "hidden" and "weight" get gradients.
        device: a `jax.Device`, or a `jax.sharding.AbstractDevice` for one that need not be present; None for the
            default one.
        device_memory_bytes: the device's memory; None for no limit. Without a budget, "auto" uses at most an eighth of
            it, or as much as "lean" needs if that is more.

    Returns:
        A plan: `implementation`, `mode`, `chunk_size` and `extra_bytes`, the predicted bytes in addition to inputs and
        gradients.

    Raises:
        ValueError: the budget is too small, or an implementation cannot run this.

    Example:
        >>> from jax.sharding import AbstractDevice
        >>> h200 = AbstractDevice("NVIDIA H200", 132, "gpu")
        >>> plan = plan_fused_linear_cross_entropy(8192, 4096, 128256, device=h200)
        >>> plan.implementation, plan.mode, plan.chunk_size, plan.extra_bytes // 2**20
        ('mosaic_gpu', 'fast', 8192, 2115)
    """
    op = f"plan_{OP}"
    for name, size in dict(n=n, d=d, v=v).items():
        checks.check_int(op, **{name: size})
        if size < 1:
            raise ValueError(f"{op}: {name}={size} must be at least 1.")
    if not isinstance(differentiated, tuple):
        raise TypeError(f"{op}: differentiated={differentiated!r} must be a tuple of names, such as ('hidden',).")
    for name in differentiated:
        checks.check_choice(op, "differentiated", name, ("hidden", "weight"))
    checks.check_layout(op, weight_layout)
    checks.check_mode(op, mode, chunk_size, memory_budget_bytes)
    checks.check_flag(op, weight_is_split=weight_is_split)
    check_logit_options(op, logit_scale, logit_softcap)
    if device_memory_bytes is not None:
        checks.check_number(op, device_memory_bytes=device_memory_bytes)
    if device is not None and not hasattr(device, "device_kind"):
        raise TypeError(f"{op}: device is a {type(device).__name__}, but must be a jax.Device or an AbstractDevice.")
    for name, kind in dict(dtype=dtype, weight_dtype=dtype if weight_dtype is None else weight_dtype).items():
        try:
            is_dtype = kind is not None and not isinstance(kind, jax.Array)
            is_floating = is_dtype and jnp.issubdtype(jnp.dtype(kind), jnp.floating)
        except (TypeError, ValueError):
            is_floating = False
        if not is_floating:
            raise TypeError(f"{op}: {name}={kind!r} must be a floating-point dtype, such as jnp.bfloat16.")
    problem = problem_of_sizes(
        n,
        d,
        v,
        dtype=dtype,
        weight_dtype=dtype if weight_dtype is None else weight_dtype,
        weight_layout=weight_layout,
        weight_is_split=weight_is_split,
        reduction=reduction,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
        mode=mode,
        chunk_size=chunk_size,
        memory_budget_bytes=memory_budget_bytes,
        device_memory_bytes=device_memory_bytes,
        implementation=implementation,
        device=device,
        gradients=Needs("hidden" in differentiated, "weight" in differentiated, bias=False),
    )
    return make_plan(problem)
