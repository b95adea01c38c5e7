"""The start of a training run: reads the model, and makes the state before the first step."""

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from liger_jax.models import AutoModelForCausalLM
from liger_jax.trainers import adapters, result, run_model
from liger_jax.trainers.decided_run import Run
from liger_jax.trainers.training_inputs import TrainingInputs
from liger_jax.training import disk, steps
from liger_jax.training.errors import memory_errors
from liger_jax.training.waiting import beside, telling
from liger_jax.user_errors import user_errors


def read_model(run: Run) -> Any:
    """Reads the weights of a run's model."""
    rows, placement, devices = run.settings.rows, run.settings.placement, run.devices
    options: dict[str, Any] = {name: jnp.dtype(dtype) for name, dtype in run.precision.items()}
    options |= dict(remat=placement.remat, quantize=placement.quantize, scan_layers=run_model.scans_layers(run.task))
    options |= dict(length=rows.length, rope_scaling=rows.rope_scaling)
    return AutoModelForCausalLM.from_pretrained(run.source, mesh=devices.mesh, kernels=devices.kernels, **options)


def reading_early(run: Run) -> Future[Any] | None:
    """Begins to read the weights before rows are made, if the run begins: it needs them whatever its rows are.

    One that goes on has its rows already, and may be finished. Several processes check first what they read.
    """
    begins = run.settings.folder.result_of is None and not steps.holds_a_run(run.out / result.CHECKPOINTS)
    return beside(read_model, run) if begins and jax.process_count() == 1 else None


def initial_state(
    run: Run, inputs: TrainingInputs, reading: Future[Any], made_of: Mapping[str, str]
) -> tuple[Any, tuple[Any, Any], Any, Any]:
    """Makes a run's first state (graph, (parameters, optimizer's state), frozen variables, what the model keeps for its
    files). A step overwrites the state in place: nothing else may hold it.
    """
    settings, task, devices = run.settings, run.task, run.devices
    with user_errors():
        model = _with_adapters(run, reading)
        if task.teacher is not None and task.teacher.stays:
            with telling("reading the teacher's weights"):
                reading = beside(task.teacher.read, run.precision["dtype"], devices.mesh, devices.kernels)
                model.teacher = reading.result()
    if settings.folder.result_of is None:
        with memory_errors("before the first step."):
            task.before(settings, inputs.data, model, made_of)
    graph, params, frozen = nnx.split(model, run_model.trained(settings.adapters), ...)
    return graph, devices.started(params, inputs.optimizer), devices.placed(frozen), model.kept


def _with_adapters(run: Run, reading: Future[Any]) -> Any:
    with telling(f"reading {disk.size(run.source.weight_bytes)} of weights"):
        model = reading.result()
    if (adapted := run.settings.adapters).lora is not None:
        with telling(f"adding adapters of rank {adapted.lora}, while the step is compiled"):
            adapters.add(model, adapted, run.settings.recipe.seed)
    return model
