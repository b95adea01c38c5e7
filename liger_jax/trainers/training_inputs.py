"""What the steps of a training run train on: its rows, their number, the learning rate and the optimizer."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from liger_jax.data import token_cache, training_rows
from liger_jax.data.prompt_rows import PromptRows
from liger_jax.trainers import adapters
from liger_jax.trainers.decided_run import Run
from liger_jax.trainers.options import MOST, Settings
from liger_jax.training import (
    constant_schedule_with_warmup,
    cosine_schedule_with_warmup,
    linear_schedule_with_warmup,
    optimizer_named,
    processes,
    rows,
)
from liger_jax.user_errors import UserError

RunRows = training_rows.TrainingRows | PromptRows


_SCHEDULES = {
    "cosine": cosine_schedule_with_warmup,
    "linear": linear_schedule_with_warmup,
    "constant": constant_schedule_with_warmup,
}


@dataclasses.dataclass(frozen=True)
class TrainingInputs:
    """What a run's steps train on."""

    tokenizer: Any  # what its rows were encoded by
    data: RunRows  # the rows
    steps: int  # how many there are
    rate: Callable[[Any], Any]  # the learning rate of a step
    optimizer: Any  # any optax transformation
    rows_of: Callable[[int], rows.Rows]  # the rows of a step that this process reads
    batch_of: Callable[[int], Any]  # the same on the devices, in whole micro-batches


def training_inputs(run: Run) -> TrainingInputs:
    """Makes a run's rows, prints what they are, and decides what its steps do with them."""
    settings, task, devices = run.settings, run.task, run.devices
    sources = training_rows.sources_of(settings)
    tokenizer = training_rows.tokenizer(run.source, run.architecture.config.vocab_size, task.tokenizer)
    with processes.first_before_others():
        data = task.prepared(settings, tokenizer, run.out / token_cache.FOLDER, sources)
        if jax.process_count() > 1 and processes.is_first():
            data.keep()  # the others find them
    print(data.summary)
    task.add_columns(settings, data)
    steps = _steps(settings, data)
    rate = schedule_of(settings, steps)
    updates = task.updates(settings)
    optimizer = optimizer_of(settings, rate if updates == 1 else lambda count: rate(count // updates))
    rows_of = data.batches(settings, devices.own_rows(settings.batch))
    filled = lambda step: next(rows.batched(rows_of(step), settings.batch))
    batch_of = lambda step: devices.place(filled(step))
    if settings.lora_dropout and task.rollouts is None:
        pieces_of = data.pieces(settings)
        batch_of = lambda step: devices.place(adapters.numbered(filled(step), pieces_of(step), step))
    return TrainingInputs(tokenizer, data, steps, rate, optimizer, rows_of, batch_of)


def _steps(settings: Settings, data: RunRows) -> int:
    if settings.steps is not None:
        return settings.steps
    number, epochs = data.num_in_epoch, settings.epochs_to_train or 1.0
    if number * epochs > MOST:
        raise UserError(f"--epochs={epochs} of {number:,} rows are more than {MOST:,} rows. Pass fewer.")
    return rows.num_steps(number, settings.batch, epochs)


def schedule_of(settings: Settings, steps: int) -> Any:
    """The learning rate of each step."""
    share = settings.warmup
    if share >= 1:
        if share > steps:
            raise UserError(f"--warmup={share:g} steps are more than the {steps} of the run. Pass fewer, or a share.")
        share = (share - 0.5) / steps  # schedules round up: this is so many steps whatever a division leaves
    return _SCHEDULES[settings.schedule](settings.peak_rate, steps, warm_up=share)


def optimizer_of(settings: Settings, rate: Any) -> Any:
    """The optimizer."""
    return optimizer_named(
        settings.optimizer, rate, weight_decay=settings.weight_decay, max_norm=settings.clip or None, seed=settings.seed
    )
