"""Starts a run, for the command line and for calls."""

import dataclasses
import importlib
from typing import Any

import jax

from liger_jax import _collector
from liger_jax.planner import cards
from liger_jax.trainers.options import Settings, options_of
from liger_jax.trainers.outcome import After, Outcome
from liger_jax.training import processes
from liger_jax.training.waiting import beside
from liger_jax.user_errors import UserError, needed_packages, user_errors


def started(settings: Settings[Any], task: str, *, length_is_given: bool, after: After | None = None) -> Outcome:
    """Trains for a task, such as "pairs.of_run". What the user can mend is a `UserError` in the words of flags.

    `length_is_given`: whether the length of rows was passed. `after`: is called after each step.
    """
    with needed_packages():
        from liger_jax.planner.architectures import architecture_of
        from liger_jax.trainers import adapters, log, long_rows, model_card, run
    if "wandb" in settings.folder.log:
        log.check_wandb()
    if (repository := settings.folder.push) is not None:
        model_card.check_push(repository)
    with user_errors():
        cut = ""
        if not length_is_given and options_of(type(settings.method))["length"].default != 0:
            source = adapters.found(settings.placement.model, settings.adapters)[-1]
            rows, cut = long_rows.within(settings.rows, architecture_of(source))
            settings = dataclasses.replace(settings, rows=rows)
        lines = [line for line in (cut, long_rows.let_pool_grow(settings)) if line]
    if settings.placement.distributed is not None:
        with user_errors():
            processes.begin(settings.placement.distributed)
    _start_devices()
    with user_errors():
        processes.check_same("options", settings.of_all_processes())
    if processes.is_first():
        print("".join(f"{line}\n" for line in lines), end="")
    module, name = task.split(".")
    try:
        return run.train(settings, getattr(importlib.import_module(f"liger_jax.trainers.{module}"), name), after)
    except MemoryError as error:
        raise UserError("This machine has too little memory. Pass a smaller --batch.") from error


@_collector.paused()
def _start_devices() -> None:
    """Begins to start the devices, and imports meanwhile what kernels for NVIDIA GPUs are traced with."""
    beside(jax.devices)  # the driver starts without Python's lock; who asks for devices next waits for it, or fails too
    if cards.are_used():
        importlib.import_module("jax.experimental.pallas.mosaic_gpu")
