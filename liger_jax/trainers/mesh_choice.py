"""The mesh of a run that names none: the weights whole on each device, or split over fsdp or expert, as is fastest and
fits.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from liger_jax.planner import choosing, devices
from liger_jax.planner.architectures import Architecture
from liger_jax.planner.links import Links, link_seconds, links
from liger_jax.planner.speed import speed
from liger_jax.planner.step import Run
from liger_jax.trainers import memory
from liger_jax.trainers.memory import TeacherMemory
from liger_jax.trainers.options import Settings
from liger_jax.training import processes
from liger_jax.training.meshes import AUTO, in_words

NAME = "mesh"  # of the choice among a checkpoint's settings
Sizes = Mapping[str, int]
NO_LINKS = Links(math.inf, math.inf, math.inf)
_PAYS = 0.9  # what weights that are less split must take of the time, since they leave less memory for a step
# What an expert axis must take of it: much of what fsdp sends is hidden, and little of what this sends. On two H200 a
# step of OLMoE took 0.80 of the time at 0.22, and 0.99 at 0.39.
_EXPERTS_PAY = 0.35


def by_time(
    settings: Settings,
    model: Architecture,
    precision: Mapping[str, str],
    there: Sequence[Any],
    teacher: Callable[[Sizes], TeacherMemory] = lambda sizes: TeacherMemory(),
    samples: bool = False,
) -> Callable[[list[Sizes]], tuple[int, str]]:
    """A function that chooses one of several meshes of equally many devices, the most split one first.

    It returns the index and the reason. An expert axis is looked at for a mixture. A run that is resumed keeps the
    mesh that it began with, if that is among them. `teacher`: what a second model needs on a mesh. `samples`: whether
    the run samples completions, for each token of which weights that are split are gathered.
    """

    def choose(meshes: list[Sizes]) -> tuple[int, str]:
        words = [_in_words(sizes) for sizes in meshes]
        if settings.placement.mesh != AUTO and (began := memory.stored(settings)) is not None:
            begun = began.get(NAME, words[0])  # before choices were stored, all devices were along fsdp
            if begun in words:
                return words.index(begun), "as when the run began"
        device = devices.here()
        if device is None:
            return 0, "since JAX does not say how much memory a device has"
        if device.platform == "cpu":  # its devices share the machine's memory
            device = dataclasses.replace(device, capacity_bytes=device.capacity_bytes // jax.local_device_count())
        runs = [memory.planned(settings, model, device, sizes, **precision) for sizes in meshes]
        between = NO_LINKS if samples else links(there[: math.prod(meshes[0].values())])
        ways = []
        for run, sizes in zip(runs, meshes, strict=True):
            its = teacher(sizes)
            choice = choosing.chosen(run, **memory.left_open(settings), needs=lambda run, its=its: max(its.needs(run)))
            ways.append(None if choice is None else choice.run)
        # What layers compute again, since they keep less on one mesh than on another, counts beside what is sent.
        least = min((speed(way, NO_LINKS).seconds - link_seconds(way, NO_LINKS) for way in ways if way), default=0.0)
        seconds = [speed(way or run, between).seconds - least for way, run in zip(ways, runs, strict=True)]
        pays = [1.0, *(_EXPERTS_PAY if sizes["expert"] > 1 else _PAYS for sizes in meshes[1:])]
        index, reason = least_split(ways) if samples else fastest(ways, seconds, words, pays)
        agreed = -processes.most(-index)  # the most split one that any process's devices need
        return agreed, reason if agreed == index else "what fits the devices of all processes"

    return choose


def least_split(ways: Sequence[Run | None]) -> tuple[int, str]:
    """The index of the least split way that fits, and the reason; of the first one where none does."""
    best = max((i for i, way in enumerate(ways) if way is not None), default=0)
    if best == len(ways) - 1:
        return best, "each device samples with whole weights"
    return best, "since the weights do not fit whole on each device"


def fastest(
    ways: Sequence[Run | None], seconds: Sequence[float], words: Sequence[str], pays: Sequence[float]
) -> tuple[int, str]:
    """The index of the fastest way that fits, and the reason; of the first one, which needs least, where none does.

    `ways`: the run on each mesh, and `None` where it does not fit there. `pays`: what each must take of the time.
    """
    fitting = [i for i, way in enumerate(ways) if way is not None]
    best = min(fitting, key=lambda i: seconds[i] / pays[i], default=0)
    if best == 0 and ways[-1] is None:
        return 0, "since the weights do not fit whole on each device"
    other = 0 if best else len(ways) - 1
    took = f"{1e3 * seconds[best]:.3g} ms of a step to send and update weights, and to compute again"
    if ways[other] is None:
        return best, f"{took}, and {words[other]} does not fit"
    return best, f"{took}, where {words[other]} takes {1e3 * seconds[other]:.3g}"


def to_store(settings: Settings, sizes: Sizes, before: Mapping[str, Any]) -> dict[str, str]:
    """The mesh as checkpoints have it: that of the run's begin, whatever it was resumed on."""
    if before and not settings.folder.fresh:
        return {name: before[name] for name in (NAME,) if name in before}
    return {NAME: _in_words(sizes)}


def _in_words(sizes: Sizes) -> str:
    return in_words({name: size for name, size in sizes.items() if size > 1}) or "one"
