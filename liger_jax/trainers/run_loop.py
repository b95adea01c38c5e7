"""The loop of a training run: its two programs, and what is done between steps."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
from flax import nnx

from liger_jax import _collector
from liger_jax.trainers import adapters, run_model
from liger_jax.trainers.decided_run import Run
from liger_jax.trainers.samples import Samples
from liger_jax.trainers.training_inputs import TrainingInputs
from liger_jax.training import Checkpoints, Loop, make_step, processes, scoring
from liger_jax.training.waiting import Compiling
from liger_jax.user_errors import UserError


@_collector.paused()
def programs(
    run: Run, inputs: TrainingInputs, like: Any, rollouts: Any = None, shown: Any = None
) -> tuple[list[Future[Any]], Any]:
    """Begins to compile the step and the scoring while the weights are read, since both depend on shapes alone.

    Returns the programs, each to be waited for: those of the sampler, a step for each size of rows, and the scoring;
    and the shapes of the state.
    """
    settings, task, devices, data, optimizer = run.settings, run.task, run.devices, inputs.data, inputs.optimizer
    graph, params, frozen = nnx.split(like, run_model.trained(settings.adapters), ...)
    loss = adapters.loss_of(settings.adapters, settings.recipe.seed, task.loss(settings, data))
    options: dict[str, Any] = dict(has_aux=True, grad_norm=True, normalizer=task.normalizer(settings, data))
    state, frozen = devices.typed((params, jax.eval_shape(optimizer.init, params)), optimizer), devices.typed(frozen)
    compiling, scored, started, sampler = Compiling(), devices.place(inputs.some_of(0)), [], []
    for batch, micro_batches in inputs.examples:  # the step takes longest to compile
        step = make_step(graph, optimizer, loss, micro_batches=micro_batches, **options)
        started.append(compiling.start(devices.jitted(step, state, optimizer), state, batch, frozen))
    # On a mesh the sampler is compiled when it is called, for the shardings that its weights have then.
    if rollouts is not None and devices.mesh is None:
        # Prompts have other sizes than the rows of a step, so that other products are measured. They are also scored.
        compiling = Compiling()
        sampler = [compiling.lowered(program) for program in rollouts.lowered(shown)]
    return [*sampler, *started, compiling.start(task.sums(graph, settings, data), state[0], frozen, scored)], state


def loop(
    run: Run,
    inputs: TrainingInputs,
    checkpoints: Checkpoints,
    rollouts: Any,
    compiled: Sequence[Any],
    models: tuple[Any, Any, Any],
    write: Callable[..., None],
) -> Loop:
    """Makes the loop over a run's steps, with what is done between them."""
    settings, task, devices, data = run.settings, run.task, run.devices, inputs.data
    (*others, sums), (graph, frozen, shown) = compiled, models
    steps = others[len(others) - len(inputs.examples) :]
    step_of_shape = {_shape(batch): step for (batch, _), step in zip(inputs.examples, steps, strict=True)}
    update = lambda state, batch, frozen: step_of_shape[_shape(batch)](state, batch, frozen)
    score = scoring(lambda params, *others: sums(params, others[0], devices.place(others[1])), frozen, task.scores)
    # After a step its own rows are scored; before the first step, the rows of that step.
    its_rows = lambda step: [inputs.some_of(max(0, step - 1))]
    unit, longest = math.prod(devices.sizes.values()), run.architecture.config.longest_sequence
    # A model that samples its batches writes some of them down itself.
    held = data.held_out(settings.folder.samples) if rollouts is None else []
    samples = Samples(held, inputs.tokenizer, longest, unit)
    batch_of = inputs.batch_of
    return Loop(
        step=lambda state, batch: (
            update(state, batch, frozen)
            if rollouts is None
            else rollouts.step((graph, shown), update, state, batch, frozen)
        ),
        batch_of=batch_of if rollouts is None else lambda step: {**batch_of(step), "number": np.int32(step)},
        steps=inputs.steps,
        checkpoints=checkpoints,
        every=settings.folder.every,
        evaluate=(lambda params: score(params, inputs.scored)) if inputs.scored else None,
        patience=settings.recipe.patience,
        show=lambda params, write: samples.show(nnx.merge(shown, params, frozen), write),
        check=lambda params, step: score(params, its_rows(step))["eval_loss"],
        rate=inputs.rate,
        write=write,
        shown=task.shown,
        progress=processes.is_first(),
    )


def _shape(batch: Any) -> tuple[int, ...]:
    """The shape of a batch, by which its program is found."""
    return batch["input_ids"].shape


def run(loop: Loop, state: Any, log: dict[str, Any], is_kept: bool) -> tuple[Any, int]:
    """Runs the loop. The user's errors say what is saved, if the run's folder is kept.

    Returns the state, and the number of the signal that stopped the run, or 0.
    """
    try:
        return loop.run(state, log)
    except UserError as error:
        done = len(log["steps"])
        if not (done and is_kept) or loop.checkpoints is None or loop.checkpoints.latest_step != done:
            raise
        raise UserError(f"{error} Step {done} is saved, and the same command resumes from there.") from error
