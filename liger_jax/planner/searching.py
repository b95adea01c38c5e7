"""The largest batch or sequence that fits, or the first mesh: by the compiler or by the estimate."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from liger_jax.planner import compilers
from liger_jax.planner.advice import largest
from liger_jax.planner.compilers import compile_run
from liger_jax.planner.estimate import estimate
from liger_jax.planner.mesh import meshes
from liger_jax.planner.planning import LEVELS, has_host_memory, make_run
from liger_jax.planner.step import Run
from liger_jax.training.meshes import in_words

SIZES = ("batch", "seq")
SEARCHES = (*SIZES, "mesh")
SEQ_UNIT = 128


@dataclasses.dataclass(frozen=True)
class Found:
    """The result of a search."""

    run: Run  # the largest run that fits, or the first mesh's
    answers: dict[Any, int]  # bytes by size, or by the mesh's text, for all that was asked


def search(
    run: Run,
    what: str,
    progress: Callable[[int, int, bool], None] = lambda size, needed, fits: None,
    level: str = "compiled",
    way: Callable[[Run], Run] = lambda run: run,
) -> Found:
    """The largest batch or sequence that fits.

    The search starts from the estimate's answer, continues in doubling steps, and ends with bisection. Batches are
    multiples of devices and micro-batches; sequences are multiples of 128, up to the model's longest. Arrays on the
    host must fit there too, if its memory is known.

    Args:
        run: the run, of which only the searched size is changed.
        what: "batch" or "seq".
        progress: called with each size, the bytes that it needs, and whether it fits.
        level: "compiled" or "estimate".
        way: what the planner makes of a run where its options leave something open.

    Returns:
        The largest run, and the results for all sizes that were tried.

    Raises:
        ValueError: `what` or `level` is unknown, or even the smallest size does not fit.
        ImportError: the compiler for these devices is not installed.
    """
    if what not in SIZES:
        raise ValueError(f"search={what!r} must be one of {SIZES}; `search_mesh` looks for a mesh.")
    bytes_of = _bytes_of(level, run.target.platform)
    unit = run.batch_unit if what == "batch" else SEQ_UNIT
    most = run.model.config.longest_sequence // SEQ_UNIT if what == "seq" else None
    if most == 0:
        longest = run.model.config.longest_sequence
        raise ValueError(
            f"{run.model.name} accepts {longest} positions, and the search tries multiples of {SEQ_UNIT}. "
            f"Pass seq={longest} instead of searching."
        )
    capacity = run.target.capacity_bytes
    sized = lambda n: way(dataclasses.replace(run, **{what: n * unit}))
    host = lambda n: estimate(sized(n)).host * run.target.count_on_host
    hosted = lambda n: run.host_memory is None or has_host_memory(run, host(n))
    if not hosted(1):
        raise ValueError(
            f"host_memory={run.host_memory / 2**30:.1f}GiB is too little for {what}={unit}. Keep less there, by "
            "another remat, or state_memory='device'."
        )
    answers: dict[int, int] = {}

    def fits(n: int) -> bool:
        if n * unit not in answers:
            answers[n * unit] = bytes_of(sized(n))
            progress(n * unit, answers[n * unit], answers[n * unit] <= capacity)
        return answers[n * unit] <= capacity

    def bounded(n: int) -> bool:
        return (most is None or n <= most) and hosted(n)

    low = max(1, largest(lambda n: bounded(n) and estimate(sized(n)).total <= capacity))
    step = max(1, low // 16)
    if fits(low):
        while bounded(low + step) and fits(low + step):
            low, step = low + step, 2 * step
        high = low + step
        if not bounded(high):
            high = 1 + largest(bounded)
    else:
        high = low
        while (low := max(0, high - step)) and not fits(low):
            high, step = low, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if low == 0:
        raise ValueError(
            f"Not even {what}={unit} fits into {run.target.name}: it needs {answers[unit] / 2**30:.1f} GiB, and "
            f"{capacity / 2**30:.1f} are available. The plan of {what}={unit} says what would make it fit."
        )
    return Found(sized(low), answers)


def runs_on_meshes(model: str | os.PathLike[str], *, device: str | None, **options: Any) -> list[Run]:
    """A run on each mesh that it can be sharded over, the mesh that sends least first.

    Returns the runs: fully sharded, then with tensor axes of 2, 4 and 8 devices; each with long rows split over as few
    devices as leave a row for all.
    """
    runs: list[Run] = []
    errors: list[ValueError] = []
    run = make_run(model, device=device, **options | dict(batch=None))
    for alike in meshes(run.target.count, run.seq):
        for sizes in alike:
            try:
                run = make_run(model, device=device, mesh=sizes, **options)
                estimate(run)  # which says what a mesh does not divide
            except ValueError as error:
                errors.append(error)
            else:
                runs.append(run)
                break
    if not runs:
        raise errors[0]
    return runs


def search_mesh(
    runs: list[Run],
    progress: Callable[[str, int, bool], None] = lambda mesh, needed, fits: None,
    level: str = "compiled",
) -> Found:
    """The first mesh on which a run fits."""
    bytes_of = _bytes_of(level, runs[0].target.platform)
    answers: dict[str, int] = {}
    for run in runs:
        needed, name = bytes_of(run), in_words(run.mesh)
        answers[name] = needed
        fits = needed <= run.target.capacity_bytes
        progress(name, needed, fits)
        if fits:
            return Found(run, answers)
    least = min(answers, key=lambda name: answers[name])
    raise ValueError(
        f"No mesh of {runs[0].target.name} holds the run: {least} needs the least, {answers[least] / 2**30:.1f} GiB, "
        f"and {runs[0].target.capacity_bytes / 2**30:.1f} are available. Its plan, --mesh {least}, says what would "
        "make it fit."
    )


def _bytes_of(level: str, platform: str) -> Callable[[Run], int]:
    """A function that returns the bytes that a run needs."""
    if level not in LEVELS:
        raise ValueError(f"level={level!r} must be one of {LEVELS}.")
    if level == "estimate":
        return lambda run: estimate(run).total
    compilers.need_compiler(platform)
    return lambda run: compile_run(run).total
