"""A training run from its settings to the folder that it leaves."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from liger_jax._install import version
from liger_jax.data import token_cache
from liger_jax.models import AutoModelForCausalLM
from liger_jax.models.hugging_face.config_json import unapplied_dropout
from liger_jax.trainers import (
    decided_run,
    finish,
    initial_state,
    model_card,
    outlook,
    result,
    resume,
    run_loop,
    run_model,
    training_inputs,
    unchanged,
)
from liger_jax.trainers.decided_run import Run, TaskOf
from liger_jax.trainers.distill_options import DistillOptions
from liger_jax.trainers.errors import training_errors, writable_folder
from liger_jax.trainers.log import Log
from liger_jax.trainers.options import Settings
from liger_jax.trainers.outcome import After, Outcome
from liger_jax.trainers.task import Task
from liger_jax.training import Checkpoints, lock, meshes, processes
from liger_jax.training.errors import NotFiniteAtStartError, memory_errors
from liger_jax.training.waiting import beside, telling
from liger_jax.user_errors import UserError, need, user_errors


@training_errors()
def train(settings: Settings, task: Task | TaskOf, after: After | None = None) -> Outcome:
    """Trains a model, and leaves it in the run's folder. `after`: is called after each step."""
    need("orbax.checkpoint", "tqdm")
    out = Path(settings.folder.out)
    writable_folder(out)
    with processes.only_first_speaks(), contextlib.ExitStack() as stack:
        if processes.is_first():
            stack.enter_context(lock.held(out))
            stack.enter_context(token_cache.leftovers_removed(out))
        with user_errors():
            processes.check_shared(out)
        try:
            return _train(settings, task, out, after)
        except NotFiniteAtStartError as error:
            whose = "--model or --teacher" if isinstance(settings.method, DistillOptions) else "--model"
            raise UserError(
                f"{error.problem} Weights of {whose} may not be finite, or results too large for --dtype."
            ) from error
        except jax.errors.JaxRuntimeError as error:
            if not (why := processes.lost()):
                raise
            raise UserError(why) from error


def _train(asked: Settings, task: Task | TaskOf, out: Path, after: After | None) -> Outcome:
    with user_errors():
        run, like, shown = decided_run.decided(asked, task, out)
    if asked.folder.samples and run.task.sampling is None and jax.process_count() > 1:
        raise UserError("--samples are shown by a run of one process. Leave it out, and try the result itself.")
    with user_errors():
        processes.check_same("settings", run.settings.of_all_processes() | run.precision | _versions())
    trained = run_model.trained_lines(run.settings.adapters, like, run.architecture)
    for line in filter(None, (run.devices.line, unapplied_dropout(run.source.config), *trained)):
        print(line)
    with run.devices.context():
        return _train_on(run, like, shown, after)


def _train_on(run: Run, like: Any, shown: Any, after: After | None) -> Outcome:
    """Trains. `like` has the types of the model that is trained, and `shown` those of the one that writes samples."""
    settings, task, devices = run.settings, run.task, run.devices
    reading = initial_state.reading_early(run)
    inputs = training_inputs.training_inputs(run)
    data, steps = inputs.data, inputs.steps
    with user_errors():
        made_of = resume.made_of(run, inputs)
        processes.check_same("model and data", made_of | {"steps": steps})
        checkpoints = resume.checkpoints_of(run, {"steps": steps} | made_of | dict(inputs.layout))
    checkpoints.check()
    if processes.is_first():
        data.keep()
    if settings.folder.result_of is not None:
        return _write_result_of(run, inputs, checkpoints, made_of)
    if resume.is_finished(settings, checkpoints, steps):
        return _finished(run, checkpoints, inputs.tokenizer.chats)
    with user_errors():
        processes.by_first(lambda: result.write_settings(run.asked))
    sampling = task.sampling
    stops = bool(inputs.tokenizer.stops)
    rollouts, updates, sizes = None, 0, []
    if sampling is not None:
        updates = sampling.updates(settings)
        sizes = sampling.sizes(settings, steps, meshes.shards_of_batch(devices.sizes))
    for line in outlook.lines(settings, steps, result.folder(settings), updates=updates, sizes=sizes, stops=stops):
        print(line)
    if sampling is not None:
        rollouts = sampling.begin(settings, data, inputs.tokenizer, devices.place, sizes)
        inputs = dataclasses.replace(inputs, examples=rollouts.examples)
    reading = reading or beside(initial_state.read_model, run)
    with user_errors(), telling("tracing"):
        programs, shapes = run_loop.programs(run, inputs, like, rollouts, shown)
    checkpoints.check_space(shapes, result.most_bytes(settings, run.source, shapes[0]))
    graph, state, frozen, keeps = initial_state.initial_state(run, inputs, reading, made_of)
    del reading  # it holds the weights that were read
    if checkpoints.latest_step is not None:  # two states need not fit: this one is freed first
        state = resume.shapes(state)
    state, log = resume.restored(checkpoints, state, inputs)
    if rollouts is not None:
        rollouts.goes_on(log)
    with telling("compiling"), memory_errors("while the step was compiled."):
        compiled = [program.result() for program in programs]
    columns = task.columns if rollouts is None else (*task.columns, *rollouts.columns)
    logs = settings.folder.log if processes.is_first() else ()
    with Log(logs, run.out, columns, log["steps"], run.asked.to_write()) as files:
        models = graph, frozen, nnx.graphdef(shown)
        loop = run_loop.loop(run, inputs, checkpoints, rollouts, compiled, models, files.write)
        if after is not None:

            def whole(params):
                # A model takes the variables that it is merged from, which a callback may overwrite.
                state, others = jax.tree.map(lambda x: x, ((params,), frozen))
                return run_model.tuned(nnx.graphdef(shown), state, others, keeps)

            loop = dataclasses.replace(loop, after=lambda params, figures: after(figures, whole(params)))
        state, stopped_by = run_loop.run(loop, state, log, settings.folder.is_kept)
    done = len(log["steps"])
    best = None if checkpoints.best is None else checkpoints.best[0]
    if stopped_by:
        saved = ", which is saved; the same command goes on from there" if settings.folder.is_kept else ""
        print(f"stopped after step {done} of {steps}{saved}")
        tuned = run_model.tuned(graph, state, frozen, keeps)
        return Outcome(128 + stopped_by, log["steps"], done, best, model=lambda: tuned, mesh=devices.mesh)
    finish.check_learned(run, log["steps"])
    if early := done < steps and loop.is_over(log["steps"]):
        state = resume.shapes(state)
        state, done = finish.best_state(state, steps, checkpoints)
    tuned = run_model.tuned(graph, state, frozen, keeps)
    del state  # frees the moments' memory, which casting the weights may need
    target = result.write(tuned, settings, run.source, inputs.tokenizer.stops)
    chats = inputs.tokenizer.chats
    processes.by_first(lambda: _describe(run, target, log, done, chats))
    processes.by_first(lambda: finish.record_result(settings, checkpoints, target, early))
    finish.print_result(run, log, done, target, checkpoints)
    processes.by_first(lambda: [print(line) for line in unchanged.lines(settings, run.source, target)])
    processes.by_first(lambda: _push(settings, target))
    return Outcome(0, log["steps"], done, best, target, lambda: tuned, chats, devices.mesh)


def _finished(run: Run, checkpoints: Checkpoints, chats: bool) -> Outcome:
    """The outcome of a run that had already ended."""
    settings, steps = run.settings, checkpoints.latest_log.get("steps", [])
    best, target = None if checkpoints.best is None else checkpoints.best[0], result.folder(settings)
    early = result.ended_early(settings, checkpoints.finished) and best is not None
    processes.by_first(lambda: _push(settings, target))
    options: dict[str, Any] = {name: jnp.dtype(dtype) for name, dtype in run.precision.items()}
    options |= dict(scan_layers=run_model.scans_layers(run.task))
    return Outcome(
        0, steps, best if early else len(steps), best, target,
        lambda: AutoModelForCausalLM.from_pretrained(target, **options), chats,
    )  # fmt: skip


def _describe(run: Run, target: Path, log: Any, done: int, chats: bool) -> None:
    """Writes the model card."""
    figures = finish.learned(run.task, log, done)
    devices = f"{run.devices.mesh.size if run.devices.mesh is not None else 1} × {jax.devices()[0].device_kind}"
    options: Any = dict(precision=run.precision, devices=devices, chats=chats)
    model_card.write(target, model_card.text(run.asked, figures, **options))


def _push(settings: Settings, target: Path) -> None:
    if settings.folder.push is not None:
        print(f"on the hub: {model_card.push(settings.folder.push, target)}")


def _versions() -> dict[str, Any]:
    """What must also be equal in several processes, so that they compile the same programs."""
    names = ("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion")
    return {"jax": jax.__version__, "liger-jax": version()} | {name: getattr(jax.config, name) for name in names}


def _write_result_of(
    run: Run, inputs: training_inputs.TrainingInputs, checkpoints: Checkpoints, made_of: dict[str, str]
) -> Outcome:
    """Writes the result of a checkpoint that is kept, for `--result-of`."""
    step = run.settings.folder.result_of
    assert step is not None
    resume.check_kept(step, checkpoints)
    graph, state, frozen, keeps = initial_state.initial_state(
        run, inputs, beside(initial_state.read_model, run), made_of
    )
    state = resume.shapes(state)
    tuned = run_model.tuned(graph, checkpoints.read(step, state)[0], frozen, keeps)
    target = result.write(tuned, run.settings, run.source, inputs.tokenizer.stops)
    chats = inputs.tokenizer.chats
    processes.by_first(lambda: _describe(run, target, checkpoints.latest_log, step, chats))
    print(f"the result of step {step} is in {target}")
    processes.by_first(lambda: _push(run.settings, target))
    return Outcome(0, step=step, target=target, model=lambda: tuned, chats=chats, mesh=run.devices.mesh)
