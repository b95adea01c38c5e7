"""Whether a training run fits into this machine's device, and what makes it fit, by the planner's estimate."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

from liger_jax.planner import advice, cards, defaults, devices
from liger_jax.planner.architectures import Architecture
from liger_jax.planner.devices import GIB
from liger_jax.planner.estimate import estimate
from liger_jax.planner.mesh import mesh_sizes
from liger_jax.planner.planning import has_host_memory
from liger_jax.planner.step import Run
from liger_jax.trainers import adapters
from liger_jax.trainers.long_rows import in_words, places, ways_to_offload
from liger_jax.trainers.options import Settings
from liger_jax.training import processes
from liger_jax.training.row_sizes import Size
from liger_jax.user_errors import UserError


def fitted(
    settings: Settings,
    model: Architecture,
    dtype: str,
    param_dtype: str,
    stored: str,
    mesh: Mapping[str, int],
    teacher: Callable[[int], int] = lambda micro_batches: 0,
    teacher_stays: bool = True,
    largest: Callable[[Settings], Size] | None = None,
) -> Settings:
    """Prints the memory that the run needs, and decides what was left open: as few micro-batches as fit, and layers'
    inputs in the host's memory only if they do not fit on the device. `teacher` returns the bytes of a second model on
    each device for a number of micro-batches; `teacher_stays` says whether it is there in each step, or only before
    the first one. `largest` returns the largest size of rows by such decisions, for which data is read: it is asked
    where rows of the whole length do not fit; `None` if all rows have it.
    """
    device = devices.here()
    placement = settings.placement
    if device is None:
        print("memory: not estimated, since JAX does not say how much this device has")
        return settings.changed(**_given(settings))
    run = planned(settings, model, device, mesh, dtype, param_dtype)
    device, capacity = run.target, device.capacity_bytes

    def needs(run: Run) -> tuple[int, int, int]:
        """Bytes of a step, with a teacher that stays; of the teacher; and of both models before the first step."""
        estimated, of_teacher = estimate(run), teacher(run.micro_batches)
        before = of_teacher and not teacher_stays and of_teacher + estimated.bytes_of["parameters"]
        return estimated.total + (of_teacher if teacher_stays else 0), of_teacher, before

    fits = lambda run: max(needs(run)) <= capacity
    # All processes read the data if one of them has to.
    knows = largest is not None and processes.most(int(not fits(run))) > 0
    sized: dict[Any, Run] = {}

    def by_size(run: Run) -> Run:
        """The run with the rows that its steps have, as far as they are known."""
        if not knows or largest is None:
            return run
        choice = run.remat, run.micro_batches
        if choice not in sized:
            sized[choice] = _in_rows_of(run, largest(_chosen(settings, run)))
        return sized[choice]

    run = _decided(settings, run, fits, by_size)
    of_step = by_size(run)
    needed, of_teacher, before = needs(of_step)
    beside = of_teacher if teacher_stays else 0
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
    if needed > capacity:
        run = dataclasses.replace(run, target=dataclasses.replace(device, capacity_bytes=capacity - beside))
        cure = _cure(run, needed, placement.param_dtype or stored, beside, settings.method.takes_whole_batches)
        if not placement.risk_memory:
            raise UserError(f"The run needs {text}. {cure}{_near(needed, capacity)}")
        print("memory: the estimate is more than the device has; the run starts nevertheless, by --risk-memory")
    host = estimate(of_step).host * device.count_on_host
    if not has_host_memory(run, host):
        assert run.host_memory is not None
        less = "--remat offload, " if run.remat == "offload_attention" else ""
        raise UserError(
            f"Layers' {in_words(run.layer.remat)} need {gib(host)} of the host's memory, which has "
            f"{gib(run.host_memory)}. Pass {less}a smaller --length, or more --micro-batches of fewer rows."
        )
    most = "" if largest is None or knows else "at most "  # texts may be shorter than the rows that are counted
    print(f"memory: the run needs {most}{text}")
    for line in places(of_step):
        print(line)
    return _chosen(settings, run)


def _chosen(settings: Settings, run: Run) -> Settings:
    """The settings with the run's decisions."""
    return settings.changed(remat=run.remat, micro_batches=run.micro_batches)


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
    """What the settings say of layers and micro-batches, or their defaults."""
    remat = settings.placement.remat or defaults.REMAT
    return dict(remat=remat, micro_batches=settings.recipe.num_micro_batches)


def _in_rows_of(run: Run, size: Size) -> Run:
    """The run with rows of this size."""
    packed = run.packed or size.num_rows < run.batch
    return dataclasses.replace(run, batch=size.num_rows, seq=size.length, packed=packed)


def _decided(settings: Settings, run: Run, fits: Callable[[Run], bool], by_size: Callable[[Run], Run]) -> Run:
    """The run with the first choice that fits the devices and the host of every process; unchanged if none fits.
    `by_size`: returns a choice with the rows that its steps have.
    """
    counts, remats = [run.micro_batches], [run.remat]
    if settings.recipe.micro_batches is None and not settings.method.takes_whole_batches:
        counts = run.micro_batch_choices
    if settings.placement.remat is None and run.target.platform != "cpu":
        config = run.model.config
        windows = any(config.window_of(kind) for kind in config.layer_types)
        remats += ways_to_offload(run.seq, whole=not run.packed and not windows)
    choices = [
        dataclasses.replace(run, remat=remat, micro_batches=count) for remat, count in itertools.product(remats, counts)
    ]

    def fits_all(choice: Run) -> bool:
        choice = by_size(choice)
        return fits(choice) and has_host_memory(choice, estimate(choice).host * choice.target.count_on_host)

    # Hosts differ in memory, and all processes have to compile one program.
    first = processes.most(next((i for i, choice in enumerate(choices) if fits_all(choice)), len(choices)))
    if first < len(choices):
        return choices[first]
    return min(choices, key=lambda choice: estimate(by_size(choice)).total) if settings.placement.risk_memory else run


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
