"""Whether a training run fits into this machine's device, and what makes it fit, by the planner's estimate."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from liger_jax.planner import advice, cards, choosing, defaults, devices
from liger_jax.planner.architectures import Architecture
from liger_jax.planner.devices import GIB
from liger_jax.planner.estimate import estimate
from liger_jax.planner.mesh import mesh_sizes
from liger_jax.planner.planning import has_host_memory
from liger_jax.planner.step import AUTO, Run
from liger_jax.trainers import adapters, result
from liger_jax.trainers.long_rows import in_words, places
from liger_jax.trainers.options import Settings
from liger_jax.training import Checkpoints, processes
from liger_jax.training.row_sizes import Size
from liger_jax.user_errors import UserError

CHOICES = ("remat", "micro_batches")  # that a run stores with its checkpoints


@dataclasses.dataclass(frozen=True)
class TeacherMemory:
    """The memory of a second model on each device."""

    num_bytes: Callable[[int], int] = lambda micro_batches: 0  # by the number of micro-batches
    stays: bool = True  # whether it is there in each step, or only before the first one

    def needs(self, run: Run) -> tuple[int, int, int]:
        """Bytes of a step, with a teacher that stays; of the teacher; and of both models before the first step."""
        estimated, own = estimate(run), self.num_bytes(run.micro_batches)
        before = own and not self.stays and own + estimated.bytes_of["parameters"]
        return estimated.total + (own if self.stays else 0), own, before

    def beside(self, run: Run) -> int:
        """Its bytes in a step."""
        return self.num_bytes(run.micro_batches) if self.stays else 0


def fitted(
    settings: Settings,
    model: Architecture,
    dtype: str,
    param_dtype: str,
    stored: str,
    mesh: Mapping[str, int],
    teacher: TeacherMemory = TeacherMemory(),
    largest: Callable[[Settings], Size] | None = None,
    began: Mapping[str, Any] | None = None,
    sampled: int = 0,
) -> Settings:
    """Prints the memory that the run needs, and decides what was left open: what layers keep, and in how many
    micro-batches, as `choosing` finds it for the devices with the least memory. `teacher`: what a second model needs.
    `largest` returns the largest size of rows by such decisions, for which data is read: it is asked where rows of the
    whole length leave no room for the fastest way; `None` if all rows have it. `began`: the choices of the run that is
    resumed, which stay; `None` for a new one. `sampled`: the tokens whose keys and values a device has beside a step.
    """
    device = devices.here()
    recipe, placement = settings.recipe, settings.placement
    given = _given(settings)
    before = (began or {}).get("micro_batches")
    began = None if placement.remat == AUTO else began
    kept = {**(began or {}), **given}
    if device is None:
        print("memory: not estimated, since JAX does not say how much this device has")
        return settings.changed(**dict(remat=defaults.REMAT, micro_batches=defaults.MICRO_BATCHES) | kept)
    capacity = processes.least(device.capacity_bytes)  # all processes have to compile one program
    there = devices.machine_memory()
    device = dataclasses.replace(device, capacity_bytes=capacity)
    run = planned(settings, model, device, mesh, dtype, param_dtype)
    run = dataclasses.replace(run, host_memory=there and processes.least(there))
    if recipe.micro_batches is None and kept.get("micro_batches", 1) not in run.micro_batch_choices:
        kept.pop("micro_batches", None)  # other devices share the batch now
    run = dataclasses.replace(run, **kept)
    is_left = left_open(settings, kept)
    options: dict[str, Any] = dict(
        keeps_products=began is None,
        needs=lambda run: max(teacher.needs(run)),
        spare=None if settings.method.command == "finetune" else devices.NEAR,
        reserved=sampled * _cached_bytes(run),
    )
    choice = choosing.chosen(run, **is_left, **options)
    # All processes read the data if one of them has to.
    is_wanting = choice is None or not choice.is_first
    knows = largest is not None and processes.most(int(is_wanting)) > 0
    sized: dict[Any, Size] = {}

    def in_steps(run: Run) -> Run:
        """The run with the rows that its steps have, as far as they are known."""
        if not knows or largest is None:
            return run
        laid = run.remat == "offload_attention", run.micro_batches  # by which documents are laid into rows
        if laid not in sized:
            sized[laid] = largest(_chosen(settings, run))
        return _in_rows_of(run, sized[laid])

    if knows:
        choice = choosing.chosen(run, **is_left, **options, in_steps=in_steps)
    if choice is not None:
        run = choice.run
    elif placement.risk_memory:
        run = choosing.smallest(run, **is_left, in_steps=in_steps)
    of_step = in_steps(run)
    text = _check(settings, run, of_step, teacher, stored, kept if began and "remat" not in given else None)
    most = "" if largest is None or knows else "at most "  # texts may be shorter than the rows that are counted
    print(f"memory: the run needs {most}{text}")
    if device.platform != "cpu" and "remat" not in given:
        why = "as when the run began" if began is not None else choice.reason if choice else "which needs least"
        print(f"remat: {choosing.in_words(run)}; {why}")
    for line in (*places(of_step), *_changed_cuts(settings, run, before)):
        print(line)
    return _chosen(settings, run)


def _check(
    settings: Settings,
    run: Run,
    of_step: Run,
    teacher: TeacherMemory,
    stored: str,
    began: Mapping[str, Any] | None,
) -> str:
    """Refuses a run that does not fit, unless it is risked. Returns what it needs, in words.

    `of_step`: the run with the rows of its steps. `began`: the choices that a resumed run keeps, if `remat` is one.
    """
    device, placement = run.target, settings.placement
    capacity = device.capacity_bytes
    needed, of_teacher, before = teacher.needs(of_step)
    beside = teacher.beside(of_step)
    each = "" if device.count == 1 else " on each device"
    its = f", {gib(beside)} of them for the teacher," if beside else ""
    if of_step != run:
        count = of_step.micro_batches
        its += f" in rows × places of {Size(of_step.seq, of_step.batch // count, count)}"
    text = f"{gib(needed)}{each}{its} by the planner's estimate, and {device.kind} has {gib(capacity)} for it"
    if max(of_teacher, before) > capacity:
        raise UserError(
            f"The teacher needs {gib(of_teacher)}{each} beside the model, and {device.kind} has {gib(capacity)}. Pass "
            "--teacher-quantize nf4, or a smaller teacher."
        )
    if needed > capacity and placement.risk_memory:
        print("memory: the estimate is more than the device has; the run starts nevertheless, by --risk-memory")
    elif needed > capacity:
        run = dataclasses.replace(run, target=dataclasses.replace(device, capacity_bytes=capacity - beside))
        cure = _cure(run, needed, placement.param_dtype or stored, beside, settings.method.takes_whole_batches)
        cure += _near(needed, capacity)
        if began is not None:
            so = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in began.items())
            raise UserError(
                f"The run in {settings.folder.out} began with {so}, and needs {text}. --remat auto chooses anew. "
                f"{cure} A run of its own needs another --out."
            )
        raise UserError(f"The run needs {text}. {cure}")
    host = estimate(of_step).host * device.count_on_host
    if not has_host_memory(run, host):
        assert run.host_memory is not None
        less = "--remat offload, " if run.remat == "offload_attention" else ""
        raise UserError(
            f"Layers' {in_words(run.layer.remat)} need {gib(host)} of the host's memory, which has "
            f"{gib(run.host_memory)}. Pass {less}a smaller --length, or more --micro-batches of fewer rows."
        )
    return text


def _chosen(settings: Settings, run: Run) -> Settings:
    """The settings with the run's decisions."""
    return settings.changed(remat=run.remat, micro_batches=run.micro_batches)


def _changed_cuts(settings: Settings, run: Run, before: int | None) -> Iterator[str]:
    """A line about another number of micro-batches than the run began with, where that changes the loss."""
    is_asked = settings.recipe.micro_batches is not None or before in (None, run.micro_batches)
    if not is_asked and settings.method.command == "finetune" and choosing.depends_on_cuts(run):
        yield (
            f"micro-batches: {run.micro_batches}, where the run began with {before}, so that the routers' losses "
            f"change; --micro-batches {before} keeps them, on devices that divide its rows"
        )


def left_open(settings: Settings, kept: Mapping[str, Any] | None = None) -> dict[str, bool]:
    """What is left to the planner, as arguments of `choosing.chosen`; `kept`: what is not, where that is more than the
    options.
    """
    kept = _given(settings) if kept is None else kept
    whole = settings.method.takes_whole_batches
    return dict(remat_is_open="remat" not in kept, cuts_are_open="micro_batches" not in kept and not whole)


def _in_rows_of(run: Run, size: Size) -> Run:
    """The run with rows of this size."""
    packed = run.packed or size.num_rows < run.batch
    return dataclasses.replace(run, batch=size.num_rows, seq=size.length, packed=packed)


def planned(
    settings: Settings,
    model: Architecture,
    device: devices.Target,
    mesh: Mapping[str, int],
    dtype: str,
    param_dtype: str,
) -> Run:
    """The planner's run on a mesh of devices like this one, as it is before anything is decided."""
    rows, adapted, recipe = settings.rows, settings.adapters, settings.recipe
    number = math.prod(mesh.values())
    options: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, host_memory=devices.machine_memory())
    options |= dict(optimizer=recipe.optimizer, packed=rows.pack, quantize=settings.placement.quantize)
    options |= dict(lora=adapted.lora, dora=adapted.dora, lora_experts=adapted.lora_experts)
    options |= dict(lora_targets=adapters.targets(adapted.lora_targets))
    device = dataclasses.replace(device, count=number)
    return Run(model, recipe.batch, rows.length, device, mesh_sizes(mesh, number), **_given(settings), **options)


def _given(settings: Settings) -> dict[str, Any]:
    """What the settings say of layers and micro-batches."""
    remat = settings.placement.remat
    values = dict(remat=None if remat == AUTO else remat, micro_batches=settings.recipe.micro_batches)
    return {name: value for name, value in values.items() if value is not None}


def stored(settings: Settings) -> dict[str, Any] | None:
    """The settings of the run that is resumed; `None` for a new one."""
    folder = Path(settings.folder.out) / result.CHECKPOINTS
    if settings.folder.fresh or not folder.is_dir():  # a run that is refused leaves no folder
        return None
    return Checkpoints(folder, {}).latest_settings or None


def stored_choices(settings: Settings) -> dict[str, Any] | None:
    """What the run that is resumed has chosen, by the names of options; `None` for a new run.

    Returns an empty dict for one that began before choices were stored: its layers keep what needs least.
    """
    before = stored(settings)
    return None if before is None else {name: before[name] for name in CHOICES if name in before}


def choices_to_store(settings: Settings, before: Mapping[str, Any]) -> dict[str, Any]:
    """The choices as checkpoints have them: those of a run's begin, whatever it was resumed with."""
    if before and not settings.folder.fresh:
        return {name: before[name] for name in CHOICES if name in before}
    return dict(remat=settings.placement.remat, micro_batches=settings.recipe.num_micro_batches)


def _cached_bytes(run: Run) -> int:
    """Bytes of one token's keys and values in all layers."""
    config = run.model.config
    layers = config.num_hidden_layers - config.num_recurrent_layers
    return 2 * layers * config.num_key_value_heads * config.head_dim * jnp.dtype(run.dtype).itemsize


def gib(size: int) -> str:
    """A size in words."""
    return f"{math.ceil(10 * size / GIB) / 10:.1f} GiB"


def _cure(run: Run, needed: int, frozen: str, beside: int, whole: bool) -> str:
    """A sentence that says what makes the run fit; with `whole`, something other than more micro-batches."""
    known = devices.target(run.target.name) if run.target.name in devices.GPUS else None
    if known is not None:
        known = dataclasses.replace(known, count=run.target.count)
        most = devices.allocatable(known.visible_bytes, known.visible_bytes, known.count)
        if needed <= (1 - devices.RESERVE) * most:
            return (
                f"An empty card holds it: end what else runs there, or let JAX take more of it, with {cards.FRACTION}="
                f"{known.fraction} in the environment before JAX starts."
            )
    ladder = list(advice.changes(run, frozen=frozen, whole=whole))
    fitting = advice.cheapest(run, ladder)
    after = advice.changed(run, ladder if fitting is None else fitting)
    options, total = advice.options(run, after), gib(estimate(after).total + beside)
    if fitting is None:
        return f"No change makes it fit: even {options} needs {total}."
    return f"It fits with {options}: {total}."


def _near(needed: int, capacity: int) -> str:
    """What is to be said where an estimate may be off by more than what is missing."""
    if needed > (1 + devices.NEAR) * capacity:
        return ""
    return (
        " An estimate may be off by more than what is missing: liger-jax plan --level compiled asks the compiler, and "
        "--risk-memory starts the run nevertheless."
    )
