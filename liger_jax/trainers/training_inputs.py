"""The inputs of a training run's steps: its rows, the number of steps, the learning rate and the optimizer."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from liger_jax.data import training_rows
from liger_jax.data.prompt_rows import PromptRows
from liger_jax.trainers import adapters, step_sizes
from liger_jax.trainers.decided_run import Run
from liger_jax.trainers.run_data import RunRows
from liger_jax.training import rows
from liger_jax.training.row_sizes import Size

Example = tuple[Any, int]  # a batch, and in how many micro-batches it is


@dataclasses.dataclass(frozen=True)
class TrainingInputs:
    """The inputs of a run's steps."""

    tokenizer: Any  # the tokenizer of its rows
    data: RunRows  # the rows
    steps: int  # how many there are
    rate: Callable[[Any], Any]  # the learning rate of a step
    optimizer: Any  # any optax transformation
    batch_of: Callable[[int], Any]  # the rows of a step on the devices
    examples: Sequence[Example]  # one of each size that they may have
    some_of: Callable[[int], rows.Rows]  # rows of a step as they are scored, all of one size
    scored: Sequence[rows.Rows]  # the rows that are held out, in batches of that size
    layout: Mapping[str, str]  # how rows are laid, for checkpoints


def training_inputs(run: Run) -> TrainingInputs:
    """Makes a run's rows, prints a summary of them, and decides the number of steps and the learning rate."""
    settings, task, recipe, laid = run.settings, run.task, run.settings.recipe, None
    sampling, (tokenizer, data) = task.sampling, run.data()
    print(data.summary)
    steps = recipe.num_steps(data.num_in_epoch)
    if isinstance(data, training_rows.TrainingRows):
        laid = step_sizes.laying(settings, run.architecture.config, task.teacher, run.devices)
        data = data.laid_in_steps(*recipe.order, steps, laid)
        for line in step_sizes.lines(settings, data, steps, laid):
            print(line)
    task.add_columns(settings, data)
    rate = recipe.rate(settings.peak_rate, steps)
    updates = 1 if sampling is None else sampling.updates(settings)
    optimizer = recipe.optimizer_of(rate if updates == 1 else lambda count: rate(count // updates))
    return TrainingInputs(tokenizer, data, steps, rate, optimizer, *_rows(run, data), step_sizes.identity(data, laid))


def _rows(run: Run, data: RunRows) -> tuple[Any, Sequence[Example], Any, Sequence[rows.Rows]]:
    """The batches of the run: by their step, one of each size, rows of a step that are scored, and those held out."""
    recipe, devices = run.settings.recipe, run.devices
    if isinstance(data, PromptRows):
        some_of = lambda step: next(rows.batched(data.batches()(step), recipe.rows_at_once))
        return lambda step: devices.place(data.batches()(step)), [], some_of, ()
    has_dropout, in_steps = bool(run.settings.adapters.lora_dropout), data.in_steps
    assert in_steps is not None

    def batch_of(step: int) -> Any:
        batch = in_steps.rows_of(step, devices.own_rows(in_steps.size_of(step).num_rows))
        if has_dropout:
            batch = adapters.numbered(batch, in_steps.numbers_of(step), step)
        return devices.place(batch)

    def example(size: Size) -> Example:
        batch = in_steps.empty(size)
        if has_dropout:
            batch = adapters.numbered(batch, np.zeros((size.num_rows, size.length)), 0)
        return devices.place(batch), size.micro_batches

    return batch_of, [example(size) for size in in_steps.sizes], in_steps.some_of, in_steps.scored()
