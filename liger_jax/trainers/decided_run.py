"""The settings of a training run, with a decision for each that was left open."""

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from liger_jax import _collector
from liger_jax.data.tokenizer import Tokenizer
from liger_jax.models.hugging_face.source import Source
from liger_jax.planner import cards
from liger_jax.planner.architectures import Architecture, architecture_of
from liger_jax.trainers import (
    adapters,
    long_rows,
    memory,
    mesh_choice,
    result,
    run_data,
    run_model,
    step_sizes,
    weights,
)
from liger_jax.trainers.options import Settings
from liger_jax.trainers.placement import Placement
from liger_jax.trainers.run_data import RunRows
from liger_jax.trainers.task import Task
from liger_jax.training import meshes
from liger_jax.user_errors import UserError

TaskOf = Callable[[Any, Source, Architecture], Task]


@dataclasses.dataclass(frozen=True)
class Run:
    """A run whose settings are all decided, before its rows are made and its weights are read."""

    asked: Settings  # the settings as they were given
    settings: Settings  # the same, with a decision for each that was left open
    task: Task  # what the run trains for
    source: Source  # the model's folder
    architecture: Architecture  # what the model is
    precision: dict[str, str]  # names of the dtypes of the computation and of the weights
    devices: meshes.Devices  # where it runs
    out: Path
    data: Callable[[], tuple[Tokenizer, RunRows]]  # its tokenizer and rows, which are made once


@_collector.paused()
def decided(asked: Settings, task: Task | TaskOf, out: Path) -> tuple[Run, Any, Any]:
    """Decides the settings that were left open, by model, devices and memory. Prints the memory that the run needs."""
    model, adapted, source = adapters.found(asked.placement.model, asked.adapters)
    placement = dataclasses.replace(asked.placement, model=model)
    settings = dataclasses.replace(asked, adapters=adapted, placement=placement)
    for folder in adapters.tuned(adapted, source):
        result.check(settings, folder)
    placement = _as_stored(placement, adapted.lora, source)
    settings = dataclasses.replace(settings, placement=placement)
    dtypes = placement.precision(adapted.lora, source.dtype)
    shorter, only_adapters = settings.method.shorter, result.only_adapters(settings)
    architecture = long_rows.stretched_for(settings.rows, architecture_of(source), only_adapters, shorter)
    if callable(task):
        task = task(settings, source, architecture)
    shape = lambda layout: nnx.eval_shape(lambda: run_model.new(settings, task, source, architecture, dtypes, layout))
    devices = _devices(settings, task, architecture, dtypes, shape)
    data = functools.cache(lambda: run_data.prepared(settings, task, source, architecture.config.vocab_size, out))
    # The estimate of memory is printed before weights are looked for, so that it can be seen without them.
    settings = _fitted(settings, task, architecture, dtypes, source.dtype, devices, lambda: data()[1])
    weights.check("--model", source)
    model = shape(devices.layout)  # not in the mesh's context, in which Flax makes quantised variables dense
    of_rows = devices.layout_of_rows
    samples = settings.folder.samples or task.sampling is not None
    shown = model if not samples or of_rows == devices.layout else shape(of_rows)
    return Run(asked, settings, task, source, architecture, dtypes, devices, out, data), model, shown


def _as_stored(placement: Placement, lora: int | None, source: Source) -> Placement:
    """The placement, with `quantize` as "nf4" if the checkpoint's weights are stored so."""
    if not source.is_nf4:
        return placement
    if lora is None:
        raise UserError(
            f"The weights of {placement.model} are nf4, and stay as they are. Pass --lora, such as --lora 16."
        )
    if placement.quantize == "int8":
        raise UserError(f"--quantize=int8, but the weights of {placement.model} are nf4 already. Leave it out.")
    return dataclasses.replace(placement, quantize="nf4")


def _devices(
    settings: Settings,
    task: Task,
    architecture: Architecture,
    precision: dict[str, str],
    shape: Callable[[Any], Any],
) -> meshes.Devices:
    """The run's devices and its mesh; `shape` returns the model's abstract arrays for a layout."""
    mesh, there, sampling = settings.placement.mesh, jax.devices(), task.sampling
    rows = settings.recipe.rows_at_once if sampling is None else sampling.rows(settings)
    common = f"{rows}, the greatest common divisor of a step's prompts and of a micro-batch's rows"
    of_mesh = lambda sizes: meshes.Devices(meshes.mesh_of(sizes, there), meshes.layout_of(sizes))
    its = lambda sizes: _teacher_memory(settings, task, precision["dtype"], of_mesh(sizes))
    choose = mesh_choice.by_time(settings, architecture, precision, there, its, sampling is not None)
    of_teacher = None if task.teacher is None else task.teacher.config
    experts = _experts(architecture.config, of_teacher, sampling is not None)
    devices = meshes.chosen(mesh, there, rows, shape, choose, "" if sampling is None else common, experts)
    if sampling is not None and rows % (number := math.prod(devices.sizes.values())):
        raise UserError(
            f"--mesh={mesh}: each of the {number} devices samples completions of its own prompts, also along tensor "
            f"and expert, and {number} does not divide {common}. Pass a larger --batch, fewer --micro-batches, or "
            "fewer devices."
        )
    if settings.method.rows_stay_whole and devices.sizes["sequence"] > 1:
        raise UserError(
            f"--mesh={mesh}: the devices along sequence would each have chunks of a row, and the rows of liger-jax "
            f"{settings.method.command} stay whole. Give the devices to fsdp or tensor."
        )
    return devices


def _experts(config: Any, of_teacher: Any, samples: bool) -> int:
    """The number that an axis of experts must divide, a teacher's too; 0 where the mesh that is chosen has none.

    Devices that sample gather weights for each token, whichever axis splits them.
    """
    if config.experts is None or samples:
        return 0
    its = None if of_teacher is None else of_teacher.experts
    return math.gcd(config.experts.count, 0 if its is None else its.count)


def _fitted(
    settings: Settings,
    task: Task,
    architecture: Architecture,
    precision: dict[str, str],
    stored: str,
    devices: meshes.Devices,
    data: Callable[[], RunRows],
) -> Settings:
    """The settings, those that were left open decided by what fits into memory; prints the estimate of the memory."""
    options: dict[str, Any] = dict(stored=stored, mesh=devices.sizes, began=memory.stored_choices(settings))
    if task.sampling is not None:
        options |= dict(sampled=task.sampling.rows(settings) * settings.rows.length)
    options |= dict(teacher=_teacher_memory(settings, task, precision["dtype"], devices))
    if task.sampling is None and not settings.rows.pack and not settings.rows.stream:
        laying = lambda settings: step_sizes.laying(settings, architecture.config, task.teacher, devices)
        options |= dict(largest=lambda settings: run_data.largest_size(data(), settings, laying(settings)))
    if sentence := cards.unclaimed(jax.local_devices()[0], math.prod(devices.sizes.values())):
        print(f"memory: {sentence}")
    return memory.fitted(settings, architecture, **precision, **options)


def _teacher_memory(settings: Settings, task: Task, dtype: str, devices: meshes.Devices) -> memory.TeacherMemory:
    """What the task's teacher needs, if it has one."""
    if (teacher := task.teacher) is None:
        return memory.TeacherMemory()
    tokens = settings.recipe.batch * settings.rows.length // meshes.shards_of_batch(devices.sizes)
    tokens //= devices.sizes["sequence"]
    its_bytes = functools.cache(lambda cuts: teacher.num_bytes(dtype, devices, tokens // cuts))
    return memory.TeacherMemory(its_bytes, teacher.stays)
