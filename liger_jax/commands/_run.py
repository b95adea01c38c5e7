"""A training run from its settings to the folder that it leaves."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from liger_jax.commands import (
    _adapters,
    _long_rows,
    _longer,
    _memory,
    _output,
    _recipe,
    _samples,
    _teacher,
    _token_cache,
    _training_rows,
)
from liger_jax.commands._errors import UserError, need, training_errors, user_errors, writable_folder
from liger_jax.commands._laid_rows import RowParts
from liger_jax.commands._log import Log
from liger_jax.commands._prompt_rows import PromptRows
from liger_jax.commands._settings import MOST, Settings
from liger_jax.commands._task import Task
from liger_jax.models import AutoModelForCausalLM, KernelOptions, Layout
from liger_jax.models.hugging_face.checkpoint import CONFIG, GENERATION
from liger_jax.models.hugging_face.passed_over import dropout
from liger_jax.models.hugging_face.source import Source
from liger_jax.models.hugging_face.weights import quantized_as_in
from liger_jax.models.quantized import quantize
from liger_jax.planner import defaults
from liger_jax.planner.architectures import Architecture, architecture_of
from liger_jax.training import (
    Checkpoints,
    Loop,
    disk,
    identity,
    lock,
    make_step,
    meshes,
    processes,
    rows,
    scoring,
)
from liger_jax.training.errors import memory_errors
from liger_jax.training.waiting import Compiling, beside, telling

TaskOf = Callable[[Any, Source, Architecture], Task]
RunRows = _training_rows.TrainingRows | PromptRows


@training_errors()
def train(settings: Settings, task: Task | TaskOf) -> int:
    """Trains a model.

    Args:
        settings: the run.
        task: what it trains for; or a function of the run, its model's folder and architecture, which says it.

    Returns:
        The exit code: 0, or 128 and a signal's number if one stopped it.

    Raises:
        UserError: whatever the user can mend.
    """
    need("orbax.checkpoint", "tqdm")
    out = Path(settings.out)
    writable_folder(out)
    with processes.only_first_speaks(), contextlib.ExitStack() as stack:
        if processes.is_first():
            stack.enter_context(lock.held(out))
            stack.enter_context(_token_cache.leftovers_removed(out))
        try:
            return _train(settings, task, out)
        except jax.errors.JaxRuntimeError as error:
            if not (why := processes.lost()):
                raise
            raise UserError(why) from error


def _train(asked: Settings, task: Task | TaskOf, out: Path) -> int:
    if asked.samples and jax.process_count() > 1:
        raise UserError("--samples are shown by a run of one process. Leave it out, and try the result itself.")
    with user_errors():
        settings, source = _adapters.found(asked)
        for folder in _adapters.tuned(settings, source):
            _output.check(settings, folder)
        settings = _as_stored(settings, source)
        precision = _precision(settings, source.dtype)
        found = _long_rows.stretched_for(settings, architecture_of(source))
        if not isinstance(task, Task):
            task = task(settings, source, found)
        if task.alone and jax.process_count() > 1:
            raise UserError("--distributed: this command trains in one process. Leave it out.")
        shape = lambda layout: nnx.eval_shape(lambda: _new_model(settings, task, source, found, precision, layout))
        # A model that writes its own batches gathers split weights for each token: several devices are asked for.
        there = jax.devices() if task.played is None or settings.mesh else jax.devices()[:1]
        devices = meshes.chosen(settings.mesh, there, task.rows(settings), shape)
        if task.played is not None and devices.layout_of_rows != devices.layout:
            raise UserError(
                f"--mesh={settings.mesh}: devices that share completions cannot sample them. Give the devices to data "
                "or fsdp."
            )
        if task.alone and devices.sizes["sequence"] > 1:
            raise UserError(
                f"--mesh={settings.mesh}: this command's rows stay whole. Give the devices to fsdp or tensor."
            )
        settings = _fitted(settings, task, found, precision, source.dtype, devices)
        model = shape(devices.layout)  # not in the mesh's context, in which Flax makes quantised variables dense
        of_rows = devices.layout_of_rows
        shown = model if not settings.samples or of_rows == devices.layout else shape(of_rows)
    for line in filter(None, (devices.line, dropout(source.config), *_trained_lines(settings, model, found))):
        print(line)
    with devices.context():
        return _train_on(_Run(asked, settings, task, source, found, precision, devices, out), model, shown)


@dataclasses.dataclass(frozen=True)
class _Run:
    """A run that is decided, before its rows are made and its weights are read.

    Attributes:
        asked: the settings as they were given.
        settings: the same with all that was left to the run.
        task: what the run trains for.
        source: the model's folder.
        found: the model's architecture.
        precision: names of the dtypes of the computation and of the weights.
        devices: where it runs.
        out: its folder.
    """

    asked: Settings
    settings: Settings
    task: Task
    source: Source
    found: Architecture
    precision: dict[str, str]
    devices: meshes.Devices
    out: Path


@dataclasses.dataclass(frozen=True)
class _Course:
    """What a run's steps train on.

    Attributes:
        tokenizer: what its rows were encoded by.
        data: the rows.
        steps: how many there are.
        rate: the learning rate of a step.
        optimizer: any optax transformation.
        rows_of: the rows of a step that this process reads.
        batch_of: the same on the devices, in whole parts.
    """

    tokenizer: Any
    data: RunRows
    steps: int
    rate: Callable[[Any], Any]
    optimizer: Any
    rows_of: Callable[[int], rows.Rows]
    batch_of: Callable[[int], Any]


def _train_on(run: _Run, like: Any, shown: Any) -> int:
    """Trains. `like` has the types of the model that is trained, and `shown` those of the one that writes samples."""
    settings, task, devices = run.settings, run.task, run.devices
    course = _course(run)
    data, steps = course.data, course.steps
    with user_errors():
        made_of = data.made_of() | _model_files(settings, run.source)
        made_of |= {} if task.teacher is None else task.teacher.made_of()
        checkpoints = _checkpoints(settings, run.source, {"steps": steps} | made_of)
    checkpoints.check()
    if processes.is_first():
        data.keep()
    if settings.result_of is not None:
        return _write_result_of(run, course, checkpoints, made_of)
    if _is_finished(settings, checkpoints, steps):
        return 0
    with user_errors():
        processes.by_first(lambda: _output.write_settings(run.asked))
    played = None if task.played is None else task.played(settings, data, course.tokenizer, devices.place)
    reading = beside(_read, run)
    with user_errors(), telling("tracing"):
        batches = course.batch_of(0) if played is None else played.example, course.batch_of(0)
        programs, shapes = _programs(run, data, like, course.optimizer, batches)
    checkpoints.check_space(shapes, _output.most_bytes(settings, run.source, shapes[0]))
    graph, state, frozen, keeps = _begun(run, course, reading, made_of)
    del reading  # it holds the weights as they were read
    if checkpoints.latest_step is not None:  # two states need not fit: what is read takes this one's place
        state = _shapes(state)
    state, log = _restored(checkpoints, state, course)
    with telling("compiling"), memory_errors("while the step was compiled."):
        compiled = [program.result() for program in programs]
    columns = task.columns if played is None else (*task.columns, *played.columns)
    told = settings.log if processes.is_first() else ()
    with Log(told, run.out, columns, log["steps"], run.asked.to_write()) as files:
        loop = _loop(run, course, checkpoints, played, compiled, (graph, frozen, nnx.graphdef(shown)), files.write)
        state, stopped_by = loop.run(state, log)
    if stopped_by:
        print(f"stopped after step {len(log['steps'])} of {steps}, which is saved; the same command goes on from there")
        return 128 + stopped_by
    done, early = steps, len(log["steps"]) < steps
    if early:
        state = _shapes(state)  # two states need not fit
        state, done = _best(state, steps, checkpoints)
    tuned = _tuned(graph, state, frozen, keeps)
    del state  # the moments' memory, in which the weights may be cast
    target = _output.write(tuned, settings, run.source, course.tokenizer.stops)
    processes.by_first(lambda: _leave(settings, checkpoints, target, early))
    _tell(run, log["steps"], done, target, checkpoints)
    return 0


def _course(run: _Run) -> _Course:
    """Makes the run's rows, and says what they are; and what its steps do with them."""
    settings, task, devices = run.settings, run.task, run.devices
    parts = _training_rows.parts_of(settings)
    tokenizer = _training_rows.tokenizer(run.source, run.found, task.tokenizer)
    with processes.first_before_others():
        data = task.prepared(settings, tokenizer, run.out / _token_cache.FOLDER, parts)
        if jax.process_count() > 1 and processes.is_first():
            data.keep()  # the others find them
    print(data.summary)
    task.add_columns(settings, data)
    steps = _steps(settings, data)
    rate = _recipe.schedule(settings, steps)
    updates = task.updates(settings)
    optimizer = _recipe.optimizer(settings, rate if updates == 1 else lambda count: rate(count // updates))
    rows_of = data.batches(settings, devices.own_rows(settings.batch))
    filled = lambda step: next(rows.parts(rows_of(step), settings.batch))
    batch_of = lambda step: devices.place(_adapters.numbered(settings, filled(step), step))
    return _Course(tokenizer, data, steps, rate, optimizer, rows_of, batch_of)


def _begun(
    run: _Run, course: _Course, reading: Future[Any], made_of: dict[str, str]
) -> tuple[Any, tuple[Any, Any], Any, Any]:
    """The run's graph, state and frozen variables, from the model that is read, and what that one keeps for its files.

    A step overwrites the state in place: when this has returned, nothing else may hold it.
    """
    settings, task, devices = run.settings, run.task, run.devices
    with user_errors():
        model = _with_adapters(settings, run.source, reading)
        if task.teacher is not None and task.teacher.stays:
            with telling("reading the teacher's weights"):
                read = beside(task.teacher.read, run.precision["dtype"], devices.mesh, devices.kernels)
                model.teacher = read.result()
    if settings.result_of is None:
        with memory_errors("before the first step."):
            task.before(settings, course.data, model, made_of)
    graph, params, frozen = nnx.split(model, _trained(settings), ...)
    return graph, devices.started(params, course.optimizer), devices.placed(frozen), model.kept


def _write_result_of(run: _Run, course: _Course, checkpoints: Checkpoints, made_of: dict[str, str]) -> int:
    """Makes a model of a checkpoint that is kept, for `--result-of`."""
    step = run.settings.result_of
    assert step is not None
    _check_kept(step, checkpoints)
    graph, state, frozen, keeps = _begun(run, course, beside(_read, run), made_of)
    state = _shapes(state)  # two states need not fit: what is read takes this one's place
    tuned = _tuned(graph, checkpoints.read(step, state)[0], frozen, keeps)
    target = _output.write(tuned, run.settings, run.source, course.tokenizer.stops)
    print(f"the result of step {step} is in {target}")
    return 0


def _loop(
    run: _Run,
    course: _Course,
    checkpoints: Checkpoints,
    played: Any,
    compiled: Sequence[Any],
    models: tuple[Any, Any, Any],
    write: Callable[..., None],
) -> Loop:
    """The loop over the run's steps, with all that it does between them.

    `compiled` are the step and the scoring; `models` are the graph of the model that is trained, its frozen variables,
    and the graph of the one that writes samples.
    """
    settings, task, devices, data = run.settings, run.task, run.devices, course.data
    (step, sums), (graph, frozen, shown) = compiled, models
    size = settings.batch // settings.num_parts
    score = scoring(lambda params, *others: sums(params, others[0], devices.place(others[1])), frozen, task.scores)
    held_out = RowParts(data.held_out_rows, size)
    # After a step its own rows are scored; before the first one, those that it will have.
    its_rows = lambda step: [next(rows.parts(course.rows_of(max(0, step - 1)), size))]
    unit, longest = math.prod(devices.sizes.values()), run.found.config.longest_sequence
    samples = _samples.Samples(data.held_out(settings.samples), course.tokenizer, longest, unit)
    batch_of = course.batch_of
    return Loop(
        step=_loop_step(played, graph, step, frozen),
        batch_of=batch_of if played is None else lambda step: {**batch_of(step), "number": np.int32(step)},
        steps=course.steps,
        checkpoints=checkpoints,
        every=settings.every,
        evaluate=lambda params: score(params, held_out) if held_out else {},
        patience=settings.patience,
        show=lambda params, write: settings.samples and samples.show(nnx.merge(shown, params, frozen), write),
        check=lambda params, step: score(params, its_rows(step))["eval_loss"],
        rate=course.rate,
        write=write,
        shown=task.shown,
        progress=processes.is_first(),
    )


def _leave(settings: Settings, checkpoints: Checkpoints, target: Path, early: bool) -> None:
    """Writes down that the result is there, and removes what an earlier run has left."""
    checkpoints.finish(target.name, _output.record(settings, target, early))
    _output.clear(settings, checkpoints.earlier)
    checkpoints.forget_earlier()


def _fitted(
    settings: Settings, task: Task, found: Architecture, precision: dict[str, str], stored: str, devices: meshes.Devices
) -> Settings:
    """The run with what was left to it decided by what fits; what it needs is printed."""
    options: dict[str, Any] = dict(stored=stored, mesh=devices.sizes)
    if (teacher := task.teacher) is not None:
        parts = math.prod(devices.sizes[axis] for axis in ("data", "fsdp", "expert"))
        tokens = settings.batch * settings.length // parts
        of_parts = functools.cache(lambda parts: teacher.num_bytes(precision["dtype"], devices, tokens // parts))
        options |= dict(teacher=of_parts, teacher_stays=teacher.stays)
    return _memory.fitted(settings, found, **precision, **options)


def _check_kept(step: int, checkpoints: Checkpoints) -> None:
    """Refuses the result of a step of which there is no checkpoint."""
    if step not in (kept := checkpoints.kept_steps):
        there = f"those of {', '.join(map(str, kept))} are" if kept else "none is"
        raise UserError(f"--result-of={step}: this step's checkpoint is not kept; {there}. --keep keeps more of them.")


def _is_finished(settings: Settings, checkpoints: Checkpoints, steps: int) -> bool:
    """Whether the result is there already, which is said."""
    latest, finished = checkpoints.latest_step, checkpoints.finished
    early = _output.ended_early(settings, finished)
    if not ((latest == steps or early) and _output.is_there(settings, finished)):
        return False
    why = "where --patience ended it" if early else "the last one"
    cure = "Another --patience goes" if early else "More --steps or --epochs go"
    print(
        f"finished: {_output.folder(settings)} is there since step {latest}, {why}; nothing is changed. {cure} on "
        "from it"
    )
    return True


def _best(like: Any, steps: int, checkpoints: Checkpoints) -> tuple[Any, int]:
    """The state with the least held-out loss of a run that ended early, and its step."""
    assert checkpoints.best is not None and checkpoints.latest_step is not None
    step, last = checkpoints.best[0], checkpoints.latest_step
    print(f"stopped after step {last} of {steps}: step {step} had the least held-out loss, and is taken")
    return checkpoints.read(step, like)[0], step


def _tell(run: _Run, log: list[dict[str, Any]], done: int, target: Path, checkpoints: Checkpoints) -> None:
    """Says how a run has ended, by its task's figure, and where its result is."""
    name = run.task.told
    first, last = log[0][name], log[done - 1][name]
    print(f"{done} step{'s' if done > 1 else ''}; {name} {first:.3f} → {last:.3f}; {target.name} in {target}")
    best = checkpoints.best
    if best is not None and best[0] != done:
        there = run.out / _output.CHECKPOINTS / str(best[0])
        without = " without --fresh and" if run.settings.fresh else ""
        print(
            f"{target.name} is of step {done}, the last one; by held-out loss the best is step {best[0]}, with "
            f"{best[1]:.3f}, whose checkpoint stays in {there}; the same command{without} with --result-of {best[0]} "
            f"makes {target.name}-{best[0]} of it"
        )


def _as_stored(settings: Settings, source: Source) -> Settings:
    """The settings for weights that are nf4 already, if these are."""
    if not source.is_nf4:
        return settings
    if settings.lora is None:
        raise UserError(
            f"The weights of {settings.model} are nf4, and stay as they are. Pass --lora, such as --lora 16."
        )
    if settings.quantize == "int8":
        raise UserError(f"--quantize=int8, but the weights of {settings.model} are nf4 already. Leave it out.")
    return dataclasses.replace(settings, quantize="nf4")


def _steps(settings: Settings, data: RunRows) -> int:
    if settings.steps is not None:
        return settings.steps
    number, epochs = data.num_in_epoch, settings.epochs_to_train or 1.0
    if number * epochs > MOST:
        raise UserError(f"--epochs={epochs} of {number:,} rows are more than {MOST:,} rows. Pass fewer.")
    return rows.num_steps(number, settings.batch, epochs)


def _checkpoints(
    settings: Settings,
    source: Source,
    made_of: dict[str, Any],
) -> Checkpoints:
    """The run's checkpoints, which no other run goes on from."""
    spared = [set(_output.of_earlier_runs(settings, each)) for each in _adapters.tuned(settings, source)]
    earlier = sorted(set.intersection(*spared))
    folder = Path(settings.out) / _output.CHECKPOINTS
    options: dict[str, Any] = dict(fresh=settings.fresh, earlier=earlier, keep=settings.keep, growing=_longer.GROWING)
    return Checkpoints(folder, settings.of_the_run() | made_of, **options)


def _model_files(settings: Settings, source: Source) -> dict[str, str]:
    """Digests of the files of the model that is tuned: weights, tokenizer, chat template and configs."""
    small = {name: (source.folder / name) for name in (CONFIG, GENERATION)}
    contents = {name: path.read_bytes() for name, path in small.items() if path.is_file()}
    contents |= _adapters.files(settings)
    found = identity.of_files(contents | source.tokenizer) | identity.of_weights(source.folder, source.weight_files)
    if settings.verify:
        with telling(f"reading {disk.size(source.weight_bytes)} of weights to verify them"):
            found |= identity.of_whole_weights(source.folder, source.weight_files)
    return found


def _restored(checkpoints: Checkpoints, state: Any, course: _Course) -> tuple[Any, dict[str, Any]]:
    """The state and the log to go on with: the newest checkpoint's, or those of a run that begins."""
    before = checkpoints.latest_settings
    if (found := checkpoints.restore(state)) is None:
        found = state, {"steps": []}
    else:
        print(f"resumed at step {checkpoints.latest_step}")
    of_steps = found[1]["steps"]
    last = of_steps[-1].get("learning_rate") if of_steps else None
    for line in _longer.lines(before, len(of_steps), last, course.steps, course.rate, course.data.num_in_epoch):
        print(line)
    return found


def _shapes(state: Any) -> Any:
    """What a checkpoint is read by, when the arrays are to go."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def _precision(settings: Settings, stored: str) -> dict[str, str]:
    """Names of the dtypes of the computation and of the weights."""
    return dict(
        dtype=settings.dtype or ("float32" if jax.default_backend() == "cpu" else defaults.DTYPE),
        param_dtype=settings.param_dtype or defaults.param_dtype(settings.lora, stored),
    )


def _read(run: _Run) -> Any:
    settings, devices = run.settings, run.devices
    options: dict[str, Any] = {name: jnp.dtype(dtype) for name, dtype in run.precision.items()}
    options |= dict(remat=settings.remat, quantize=settings.quantize, scan_layers=run.task.scan_layers)
    options |= dict(length=settings.length, rope_scaling=settings.rope_scaling)
    return AutoModelForCausalLM.from_pretrained(run.source, mesh=devices.mesh, kernels=devices.kernels, **options)


def _loop_step(played: Any, graph: Any, step: Any, frozen: Any) -> Any:
    """A step of the loop, from the compiled one."""
    if played is None:
        return lambda state, batch: step(state, batch, frozen)
    return lambda state, batch: played.step(graph, step, state, batch, frozen)


def _with_adapters(settings: Settings, source: Source, reading: Future[Any]) -> Any:
    with telling(f"reading {disk.size(source.weight_bytes)} of weights"):
        model = reading.result()
    if settings.lora is not None:
        with telling(f"adding adapters of rank {settings.lora}, while the step is compiled"):
            _adapters.add(model, settings)
    return model


def _trained_lines(settings: Settings, model: Any, found: Architecture) -> Iterator[str]:
    """How much of a model is trained."""
    number = sum(x.size for x in jax.tree.leaves(nnx.state(model, _trained(settings))))
    if settings.lora is None:
        yield f"trained: all {number:,} parameters"
        return
    total = found.num_parameters + number
    yield f"trained: {number:,} of {total:,} parameters, {number / total:.2%}"
    if settings.lora > (width := found.config.hidden_size):
        yield f"--lora {settings.lora} is more than the model's width, and rank {width} can hold any change already"


def _trained(settings: Settings) -> Any:
    """The variables that are trained, by their type; a teacher has none."""
    kind = nnx.Param if settings.lora is None else nnx.LoRAParam
    return nnx.All(kind, nnx.Not(nnx.PathContains(_teacher.NAME)))


def _tuned(graph: Any, state: Any, frozen: Any, keeps: Any) -> Any:
    """A model that is to be written."""
    model = nnx.merge(graph, state[0], frozen)
    model.kept = keeps
    if hasattr(model, _teacher.NAME):
        delattr(model, _teacher.NAME)
    return model


def _new_model(
    settings: Settings,
    task: Task,
    source: Source,
    found: Architecture,
    precision: dict[str, str],
    layout: Layout | None,
) -> Any:
    """A model of the run's structure with random weights, for its shapes."""
    options: dict[str, Any] = {name: jnp.dtype(dtype) for name, dtype in precision.items()}
    options |= dict(
        remat=settings.remat or defaults.REMAT, scan_layers=task.scan_layers, kernels=KernelOptions(layout=layout)
    )
    model = found.family(found.config, **options, rngs=nnx.Rngs(0))
    if source.is_nf4:
        quantized_as_in(source.folder, model)
    elif settings.quantize is not None:
        _quantized(model, settings)
    if settings.lora is not None:
        _adapters.add(model, settings)
    if task.teacher is not None and task.teacher.stays:
        model.teacher = task.teacher.new(precision["dtype"], layout)
    return model


def _quantized(model: Any, settings: Settings) -> None:
    assert settings.quantize is not None
    try:
        quantize(model, settings.quantize)
    except ValueError as error:
        if "block_size" not in str(error):
            raise
        raise UserError(
            f"--quantize={settings.quantize} cuts a projection's input into blocks of 64, which do not divide the "
            f"widths of {settings.model}. Leave it out."
        ) from error


def _programs(
    run: _Run, data: RunRows, like: Any, optimizer: Any, batches: tuple[Any, rows.Rows]
) -> tuple[tuple[Future[Any], Future[Any]], Any]:
    """The step and the scoring, which are compiled while the weights are read: they depend on the shapes alone.

    `like` is the model's types; `batches` are an example of what is trained on, and one of rows. The state's shapes
    come beside the programs.
    """
    settings, task, devices = run.settings, run.task, run.devices
    graph, params, frozen = nnx.split(like, _trained(settings), ...)
    loss = _adapters.loss_of(settings, task.loss(settings, data))
    options: dict[str, Any] = dict(has_aux=True, micro_batches=settings.num_parts)
    step = make_step(graph, optimizer, loss, normalizer=task.normalizer(settings, data), **options)
    state, frozen = devices.typed((params, jax.eval_shape(optimizer.init, params)), optimizer), devices.typed(frozen)
    size, compiling = settings.batch // settings.num_parts, Compiling()
    part = {name: np.zeros((size, *x.shape[1:]), x.dtype) for name, x in batches[1].items() if x.ndim > 1}
    programs = (
        compiling.start(devices.jitted(step, state, optimizer), state, batches[0], frozen),
        compiling.start(task.sums(graph, settings, data), state[0], frozen, devices.place(part)),
    )
    return programs, state
