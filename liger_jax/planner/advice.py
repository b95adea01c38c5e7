"""Advice from the numbers of a plan: where the memory goes, what the fused loss saves, and what makes a run fit."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from liger_jax.models.core.remat import is_offloaded, keeps_products
from liger_jax.planner import defaults
from liger_jax.planner.devices import GIB, Target
from liger_jax.planner.estimate import Estimate, estimate
from liger_jax.planner.mesh import mesh_sizes
from liger_jax.planner.step import Run
from liger_jax.training.meshes import in_words

PRECISIONS = ("param_dtype",)  # which the commands that train take, too
_LITTLE = 0.1  # a saving below this share is little
_SHORTEST = 128  # rows shorter than this are not proposed


@dataclasses.dataclass(frozen=True)
class Change:
    """One change to a run, and the memory that it saves."""

    name: str  # the change in the command's options, such as "--remat full"
    run: Run  # the changed run
    saved_bytes: int  # what the change saves on each device
    total_bytes: int  # what the changed run needs on each device


def advice(run: Run, totals: dict[str, int], estimates: dict[str, Estimate], logits_fit: bool = False) -> str:
    """One or two sentences of advice from the figures.

    `totals`: for each loss, what a step needs; compiled figures where there are some. `logits_fit`: whether the run on
    logits fits with layers that keep less.
    """
    saving = 1 - totals["fused"] / totals["logits"]
    static = estimates["logits"].static
    share = (
        f"Static memory (parameters, gradients, optimizer state) is {static / totals['logits']:.0%} of a step on logits"
    )
    text = f"{share}; the fused loss {_saves(saving)}"
    capacity = run.target.capacity_bytes
    fits = {loss: total <= capacity for loss, total in totals.items()}
    if fits["fused"] and saving < _LITTLE and (later := _where_it_pays(run, saving)) is not None:
        batch, more = later
        text += f"; at batch {batch} it saves {more:.0%} (estimate)"
    if fits["fused"] and not (fits["logits"] or logits_fit):
        text += f". That is what makes it fit: {_gib(totals['logits'])} on logits are too much"
    elif static > capacity:
        text += f". Static memory alone is {_gib(static)}: shard it over more devices"
    return f"{text}."


def _saves(saving: float) -> str:
    if abs(saving) < 0.005:
        return "saves nothing here"
    return f"saves {saving:.0%} of the whole" if saving > 0 else f"takes {-saving:.0%} more"


def changes_to_fit(run: Run, correction: int = 0, precisions: tuple[str, ...] = PRECISIONS) -> list[Change]:
    """The first combination of changes that makes a run fit by its estimate, the cheapest in time and quality first.

    Changes that cost nothing are tried first, then those that cost time, then moments in 8 bits, then bfloat16 for
    weights in float32. If none of these is enough, the same is tried on more devices of the same kind, as few as
    possible. The batch keeps its size, unless there are more devices than sequences: then it grows to one sequence for
    each device. Nothing is advised that the commands that train do not take.

    Returns the changes, each on top of those before it, and none that could be left out. Empty if the run fits already,
    or if no combination makes it fit.
    """

    needed = lambda run: estimate(run).total + correction
    if needed(run) <= run.target.capacity_bytes:
        return []
    for start, coarser in _starts(run, precisions):
        if (chosen := cheapest(start, changes(start, coarser), needed)) is not None:
            runs = [run] if start is run else [run, start]
            for change in chosen:
                runs.append(dataclasses.replace(runs[-1], **change))
            pairs = zip(runs, runs[1:], strict=False)
            return [Change(options(a, b), b, needed(a) - needed(b), needed(b)) for a, b in pairs]
    return []


def _starts(run: Run, precisions: tuple[str, ...]) -> Iterator[tuple[Run, tuple[str, ...]]]:
    """The run on its own devices, then on more of them, each with the values that may be held in bfloat16."""
    yield run, ()
    yield run, precisions
    for coarser in ((), precisions):
        devices = run.target.more()
        while devices is not None:
            if (start := _on(run, devices)) is not None:
                yield start, coarser
            devices = devices.more()


def cheapest(
    run: Run, changes: Iterable[Mapping[str, Any]], needed: Callable[[Run], int] = lambda run: estimate(run).total
) -> list[Mapping[str, Any]] | None:
    """As few of the changes as make the run fit, the first ones first; `None` if no combination does."""
    total, capacity = lambda some: needed(changed(run, some)), run.target.capacity_bytes
    taken: list[Mapping[str, Any]] = []
    for change in ({}, *changes):
        if change and total([*taken, change]) >= total(taken):
            continue
        taken += [change] if change else []
        # An earlier change may be harmful by now, such as micro-batches whose sum of gradients exceeds what they save.
        taken = _without(taken, lambda fewer, all_of: total(fewer) < total(all_of))
        if total(taken) <= capacity:
            return _without(taken, lambda fewer, _: total(fewer) <= capacity)
    return None


def _without(taken: list[Mapping[str, Any]], is_enough: Callable[[Any, Any], bool]) -> list[Mapping[str, Any]]:
    """The changes without those that are not needed, the costliest first."""
    for costly in taken[::-1]:
        fewer = [other for other in taken if other is not costly]
        taken = fewer if is_enough(fewer, taken) else taken
    return taken


def changed(run: Run, changes: Iterable[Mapping[str, Any]]) -> Run:
    """The run after all of these changes."""
    return dataclasses.replace(run, **{name: value for change in changes for name, value in change.items()})


def changes(
    run: Run, coarser: tuple[str, ...] = PRECISIONS, *, frozen: str | None = None, whole: bool = False
) -> Iterator[Mapping[str, Any]]:
    """The changes to try on the run's devices: first those that cost nothing, then time, then quality.

    `coarser`: what may be held in bfloat16. `frozen`: the dtype of weights that are not trained; without one there are
    neither new adapters nor shorter rows. `whole`: the loss takes a batch in one micro-batch.
    """
    if run.loss == "logits":
        yield dict(loss="fused")
    if run.mesh["data"] > 1 and (most := _on(run, run.target)) is not None:
        yield dict(mesh=most.mesh)
    if keeps_products(run.remat) or isinstance(run.remat, int):
        yield from (dict(remat=remat) for remat in (("dots", "full") if run.remat == "none" else ("full",)))
    if run.micro_batches > 1:
        yield dict(micro_batches=1)  # their sum of gradients may be more than what smaller ones save
    for count in () if whole else run.micro_batch_choices:
        if count > run.micro_batches:
            yield dict(micro_batches=count)
    if not is_offloaded(run.remat) and run.target.platform != "cpu":
        yield dict(remat="offload")
    if run.optimizer == "adamw":
        yield dict(optimizer="adamw8bit")
    yield from ({name: "bfloat16"} for name in coarser if getattr(run, name) == "float32")
    rank = run.lora or min(defaults.RANK, run.model.config.hidden_size)
    if frozen is not None and run.lora is None:
        yield dict(lora=rank, param_dtype=frozen)
        if frozen == "float32":
            yield dict(lora=rank, param_dtype="bfloat16")
    if coarser and run.quantize is None and (run.lora or frozen is not None) and run.divides_blocks:
        yield dict(lora=rank, quantize="nf4")
    length = run.seq
    while frozen is not None and (length := length // 2) >= _SHORTEST:
        yield dict(seq=length)


def adapters_that_fit(run: Run, correction: int = 0) -> Change | None:
    """The same run with adapters in the place of all weights, which are then held as the checkpoint has them.

    Returns the change to adapters beside the checkpoint's weights, or where that is not enough beside nf4; `None` where
    adapters are trained already, or do not fit either.
    """
    if run.lora is not None:
        return None
    rank, before = min(defaults.RANK, run.model.config.hidden_size), estimate(run).total
    for quantize in (None, "nf4") if run.divides_blocks else (None,):
        held = dict(param_dtype=run.model.dtype, quantize=quantize, loss="fused")
        after = dataclasses.replace(run, lora=rank, **held)
        needed = estimate(after).total
        if needed + correction <= run.target.capacity_bytes:
            return Change(options(run, after), after, before - needed, needed + correction)
    return None


def _on(run: Run, devices: Target) -> Run | None:
    """The run on these devices, as many of them along "fsdp" as divide its matrices; None if no mesh does.

    An expert, a sequence and a tensor axis keep their sizes.
    """
    groups = devices.count // (run.tensor * run.sequence)
    batch = math.ceil(run.batch / groups) * groups
    micro_batches = math.gcd(batch // groups, run.micro_batches)
    data, others = 1, groups // run.expert
    while others % data == 0:
        mesh = run.mesh | {"data": data, "fsdp": others // data}
        candidate = dataclasses.replace(run, target=devices, mesh=mesh, batch=batch, micro_batches=micro_batches)
        try:
            estimate(candidate)
            return candidate
        except ValueError:  # this number of devices does not divide a matrix
            data *= 2
    return None


def options(before: Run, after: Run) -> str:
    """The command's options that turn one run into another."""
    words: dict[str, Any] = {}
    if after.target != before.target:
        words["device"] = after.target.name
        words |= {"memory": f"{given / GIB:.6g}GiB"} if (given := after.target.given_bytes) else {}
    names = "batch loss remat micro_batches optimizer state_memory state_dtype lora param_dtype dtype quantize seq"
    differ = [name for name in names.split() if getattr(after, name) != getattr(before, name)]
    words |= {"length" if name == "seq" else name: getattr(after, name) for name in differ}
    have_default_meshes = all(run.mesh == mesh_sizes(None, run.target.count) for run in (before, after))
    if after.mesh != before.mesh and not have_default_meshes:
        words["mesh"] = in_words(after.mesh)
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in words.items())


def largest_batch(run: Run, correction: int = 0) -> int:
    """The largest batch that fits by its estimate, in multiples of devices and micro-batches; 0 if none does."""

    def fits(n: int) -> bool:
        total = estimate(dataclasses.replace(run, batch=n * run.batch_unit)).total
        return total + correction <= run.target.capacity_bytes

    own = run.batch // run.batch_unit
    return max(largest(fits), own if fits(own) else 0) * run.batch_unit


def largest(fits: Callable[[int], bool]) -> int:
    """The largest n ≥ 1 for which a monotone predicate holds, by doubling and bisection; 0 if none."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _where_it_pays(run: Run, saving: float) -> tuple[int, float] | None:
    """The batch, up to 64 times this one, where the fused loss saves most, and the share; None if none saves more."""
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


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
