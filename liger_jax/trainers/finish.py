"""The end of a training run: which step its result is of, what stays in its folder, and its last printed lines."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from liger_jax.trainers import adapters, result
from liger_jax.trainers.decided_run import Run
from liger_jax.trainers.options import Settings
from liger_jax.trainers.task import Task
from liger_jax.training import Checkpoints
from liger_jax.training.loop import figure
from liger_jax.user_errors import UserError, counted


def check_learned(run: Run, log: list[dict[str, Any]]) -> None:
    """Refuses to write a result for a run in which no reward was a number."""
    if all(math.isnan(row[run.task.main_figure]) for row in log):
        raise UserError(
            "No completion of the run has a reward: the functions answered each with None. So nothing was learned, and "
            "no model is written. Let them return numbers, and pass --fresh."
        )


def best_state(like: Any, steps: int, checkpoints: Checkpoints) -> tuple[Any, int]:
    """Takes the state with the least held-out loss of a run that ended early, and says so.

    `checkpoints`: those of the run, of which one was scored at least.
    """
    assert checkpoints.best is not None and checkpoints.latest_step is not None
    step, last = checkpoints.best[0], checkpoints.latest_step
    print(f"stopped after step {last} of {steps}: step {step} had the least held-out loss, and is taken")
    return checkpoints.read(step, like)[0], step


def record_result(settings: Settings, checkpoints: Checkpoints, target: Path, early: bool) -> None:
    """Records that the result was written, and removes what an earlier run has left."""
    checkpoints.finish(target.name, result.record(settings, target, early))
    result.clear(settings, checkpoints.earlier)
    checkpoints.forget_earlier()


def learned(task: Task, log: Mapping[str, Any], done: int) -> str:
    """What a run of `done` steps has changed, in words: held-out scores before and after it, or where there are none
    the mean of a figure of the steps in its first and in its last tenth. `log`: as `Loop` leaves it.
    """
    steps = log["steps"][:done]
    before, after = log.get("before", {}), steps[-1]
    if names := [name for name in task.compared if name in after] or [
        name for name in task.scored[:1] if name in after
    ]:
        first = {name: before[name] for name in names if name in before and name not in task.only_after}
        each = (
            f"{name.removeprefix('eval_')} {f'{figure(first[name])} → ' if name in first else ''}{figure(after[name])}"
            for name in names
        )
        return f"{counted(done, 'step')}; held out: {', '.join(each)}"
    name, tenth = task.main_figure, max(1, done // 10)
    means = [figure(_mean([row[name] for row in some])) for some in (steps[:tenth], steps[-tenth:])]
    of = "of the first and the last step" if tenth == 1 else f"means of the first and the last {tenth} steps"
    change = f"{name} {' → '.join(means)}, {of}" if done > 1 else f"{name} {means[0]}"
    return f"{counted(done, 'step')}; {change}"


def _mean(values: Sequence[float]) -> float:
    there = [value for value in values if not math.isnan(value)]
    return statistics.fmean(there) if there else math.nan


def print_result(run: Run, log: Mapping[str, Any], done: int, target: Path, checkpoints: Checkpoints) -> None:
    """Prints what a run has changed, and where its result is."""
    is_kept, best = run.settings.folder.is_kept, checkpoints.best
    print(learned(run.task, log, done) + (f"; {target.name} in {target}" if is_kept else ""))
    if best is not None and best[0] != done and is_kept:
        there = run.out / result.CHECKPOINTS / str(best[0])
        without = " without --fresh and" if run.settings.folder.fresh else ""
        print(
            f"{target.name} is of step {done}, the last one; by held-out loss the best is step {best[0]}, "
            f"with {figure(best[1])}, whose checkpoint stays in {there}; the same command{without} with "
            f"--result-of {best[0]} makes {target.name}-{best[0]} of it"
        )
    others = [place for place in result.places(run.out) if place.is_dir()] if is_kept else []
    for other in others:
        tuned = adapters.tuned(run.settings.adapters, run.source)
        if other.name not in checkpoints.finished and not any(map(other.samefile, tuned)):
            option = "--merge" if other.name == result.MODEL else "--no-merge"
            print(f"{other} is of an earlier step: the same command with {option} writes that of step {done} there")
