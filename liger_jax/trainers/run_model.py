"""The model of a training run: its structure, its trained variables, and the model that the result has."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from liger_jax.models import KernelOptions, Layout
from liger_jax.models.hugging_face.source import Source
from liger_jax.models.hugging_face.weights import quantized_as_in
from liger_jax.models.quantized import quantize
from liger_jax.planner import defaults
from liger_jax.planner.architectures import Architecture
from liger_jax.planner.step import AUTO
from liger_jax.trainers import adapters
from liger_jax.trainers.adapters import AdapterOptions
from liger_jax.trainers.options import Settings
from liger_jax.trainers.task import TEACHER, Task
from liger_jax.user_errors import quantizing


def new(
    settings: Settings,
    task: Task,
    source: Source,
    architecture: Architecture,
    precision: dict[str, str],
    layout: Layout | None,
) -> Any:
    """A model of the run's structure with random weights, of which only the shapes are used."""
    placement = settings.placement
    options: dict[str, Any] = {name: jnp.dtype(dtype) for name, dtype in precision.items()}
    options |= dict(
        remat=defaults.REMAT if placement.remat in (None, AUTO) else placement.remat,
        scan_layers=scans_layers(task),
        kernels=KernelOptions(layout=layout),
    )
    model = architecture.family(architecture.config, **options, rngs=nnx.Rngs(0))
    if source.is_nf4:
        quantized_as_in(source.folder, model)
    elif placement.quantize is not None:
        with quantizing("--quantize", placement.quantize, placement.model):
            quantize(model, placement.quantize)
    if settings.adapters.lora is not None:
        adapters.add(model, settings.adapters, settings.recipe.seed)
    if task.teacher is not None and task.teacher.stays:
        model.teacher = task.teacher.new(precision["dtype"], layout)
    return model


def scans_layers(task: Task) -> bool:
    """Whether the layers are stacked; not where the run samples, which would copy each weight out of the stack."""
    return task.sampling is None


def trained(adapted: AdapterOptions) -> Any:
    """The variables that are trained, by their type; a teacher has none."""
    kind = nnx.Param if adapted.lora is None else nnx.LoRAParam
    return nnx.All(kind, nnx.Not(nnx.PathContains(TEACHER)))


def trained_lines(adapted: AdapterOptions, model: Any, architecture: Architecture) -> Iterator[str]:
    """Lines that say how much of a model is trained."""
    number = sum(x.size for x in jax.tree.leaves(nnx.state(model, trained(adapted))))
    if adapted.lora is None:
        yield f"trained: all {number:,} parameters"
        return
    total = architecture.num_parameters + number
    yield f"trained: {number:,} of {total:,} parameters, {number / total:.2%}"
    if adapted.lora > (width := architecture.config.hidden_size):
        yield f"--lora {adapted.lora} is more than the model's width, and rank {width} can hold any change already"


def tuned(graph: Any, state: Any, frozen: Any, keeps: Any) -> Any:
    """Puts together the model that is to be written, without its teacher."""
    model = nnx.merge(graph, state[0], frozen)
    model.kept = keeps
    if hasattr(model, TEACHER):
        delattr(model, TEACHER)
    return model
