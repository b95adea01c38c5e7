"""A plan as a table, as bars for a terminal, and as a picture."""

import dataclasses
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from liger_jax._install import install_command
from liger_jax.pallas_kernels.devices import HOPPER
from liger_jax.planner.advice import PRECISIONS, Change, options
from liger_jax.planner.devices import GIB, LITTLE, NEAR, PINNED_GIB, PINNED_LIMIT, Target, pinned_limit
from liger_jax.planner.estimate import DYNAMIC, STATIC
from liger_jax.planner.planning import MemoryPlan
from liger_jax.planner.searching import SEQ_UNIT
from liger_jax.planner.speed import WITHIN
from liger_jax.planner.step import LOSSES
from liger_jax.training.meshes import in_words

_MARKS = dict(zip(STATIC + DYNAMIC, "PGOIAFWCL", strict=True))
_PALETTE = ("#1f4e79", "#2e75b6", "#9dc3e6", "#548235", "#70ad47", "#a9d18e", "#bfbfbf", "#7f7f7f", "#c00000")
_COLORS = dict(zip(STATIC + DYNAMIC, _PALETTE, strict=True))
_WIDTH = 60


def heading(plan: MemoryPlan) -> str:
    """The run in one line."""
    run = plan.run
    on_host = " on the host" if run.state_memory == "host" else ""
    state = f" ({run.state_dtype} state{on_host})" if run.optimizer == "adamw" else ""
    packed = " packed" if run.packed else ""
    cut = f" in {run.micro_batches} micro-batches" if run.micro_batches > 1 else ""
    beside = f" beside {run.quantize} projections" if run.quantize else ""
    dora = " with DoRA" if run.dora else ""
    adapters = f"adapters of rank {run.lora}{dora}{beside}, " if run.lora else ""
    where = f"{run.target.name} ({run.target.kind}, {in_words(run.mesh)})"
    experts = ""
    if run.model.config.experts is not None:
        total, active = (f"{n / 1e9:.1f} B" for n in (run.model.num_parameters, run.model.num_active_parameters))
        experts = f" ({total} parameters, {active} for a token)"
    return (
        f"{run.model.name}{experts}, {run.batch} × {run.seq} tokens{packed}{cut} on {where}, "
        f"{adapters}{run.optimizer}{state}, {run.param_dtype} parameters, {run.dtype} computation, remat {run.remat}"
    )


def table(plan: MemoryPlan) -> str:
    """What takes memory, the totals, and what is free of a device's memory."""
    number = lambda size: f"{size / GIB:10.2f}"
    row = lambda name, sizes: f"{name:<28}" + "".join(number(size) for size in sizes)
    estimates = [plan.estimates[loss] for loss in LOSSES]
    lines = [f"{'GiB on each device':<28}" + "".join(f"{loss:>10}" for loss in LOSSES)]
    for name in STATIC + DYNAMIC:
        lines.append(row(f"  {_MARKS[name]} {name}", [e.bytes_of[name] for e in estimates]))
    lines.append(row("needed (estimate)", [e.total for e in estimates]))
    lines.append(f"{'  which peaks in the':<28}" + "".join(f"{e.peak:>10}" for e in estimates))
    lines.append(row("  loss buffers, peak or not", [e.loss_bytes for e in estimates]))
    if plan.compiled:
        compiled = [plan.compiled[loss] for loss in LOSSES]
        lines.append(row("needed (compiled)", [c.total for c in compiled]))
        lines.append(row("  parameters and state", [c.arguments for c in compiled]))
        lines.append(row("  temporaries", [c.temporaries for c in compiled]))
    capacity = plan.run.target.capacity_bytes
    lines.append(row("a process can have", [capacity] * 2))
    free = [capacity - plan.totals[loss] for loss in LOSSES]
    lines.append(f"{'free':<28}" + "".join(number(size) if size >= 0 else f"{'none':>10}" for size in free))
    return "\n".join(lines)


def bars(plan: MemoryPlan) -> str:
    """A stacked bar for each loss against the device's memory, by estimate."""
    capacity = plan.run.target.capacity_bytes
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
    """The marks of a bar. Each bar ends at the rounded sum so far, so rounding errors do not add up."""
    done = 0
    for name in STATIC + DYNAMIC:
        before, done = done, done + plan.estimates[loss].bytes_of[name]
        yield from _MARKS[name] * (round(_WIDTH * done / most) - round(_WIDTH * before / most))


def verdict(plan: MemoryPlan, cure: str = "") -> str:
    """Whether it fits, in one line, with the share of a GPU that JAX must be given for it.

    Returns such as "Fits: 21.7 of 74.3 GiB on each of 8.".
    """
    target = plan.run.target
    if plan.fits:
        return f"Fits: {_needed_of(target, plan.needed)}."
    if plan.needed <= target.capacity_bytes and plan.run.host_memory is not None:
        needed, has = _apart(plan.host, plan.run.host_memory)
        return f"Does not fit: {needed} GiB needed of the host's memory, which has {has}."
    where = f" on each of {target.count}" if target.count > 1 else ""
    needed, capacity = _apart(plan.needed, target.capacity_bytes)
    cure = f" It fits with {cure}." if cure else ""
    return f"Does not fit: {needed} GiB needed{where}, and a process can have {capacity}.{cure}"


def is_tight(target: Target, needed: int) -> bool:
    """Whether a step that fits leaves less than `LITTLE` of what a process can have."""
    return 0 <= target.capacity_bytes - needed < LITTLE * target.capacity_bytes


def _needed_of(target: Target, needed: int) -> str:
    """Needed memory, what a process can have, the number of devices, and what is left if little."""
    where = f" on each of {target.count}" if target.count > 1 else ""
    left = f", with {1 - needed / target.capacity_bytes:.1%} to spare" if is_tight(target, needed) else ""
    return f"{' of '.join(_apart(needed, target.capacity_bytes))} GiB{where}{left}"


def _then(plan: MemoryPlan, change: Change) -> str:
    """What the run needs after a change that makes it fit, as its own plan says it."""
    return _needed_of(change.run.target, plan.then_needed(change))


def _apart(*sizes: int) -> list[str]:
    """GiB with one digit, or with two where one digit does not distinguish the sizes."""
    texts = [f"{size / GIB:.1f}" for size in sizes]
    return texts if len({*texts}) > 1 else [f"{size / GIB:.2f}" for size in sizes]


def text(plan: MemoryPlan, largest_batch: int | None = None, *, details: bool = False) -> str:
    """The whole text for a terminal: verdict, largest batch, advice, and what was planned."""
    changes = plan.changes_to_fit()
    is_cured_here = bool(changes) and changes[-1].run.target == plan.run.target
    cure = " ".join(change.name for change in changes) if is_cured_here else ""
    paragraphs = [verdict(plan, cure), *_choice(plan), _largest(plan, largest_batch)]
    paragraphs += [] if plan.fits else _to_fit(plan, changes)
    paragraphs += [plan.advice, "", f"Planned: {heading(plan)}."]
    paragraphs += ["", table(plan), "", bars(plan), ""] if details else []
    return "\n".join(paragraphs)


def _choice(plan: MemoryPlan) -> Iterator[str]:
    """What the planner chose, as a run says it, and how fast a step is."""
    if plan.choice is not None:
        yield plan.choice.line
        if plan.run.micro_batches > 1:
            yield f"batch: {plan.run.batch} rows in {plan.run.micro_batches} micro-batches"
    if plan.fits and (rate := plan.tokens_per_second) is not None:
        is_measured = plan.run.target.platform == "gpu" and plan.run.target.capability == HOPPER
        near = f"within {WITHIN:.0%} of what was measured" if is_measured else "which was compared with measurements"
        error = f"{near} on Hopper GPUs{'' if is_measured else ' alone'}"
        yield f"Speed: about {float(f'{rate:.2g}'):,.0f} tokens a second (estimate, {error})."


def _largest(plan: MemoryPlan, known: int | None) -> str:
    if known is not None:
        return f"Largest batch: {known:,}."
    if not (batch := plan.largest_batch):
        return f"No batch of {plan.run.seq} tokens fits (estimate)."
    return f"Largest batch: {batch:,} (estimate)."


def _to_fit(plan: MemoryPlan, changes: list[Change]) -> list[str]:
    run, adapters = plan.run, plan.adapters_that_fit
    instead = []
    if adapters is not None:
        instead = [f"Or train adapters: {adapters.name}, {_then(plan, adapters)}."]
    if not changes:
        return [
            f"Nothing here makes it fit, and no number of {run.target.kind}s does. Take a shorter sequence, larger "
            "devices or a smaller model.",
            *instead,
        ]
    width = max(len(change.name) for change in changes)
    lines = [_no_option_here(plan, adapters is not None)] if changes[0].run.target != run.target else []
    lines += ["To make it fit, the cheapest first (estimates):"]
    for change in changes:
        lines.append(
            f"  {change.name:<{width}}  saves {change.saved_bytes / GIB:.1f} GiB: {change.total_bytes / GIB:.1f} needed"
        )
    last = changes[-1]
    lines.append(f"Then it fits: {_then(plan, last)}.")
    if any(getattr(last.run, name) != getattr(run, name) for name in PRECISIONS) and (
        exact := plan.changes_to_fit(precisions=())
    ):
        last = exact[-1]
        lines.append(f"Or in float32: {options(run, last.run)}, {_then(plan, last)}.")
    return lines + instead


def _no_option_here(plan: MemoryPlan, fits_as_adapters: bool) -> str:
    """Says that only more devices make a run fit, and whether shorter rows would."""
    run, kind, count = plan.run, plan.run.target.kind, plan.run.target.count
    where = f"one {kind}" if count == 1 else f"these {count} of {kind}"
    shortest = dataclasses.replace(run, seq=SEQ_UNIT)
    shorter = "; shorter rows would: --search seq finds the longest"
    hint = shorter if run.seq > SEQ_UNIT and plan.estimated(shortest) <= run.target.capacity_bytes else ""
    trained = " while all weights are trained" if fits_as_adapters else ""
    return f"No option makes it fit {where}{trained}{hint}."


def notes(plan: MemoryPlan) -> list[str]:
    """Notes about the device that the plan's numbers do not show."""
    run, target = plan.run, plan.run.target
    lines = []
    if plan.host:
        limit = pinned_limit(plan.host) if target.platform == "gpu" else None
        setting = f": start Python with {PINNED_LIMIT}={limit}, since JAX's own limit is {PINNED_GIB}" if limit else ""
        lines.append(f"The host holds {plan.host / GIB:.1f} GiB in pinned memory{setting}.")
    if plan.fits and is_tight(target, plan.needed) and not plan.compiled:
        lines.append("Note: an estimate may be off by more than what is to spare: ask the compiler, --level compiled.")
    if not plan.compiled and target.capacity_bytes < plan.needed <= (1 + NEAR) * target.capacity_bytes:
        lines.append("Note: an estimate may be off by more than what is missing: ask the compiler, --level compiled.")
    if run.model.quantized and "unsloth-bnb" in run.model.name.lower():
        lines.append("Note: this checkpoint holds some layers in 16 bits, which is not counted.")
    if target.platform == "gpu" and target.capability < (8, 0) and "bfloat16" in (run.dtype, run.param_dtype):
        lines.append(
            f"Note: {target.kind} has no bfloat16 arithmetic. XLA converts to float32 there, which is slow and takes "
            "memory that the formulas do not count: plan with --dtype float32 as well."
        )
    return lines


def check_picture(path: str | os.PathLike[str]) -> None:
    """Checks before the plan is made that its picture can be drawn."""
    path = pathlib.Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"picture={str(path)!r}: there is no folder {str(path.parent)!r}. Make it first.")
    if path.is_dir():
        raise ValueError(f"picture={str(path)!r} is a folder. Name a file in it, such as {str(path / 'plan.png')!r}.")
    formats = _figure_class()().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise ValueError(f"picture={str(path)!r} must end in .png, or in another of {', '.join(sorted(formats))}.")


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(f"The picture needs matplotlib: {install_command('planner')}") from None
    return Figure


def picture(plan: MemoryPlan, path: str | os.PathLike[str]) -> None:
    """Draws the bars as a picture."""
    figure = _figure_class()(figsize=(9, 3), layout="constrained")
    axes = figure.subplots()
    left = dict.fromkeys(LOSSES, 0.0)
    for name in STATIC + DYNAMIC:
        widths = [plan.estimates[loss].bytes_of[name] / GIB for loss in LOSSES]
        axes.barh(LOSSES, widths, left=[left[loss] for loss in LOSSES], label=name, color=_COLORS[name])
        left = {loss: left[loss] + width for loss, width in zip(LOSSES, widths, strict=True)}
    capacity = plan.run.target.capacity_bytes / GIB
    axes.axvline(capacity, color="black", linestyle="--", label="a process can have")
    for loss, compiled in plan.compiled.items():
        axes.plot([compiled.total / GIB], [loss], "kD", label="compiled" if loss == LOSSES[0] else None)
    axes.set(xlabel="GiB on each device")
    axes.set_title(heading(plan), fontsize=8)
    axes.invert_yaxis()
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=150)
