"""What the numbers of a plan say: where the memory goes, what the fused loss saves, and what makes a run fit."""

import dataclasses
from collections.abc import Callable, Iterator

from liger_jax.planner.devices import GIB, GPUS, GPUS_PER_HOST, Target, target
from liger_jax.planner.estimate import Estimate, estimate
from liger_jax.planner.step import Run

MOST_DEVICES = 4096
_LITTLE = 0.1  # a saving below this share is little


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of a run, and what it bought.

    Attributes:
        name: in words.
        run: the run after it.
        saved_bytes: on each device.
        total_bytes: what is needed after it.
    """

    name: str
    run: Run
    saved_bytes: int
    total_bytes: int


def advice(run: Run, totals: dict[str, int], estimates: dict[str, Estimate]) -> str:
    """One or two sentences that follow from the figures.

    Args:
        run: what was planned.
        totals: for each loss, what a step needs; compiled figures where there are some.
        estimates: for each loss.

    Returns:
        The sentences.
    """
    saving = 1 - totals["fused"] / totals["logits"]
    static = estimates["logits"].static / estimates["logits"].total
    text = f"Static memory is {static:.0%} of this run on logits; the fused loss saves {saving:.0%} of the whole"
    capacity = run.target.memory_bytes
    fits = totals["fused"] <= capacity
    if fits and saving < _LITTLE and (later := _where_it_pays(run, saving)) is not None:
        batch, more = later
        text += f"; at batch {batch} it saves {more:.0%} (estimate)"
    if fits and totals["logits"] > capacity:
        return f"{text}. That is what makes it fit: {_gib(totals['logits'])} on logits is too much."
    if fits:
        room = largest_batch(dataclasses.replace(run, loss="fused"), totals["fused"] - estimates["fused"].total)
        hint = f"fits, and so would batch {room} (estimate)" if room > run.batch else "fits"
        return f"{text}. It {hint}: {_gib(capacity - totals['fused'])} of {_gib(capacity)} are left."
    static_alone = estimates["fused"].static
    if static_alone > capacity:
        cause = (
            f"Parameters, gradients and optimizer state alone are {_gib(static_alone)}: shard over more devices first"
        )
    else:
        cause = f"{_gib(totals['fused'] - capacity)} are missing"
    return f"{text}. It does not fit into {_gib(capacity)}. {cause}."


def changes_to_fit(run: Run) -> list[Change]:
    """Changes, one after the other, until a run fits by its estimate: the cheapest in time and quality first.

    Args:
        run: that does not fit.

    Returns:
        The changes, each on top of those before it, without those that save nothing. If the last one's total is more
        than the memory, nothing here makes the run fit.
    """
    taken = []
    total = estimate(run).total
    for name, changed in _changes(run):
        if total <= run.target.memory_bytes:
            break
        base = taken[-1].run if taken else run
        after = dataclasses.replace(base, **changed)
        needed = estimate(after).total
        if needed < total:
            taken.append(Change(name, after, total - needed, needed))
            total = needed
    return taken


def largest_batch(run: Run, correction: int = 0) -> int:
    """The largest batch that fits by its estimate, in multiples of devices and micro-batches; 0 if none does.

    Args:
        run: whose batch is not read.
        correction: bytes that the estimate lacks.

    Returns:
        The batch.
    """
    fits = lambda n: (
        estimate(dataclasses.replace(run, batch=n * run.batch_unit)).total + correction <= run.target.memory_bytes
    )
    return largest(fits) * run.batch_unit


def largest(fits: Callable[[int], bool]) -> int:
    """The largest n ≥ 1 for which a monotone predicate holds, by doubling and bisection; 0 if none.

    Args:
        fits: of an integer.

    Returns:
        n.

    Example:
        >>> largest(lambda n: n * n <= 50)
        7
    """
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _where_it_pays(run: Run, saving: float) -> tuple[int, float] | None:
    """The batch, up to 64 times this one, at which the fused loss saves the most, and the share; None if no more."""
    best = None
    for factor in (2, 4, 8, 16, 32, 64):
        at = {
            loss: estimate(dataclasses.replace(run, batch=run.batch * factor, loss=loss))
            for loss in ("fused", "logits")
        }
        there = 1 - at["fused"].total / at["logits"].total
        if there > max(saving + 0.02, best[1] if best else 0) + 0.01:
            best = run.batch * factor, there
    return best


def _changes(run: Run) -> Iterator[tuple[str, dict]]:
    if run.loss != "fused":
        yield "the fused loss", dict(loss="fused")
    if run.remat != "full":
        yield "remat=full", dict(remat="full")
    parts = 2 * run.micro_batches
    while run.batch % (run.target.count * parts) == 0:
        yield f"{parts} micro-batches", dict(micro_batches=parts)
        parts *= 2
    if run.mesh["data"] > 1:
        yield f"fsdp={run.target.count} instead of {run.mesh['fsdp']}", dict(mesh={"data": 1, "fsdp": run.target.count})
    devices = run.target
    while (devices := _twice(devices)) is not None and run.batch % (devices.count * run.micro_batches) == 0:
        mesh = {"data": 1, "fsdp": devices.count}
        yield f"{devices.name}", dict(target=devices, mesh=mesh, micro_batches=run.micro_batches)
    if run.optimizer == "adamw" and run.state_dtype == "float32":
        yield "optimizer state in bfloat16", dict(state_dtype="bfloat16")


def _twice(devices: Target) -> Target | None:
    """Twice as many of them, or None."""
    kind, _, size = devices.name.partition(":")
    if devices.count * 2 > MOST_DEVICES:
        return None
    if kind in GPUS:
        count = devices.count * 2
        return target(f"{kind}:{count}") if count <= GPUS_PER_HOST or count % GPUS_PER_HOST == 0 else None
    if not size:
        return target(f"{kind}:{devices.topology}")
    axes = [int(axis) for axis in size.split("x")]
    axes[axes.index(min(axes))] *= 2
    return target(f"{kind}:{'x'.join(map(str, axes))}")


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
