"""How a training run is resumed: from its checkpoints, unless its result is there already."""

import contextlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from liger_jax.data.sources import resolved
from liger_jax.models.hugging_face.checkpoint import CONFIG, GENERATION
from liger_jax.models.hugging_face.source import Source
from liger_jax.trainers import adapters, memory, mesh_choice, result
from liger_jax.trainers.decided_run import Run
from liger_jax.trainers.grpo_options import REWARD_CALL
from liger_jax.trainers.options import Settings
from liger_jax.trainers.training_inputs import TrainingInputs
from liger_jax.training import Checkpoints, disk, identity
from liger_jax.training.waiting import is_busy, telling
from liger_jax.user_errors import UserError, counted

_PATHS = ("model", "adapters", "teacher", "data", "eval_data")  # settings that name files and folders
GROWING = ("steps", "epochs")  # settings that may be larger when a run is resumed


def made_of(run: Run, inputs: TrainingInputs) -> dict[str, str]:
    """Texts that identify a run's model, teacher and data."""
    teacher = {} if run.task.teacher is None else run.task.teacher.made_of()
    return inputs.data.made_of() | _model_files(run.settings, run.source) | teacher


def checkpoints_of(run: Run, made_of: Mapping[str, Any]) -> Checkpoints:
    """The checkpoints of a run, from which no other run can be resumed."""
    settings = run.settings
    out = Path(settings.folder.out)
    spared = [set(result.of_earlier_runs(out, each)) for each in adapters.tuned(settings.adapters, run.source)]
    earlier = sorted(set.intersection(*spared))
    folder, of_folder = out / result.CHECKPOINTS, settings.folder
    options: dict[str, Any] = dict(fresh=of_folder.fresh, earlier=earlier, keep=of_folder.keep, growing=GROWING)
    values = settings.of_the_run() | dict(made_of)
    before = Checkpoints(folder, values, **options).latest_settings
    values |= mesh_choice.to_store(settings, run.devices.sizes, before)
    values |= memory.choices_to_store(settings, before)
    checkpoints = Checkpoints(folder, values | _spelled_before(values, before), **options)
    if "reward" in before and REWARD_CALL not in before:
        raise UserError(
            f"{folder} holds a run whose rewards were called once for each prompt, with a field's own value. They are "
            "called as TRL calls them now, once a step with a list of each field. Look at your functions, and pass "
            "--fresh to start over, or another --out."
        )
    return checkpoints


def _spelled_before(values: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, str]:
    """The paths of a run that were spelled in another way when it began; digests compare their contents.

    >>> _spelled_before({"data": "./a//b.jsonl=2", "model": "./x"}, {"data": "a/b.jsonl=2", "model": "y"})
    {'data': 'a/b.jsonl=2'}
    """
    pairs = ((name, values.get(name), before.get(name)) for name in _PATHS)
    return {
        name: old
        for name, new, old in pairs
        if new != old and isinstance(new, str) and isinstance(old, str) and resolved(new) == resolved(old)
    }


def _model_files(settings: Settings, source: Source) -> dict[str, str]:
    """Digests of the files of the model that is tuned: weights, tokenizer, chat template, configs and adapters."""
    small = {name: (source.folder / name) for name in (CONFIG, GENERATION)}
    contents = {name: path.read_bytes() for name, path in small.items() if path.is_file()}
    contents |= adapters.files(settings.adapters)
    digests = identity.of_files(contents | source.tokenizer) | identity.of_weights(source.folder, source.weight_files)
    if settings.placement.verify:
        with telling(f"reading {disk.size(source.weight_bytes)} of weights to verify them"):
            digests |= identity.of_whole_weights(source.folder, source.weight_files)
    return digests


def is_finished(settings: Settings, checkpoints: Checkpoints, steps: int) -> bool:
    """Whether the result is there already, and says so if it is."""
    latest, finished = checkpoints.latest_step, checkpoints.finished
    early = result.ended_early(settings, finished)
    if not ((latest == steps or early) and result.is_there(settings, finished)):
        return False
    why = "where --patience ended it" if early else "the last one"
    cure = "Another --patience goes" if early else "More --steps or --epochs go"
    print(
        f"finished: {result.folder(settings)} is there since step {latest}, {why}; nothing is changed. {cure} on "
        "from it"
    )
    return True


def check_kept(step: int, checkpoints: Checkpoints) -> None:
    """Refuses to make the result of a step that has no checkpoint."""
    if step not in (kept := checkpoints.kept_steps):
        there = f"those of {', '.join(map(str, kept))} are" if kept else "none is"
        raise UserError(f"--result-of={step}: this step's checkpoint is not kept; {there}. --keep keeps more of them.")


def restored(checkpoints: Checkpoints, state: Any, inputs: TrainingInputs) -> tuple[Any, dict[str, Any]]:
    """The state and the log to go on with, and lines about what a longer run changes.

    Returns the newest checkpoint's, or those of a run that begins.
    """
    before = checkpoints.latest_settings
    step = checkpoints.latest_step
    meanwhile = ", while the step is compiled" if is_busy() else ""  # which a small program of reading may wait for
    with contextlib.nullcontext() if step is None else telling(f"reading the checkpoint of step {step}{meanwhile}"):
        start = checkpoints.restore(state) or (state, {"steps": []})
    if step is not None:
        print(f"resumed at step {step}")
    of_steps = start[1]["steps"]
    last = of_steps[-1].get("learning_rate") if of_steps else None
    for line in longer_run(before, len(of_steps), last, inputs.steps, inputs.rate, inputs.data.num_in_epoch):
        print(line)
    return start


def shapes(state: Any) -> Any:
    """The shapes by which a checkpoint is read, so that the state can be freed first: two states need not fit."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def longer_run(
    before: Mapping[str, Any], done: int, last_rate: float | None, steps: int, rate: Callable[[int], Any], rows: int
) -> list[str]:
    """What a run says that goes on for longer than it was to.

    >>> (line,) = longer_run({"steps": 10, "epochs": None, "batch": 2}, 10, 0.1, 20, lambda step: 0.5, 100)
    >>> print(line[:93])
    goes on from step 10 to 20, where it was to end at 10: the learning rate follows the schedule
    """
    if not done or before.get("steps", steps) >= steps:
        return []
    after = "" if last_rate is None else f" after {last_rate:.1e}"
    lines = [
        f"goes on from step {done} to {steps}, where it was to end at {before['steps']}: the learning rate follows the "
        f"schedule of {steps} steps from here on, with {float(rate(done)):.1e}{after}"
    ]
    if skipped := _skipped(before, done, rows):
        lines.append(f"{counted(skipped, 'row')} left out, once: the epoch was cut off within a batch")
    return lines


def _skipped(before: Mapping[str, Any], done: int, rows: int) -> int:
    """How many rows the last step left out, since the run was to end within an epoch; the next step is full."""
    epochs, batch = before.get("epochs"), before.get("batch", 1)
    if epochs is None or done < before["steps"]:
        return 0
    rest = max(1, round(epochs * rows)) % rows
    return min(math.ceil(rest / batch) * batch, rows) - rest
