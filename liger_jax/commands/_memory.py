"""Whether a fine-tuning run fits into the device that is here, and what makes it fit, by the planner's estimate."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from liger_jax.commands import _adapters
from liger_jax.commands._errors import UserError
from liger_jax.commands._long_rows import in_words, places, ways_to_offload
from liger_jax.commands._settings import Settings
from liger_jax.models.core.remat import is_offloaded
from liger_jax.planner import defaults, devices
from liger_jax.planner.architectures import Architecture
from liger_jax.planner.devices import GIB
from liger_jax.planner.estimate import estimate
from liger_jax.planner.mesh import mesh_sizes
from liger_jax.planner.planning import has_host_memory
from liger_jax.planner.step import Run
from liger_jax.training import processes

_OPTION = {"seq": "length"}
_SHORTEST = 128  # rows shorter than this are not proposed


def fitted(
    settings: Settings,
    model: Architecture,
    dtype: str,
    param_dtype: str,
    stored: str,
    mesh: Mapping[str, int],
    teacher: Callable[[int], int] = lambda parts: 0,
    teacher_stays: bool = True,
) -> Settings:
    """Prints what the run needs, and decides what was left open: as few micro-batches as fit, and layers' inputs in the
    host's memory only if they do not fit on the device. `teacher` is the bytes of a second model on each device, by the
    number of micro-batches; `teacher_stays` says whether it is there in each step, or before the first one alone.
    """
    device = devices.here()
    chosen = dict(remat=settings.remat or defaults.REMAT, micro_batches=settings.num_parts)
    decided = dataclasses.replace(settings, **chosen)
    if device is None:
        print("memory: not estimated, since JAX does not say how much this device has")
        return decided
    sizes = mesh_sizes(mesh, math.prod(mesh.values()))
    device = dataclasses.replace(device, count=math.prod(sizes.values()))
    options = chosen | dict(dtype=dtype, param_dtype=param_dtype, host_memory=devices.machine_memory())
    options |= dict(optimizer=settings.optimizer, packed=settings.pack, quantize=settings.quantize)
    options |= dict(lora=settings.lora, dora=settings.dora, lora_experts=settings.lora_experts)
    options |= dict(lora_targets=_adapters.targets(settings.lora_targets))
    run, capacity = Run(model, settings.batch, settings.length, device, sizes, **options), device.capacity_bytes

    def needs(run: Run) -> tuple[int, int, int]:
        """Bytes of a step with a teacher that stays, of the teacher, and of what is there before the first step."""
        found, of_teacher = estimate(run), teacher(run.micro_batches)
        before = of_teacher and not teacher_stays and of_teacher + found.parts["parameters"]
        return found.total + (of_teacher if teacher_stays else 0), of_teacher, before

    run = _decided(settings, run, lambda run: max(needs(run)) <= capacity)
    needed, of_teacher, before = needs(run)
    beside = of_teacher if teacher_stays else 0
    each = "" if device.count == 1 else " on each device"
    its = f", {gib(beside)} of them for the teacher," if beside else ""
    text = f"{gib(needed)}{each}{its} by the planner's estimate, and {device.kind} has {gib(capacity)} for it"
    if max(of_teacher, before) > capacity:
        raise UserError(
            f"The teacher needs {gib(of_teacher)}{each} beside the model, and {device.kind} has {gib(capacity)}. Pass "
            "--teacher-quantize nf4, or a smaller teacher."
        )
    if needed > capacity:
        run = dataclasses.replace(run, target=dataclasses.replace(device, capacity_bytes=capacity - beside))
        cure = _cure(run, needed, settings.param_dtype or stored, beside, settings.takes_whole_batches)
        if not settings.risk_memory:
            raise UserError(f"The run needs {text}. {cure}{_near(needed, capacity)}")
        print("memory: more than there is, by the estimate; --risk-memory begins nevertheless")
    host = estimate(run).host * device.count_on_host
    if not has_host_memory(run, host):
        assert run.host_memory is not None
        less = "--remat offload, " if run.remat == "offload_attention" else ""
        raise UserError(
            f"Layers' {in_words(run.layer.remat)} need {gib(host)} of the host's memory, which has "
            f"{gib(run.host_memory)}. Pass {less}a smaller --length, or more --micro-batches of fewer rows."
        )
    print(f"memory: the run needs {text}")
    for line in places(run):
        print(line)
    return dataclasses.replace(settings, remat=run.remat, micro_batches=run.micro_batches)


def _decided(settings: Settings, run: Run, fits: Callable[[Run], bool]) -> Run:
    """The run with what was left to it: the first choice that fits every process's devices and host, else as it is."""
    counts, remats = [run.micro_batches], [run.remat]
    if settings.may_be_parted:
        counts = [n for n in range(1, run.batch + 1) if run.batch % (n * run.batch_devices) == 0]
    if settings.remat is None and run.target.platform != "cpu":
        config = run.model.config
        windows = any(config.window_of(kind) for kind in config.layer_types)
        remats += ways_to_offload(run.seq, whole=not run.packed and not windows)
    choices = [
        dataclasses.replace(run, remat=remat, micro_batches=count) for remat, count in itertools.product(remats, counts)
    ]

    def fits_all(choice: Run) -> bool:
        return fits(choice) and has_host_memory(choice, estimate(choice).host * choice.target.count_on_host)

    # Hosts differ in memory, and all processes have to compile one program.
    first = processes.most(next((i for i, choice in enumerate(choices) if fits_all(choice)), len(choices)))
    if first < len(choices):
        return choices[first]
    return min(choices, key=lambda choice: estimate(choice).total) if settings.risk_memory else run


def gib(size: int) -> str:
    """A size in words."""
    return f"{math.ceil(10 * size / GIB) / 10:.1f} GiB"


def _cure(run: Run, needed: int, frozen: str, beside: int, whole: bool) -> str:
    """A sentence that says what makes the run fit; with `whole`, other than more micro-batches."""
    larger = _with_more_of_the_device(run, needed)
    if larger is not None:
        return f"Let JAX take more of the device: XLA_PYTHON_CLIENT_MEM_FRACTION={larger}."
    found = changes(run, frozen, whole)
    if found is None:
        least = _changed(run, list(_changes(run, frozen, whole)))
        return f"No change makes it fit: even {_options(run, least)} needs {gib(estimate(least).total + beside)}."
    return f"It fits with {_options(run, found)}: {gib(estimate(found).total + beside)}."


def _near(needed: int, capacity: int) -> str:
    """What is to be said where an estimate may be off by more than what is missing."""
    if needed > (1 + devices.NEAR) * capacity:
        return ""
    return (
        " An estimate may be off by more than what is missing: liger-jax plan --level compiled asks the compiler, and "
        "--risk-memory begins nevertheless."
    )


def changes(run: Run, frozen: str, whole: bool = False) -> Run | None:
    """Makes a run fit by as few changes as possible, the cheapest in time and quality first; `None` if no changes make
    it fit. `whole`: the loss takes a batch in one micro-batch.
    """
    needed = lambda some: estimate(_changed(run, some)).total
    taken: list[dict[str, Any]] = []
    for change in _changes(run, frozen, whole):
        if needed([*taken, change]) >= needed(taken):
            continue
        taken.append(change)
        # What has helped may be in the way by now, as the parts' sum of gradients is of smaller weights.
        taken = _without(taken, lambda fewer, all_of: needed(fewer) < needed(all_of))
        if needed(taken) <= run.target.capacity_bytes:
            return _changed(run, _without(taken, lambda fewer, _: needed(fewer) <= run.target.capacity_bytes))
    return None


def _without(taken: list[dict[str, Any]], is_enough: Callable[[Any, Any], bool]) -> list[dict[str, Any]]:
    """The changes without those that are not needed, the costliest first."""
    for costly in taken[::-1]:
        fewer = [other for other in taken if other is not costly]
        taken = fewer if is_enough(fewer, taken) else taken
    return taken


def _changes(run: Run, frozen: str, whole: bool) -> Iterator[dict[str, Any]]:
    if run.remat in ("none", "dots"):
        yield dict(remat="full")
    one = dataclasses.replace(run, micro_batches=1)
    if estimate(one).total < estimate(run).total:  # the parts' sum of gradients is more than what smaller parts save
        yield dict(micro_batches=1)
    for parts in () if whole else range(run.micro_batches + 1, run.batch + 1):
        if run.batch % (parts * run.batch_devices) == 0:
            yield dict(micro_batches=parts)
    if not is_offloaded(run.remat) and run.target.platform != "cpu":
        yield dict(remat="offload")
    if run.lora is None and run.param_dtype == "float32":
        yield dict(param_dtype="bfloat16")  # trained with stochastic rounding
    if run.lora is None and run.optimizer == "adamw":
        yield dict(optimizer="adamw8bit")
    rank = run.lora or min(defaults.RANK, run.model.config.hidden_size)
    if run.lora is None:
        yield dict(lora=rank, param_dtype=frozen)
    if frozen == "float32":
        yield dict(lora=rank, param_dtype="bfloat16")
    if run.quantize is None:
        yield dict(lora=rank, quantize="nf4")
    length = run.seq
    while (length := length // 2) >= _SHORTEST:
        yield dict(seq=length)


def _changed(run: Run, some: list[dict[str, Any]]) -> Run:
    return dataclasses.replace(run, **{name: value for change in some for name, value in change.items()})


def _options(before: Run, after: Run) -> str:
    """The command's options that turn one run into another."""
    names = "remat micro_batches optimizer lora param_dtype quantize seq".split()
    changed = {name: getattr(after, name) for name in names if getattr(after, name) != getattr(before, name)}
    return " ".join(f"--{_OPTION.get(name, name).replace('_', '-')} {value}" for name, value in changed.items())


def _with_more_of_the_device(run: Run, needed: int) -> float | None:
    """The share of a known GPU's memory with which the run fits; `None` if no share is enough, or on other devices."""
    if run.target.name not in devices.GPUS:
        return None
    return devices.target(run.target.name).fraction_for(needed)
