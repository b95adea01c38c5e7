"""What the steps of a training run train on: its rows, their number, the learning rate and the optimizer."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from liger_jax.data import token_cache, training_rows
from liger_jax.data.prompt_rows import PromptRows
from liger_jax.trainers import adapters
from liger_jax.trainers.decided_run import Run
from liger_jax.training import processes, rows

RunRows = training_rows.TrainingRows | PromptRows


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
    sources = training_rows.sources_of(settings.rows)
    tokenizer = training_rows.tokenizer(run.source, run.architecture.config.vocab_size, task.tokenizer)
    with processes.first_before_others():
        data = task.prepared(settings, tokenizer, run.out / token_cache.FOLDER, sources)
        if jax.process_count() > 1 and processes.is_first():
            data.keep()  # the others find them
    print(data.summary)
    task.add_columns(settings, data)
    recipe = settings.recipe
    steps = recipe.num_steps(data.num_in_epoch)
    rate = recipe.rate(settings.peak_rate, steps)
    updates = task.updates(settings)
    optimizer = recipe.optimizer_of(rate if updates == 1 else lambda count: rate(count // updates))
    rows_of = data.batches(*recipe.order, devices.own_rows(recipe.batch))
    filled = lambda step: next(rows.batched(rows_of(step), recipe.batch))
    batch_of = lambda step: devices.place(filled(step))
    if settings.adapters.lora_dropout and task.rollouts is None:
        pieces_of = data.pieces(*recipe.order)
        batch_of = lambda step: devices.place(adapters.numbered(filled(step), pieces_of(step), step))
    return TrainingInputs(tokenizer, data, steps, rate, optimizer, rows_of, batch_of)
