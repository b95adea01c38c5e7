"""A plan as a table, as bars for a terminal, and as a picture."""

import os
from collections.abc import Iterator

from liger_jax.planner.devices import GIB
from liger_jax.planner.estimate import DYNAMIC, STATIC
from liger_jax.planner.planning import MemoryPlan
from liger_jax.planner.step import LOSSES

_MARKS = dict(zip(STATIC + DYNAMIC, "PGOIAFWCL", strict=True))
_PALETTE = ("#1f4e79", "#2e75b6", "#9dc3e6", "#548235", "#70ad47", "#a9d18e", "#bfbfbf", "#7f7f7f", "#c00000")
_COLORS = dict(zip(STATIC + DYNAMIC, _PALETTE, strict=True))
_WIDTH = 60


def heading(plan: MemoryPlan) -> str:
    """What is planned, in one line.

    Args:
        plan: of `liger_jax.planner.plan`.

    Returns:
        The line.
    """
    run = plan.run
    mesh = ",".join(f"{axis}={size}" for axis, size in run.mesh.items())
    where = " on the host" if run.state_memory == "host" else ""
    state = f" ({run.state_dtype} state{where})" if run.optimizer == "adamw" else ""
    parts = f" in {run.micro_batches} parts" if run.micro_batches > 1 else ""
    return (
        f"{run.model.name}, {run.batch} × {run.seq} tokens{parts} on {run.target.name} ({run.target.kind}, {mesh}), "
        f"{run.optimizer}{state}, {run.param_dtype} parameters, {run.dtype} computation, remat {run.remat}"
    )


def table(plan: MemoryPlan) -> str:
    """The parts, the totals, and what is left of a device's memory.

    Args:
        plan: of `liger_jax.planner.plan`.

    Returns:
        Lines for a terminal, in GiB.
    """
    number = lambda size: f"{size / GIB:10.2f}"
    row = lambda name, sizes: f"{name:<28}" + "".join(number(size) for size in sizes)
    estimates = [plan.estimates[loss] for loss in LOSSES]
    lines = [f"{'GiB on each device':<28}" + "".join(f"{loss:>10}" for loss in LOSSES)]
    for name in STATIC + DYNAMIC:
        lines.append(row(f"  {_MARKS[name]} {name}", [e.parts[name] for e in estimates]))
    lines.append(row("estimate", [e.total for e in estimates]))
    lines.append(f"{'  which peaks in the':<28}" + "".join(f"{e.peak:>10}" for e in estimates))
    lines.append(row("  loss buffers, peak or not", [e.loss_bytes for e in estimates]))
    if plan.compiled:
        compiled = [plan.compiled[loss] for loss in LOSSES]
        lines.append(row("compiled", [c.total for c in compiled]))
        lines.append(row("  parameters and state", [c.arguments for c in compiled]))
        lines.append(row("  temporaries", [c.temporaries for c in compiled]))
    capacity = plan.run.target.memory_bytes
    lines.append(row("memory of a device", [capacity] * 2))
    lines.append(row("left", [capacity - plan.totals[loss] for loss in LOSSES]))
    return "\n".join(lines)


def bars(plan: MemoryPlan) -> str:
    """A stacked bar for each loss against the device's memory, by estimate.

    Args:
        plan: of `liger_jax.planner.plan`.

    Returns:
        Lines for a terminal. Beyond the memory, marks are small letters.
    """
    capacity = plan.run.target.memory_bytes
    most = max(capacity, *(e.total for e in plan.estimates.values()))
    lines = []
    for loss in LOSSES:
        bar = "".join(
            mark if (i + 0.5) * most / _WIDTH <= capacity else mark.lower()
            for i, mark in enumerate(_marks(plan, loss, most))
        )
        room = round(_WIDTH * capacity / most)
        bar = bar.ljust(room, "·").ljust(_WIDTH)
        lines.append(f"{loss:>7} |{bar}| {plan.estimates[loss].total / GIB:.1f} of {capacity / GIB:.1f} GiB")
    return "\n".join(lines)


def _marks(plan: MemoryPlan, loss: str, most: int) -> Iterator[str]:
    """The marks of a bar: each part begins and ends where its sum does."""
    done = 0
    for name in STATIC + DYNAMIC:
        before, done = done, done + plan.estimates[loss].parts[name]
        yield from _MARKS[name] * (round(_WIDTH * done / most) - round(_WIDTH * before / most))


def text(plan: MemoryPlan) -> str:
    """All that a terminal shows.

    Args:
        plan: of `liger_jax.planner.plan`.

    Returns:
        Lines.
    """
    parts = [heading(plan), "", table(plan), "", bars(plan), "", plan.advice]
    if plan.run.target.platform == "gpu" and plan.totals[plan.run.loss] > 0.75 * plan.run.target.memory_bytes:
        parts.append("JAX takes 75 % of a GPU's memory by default: set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95.")
    if changes := plan.changes_to_fit():
        parts.append("To make it fit (estimates):")
        parts += [
            f"  {change.name}: saves {change.saved_bytes / GIB:.1f} GiB, leaves {change.total_bytes / GIB:.1f}"
            for change in changes
        ]
        last = changes[-1]
        if last.total_bytes > last.run.target.memory_bytes:
            parts.append("  and that is still too much: take a smaller batch, a shorter sequence or more devices.")
    return "\n".join(parts)


def picture(plan: MemoryPlan, path: str | os.PathLike[str]) -> None:
    """Draws the bars as a PNG.

    Args:
        plan: of `liger_jax.planner.plan`.
        path: of the file.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("The picture needs matplotlib: pip install 'liger-jax[examples]'.") from None
    figure = Figure(figsize=(9, 3), layout="constrained")
    axes = figure.subplots()
    left = dict.fromkeys(LOSSES, 0.0)
    for name in STATIC + DYNAMIC:
        widths = [plan.estimates[loss].parts[name] / GIB for loss in LOSSES]
        axes.barh(LOSSES, widths, left=[left[loss] for loss in LOSSES], label=name, color=_COLORS[name])
        left = {loss: left[loss] + width for loss, width in zip(LOSSES, widths, strict=True)}
    capacity = plan.run.target.memory_bytes / GIB
    axes.axvline(capacity, color="black", linestyle="--", label="memory of a device")
    for loss, compiled in plan.compiled.items():
        axes.plot([compiled.total / GIB], [loss], "kD", label="compiled" if loss == LOSSES[0] else None)
    axes.set(xlabel="GiB on each device")
    axes.set_title(heading(plan), fontsize=8)
    axes.invert_yaxis()
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=150)
