"""The mesh of a run that names none: the weights whole on each device, or split over fsdp, as is fastest and fits.

Experts of a mixture that would be split over fsdp are split over an axis of experts where that sends far less.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from liger_jax.planner import choosing, devices
from liger_jax.planner.architectures import Architecture
from liger_jax.planner.links import Links, exchange_seconds, link_seconds, links
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
# What tokens that are exchanged may take of the time in which experts are gathered and scattered. Products hide most of
# the latter and little of the former, and routers may prefer the experts of one device. On two H200s of one host, by
# counted bytes, 0.07 was 0.80 of the time of a step over fsdp, and 0.28 was 0.99. More devices have not been timed:
# theirs is a smaller share, since one of them has more often the most rows.
_EXCHANGE, _EXCHANGE_OF_MORE = 0.2, 0.15


def by_time(
    settings: Settings,
    model: Architecture,
    precision: Mapping[str, str],
    there: Sequence[Any],
    teacher: Callable[[Sizes], TeacherMemory] = lambda sizes: TeacherMemory(),
    samples: bool = False,
) -> Callable[[list[Sizes]], tuple[int, str]]:
    """A function that chooses one of several meshes of equally many devices, the most split one first.

    It returns the index and the reason. A run that is resumed keeps the mesh that it began with, if that is among them.
    `teacher`: what a second model needs on a mesh. `samples`: whether the run samples completions, for each token of
    which weights that are split are gathered.
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
        ways: list[Run | None] = []
        for run, sizes in zip(runs, meshes, strict=True):
            its = teacher(sizes)
            choice = choosing.chosen(run, **memory.left_open(settings), needs=lambda run, its=its: max(its.needs(run)))
            ways.append(None if choice is None else choice.run)
        # What layers compute again, since they keep less on one mesh than on another, counts beside what is sent.
        split = sum(sizes["expert"] == 1 for sizes in meshes)  # the meshes without an axis of experts, which are first
        least = min((_computed(way) for way in ways[:split] if way), default=0.0)
        seconds = [speed(way or run, between).seconds - least for way, run in zip(ways, runs, strict=True)]
        index, reason = least_split(ways[:split]) if samples else fastest(ways[:split], seconds, words)
        # An axis of experts was timed on GPUs of one host. Devices that sample gather weights, whatever splits them.
        may_exchange = split < len(ways) and not samples and jax.process_count() == 1 and device.platform != "tpu"
        if may_exchange and keeps_experts(ways[index], ways[split], seconds[index], seconds[split], between):
            took = f"{1e3 * seconds[split]:.3g} ms of a step to send tokens in place of experts, to send and update"
            return split, f"{took} weights, and to compute again, where {words[index]} takes {1e3 * seconds[index]:.3g}"
        agreed = -processes.most(-index)  # the most split one that any process's devices need
        return agreed, reason if agreed == index else "what fits the devices of all processes"

    return choose


def least_split(ways: Sequence[Run | None]) -> tuple[int, str]:
    """The index of the least split way that fits, and the reason; of the first one where none does."""
    best = max((i for i, way in enumerate(ways) if way is not None), default=0)
    if best == len(ways) - 1:
        return best, "each device samples with whole weights"
    return best, "since the weights do not fit whole on each device"


def fastest(ways: Sequence[Run | None], seconds: Sequence[float], words: Sequence[str]) -> tuple[int, str]:
    """The index of the fastest way that fits, and the reason; of the first one, which needs least, where none does.

    `ways`: the run on each mesh, and `None` where it does not fit there.
    """
    fitting = [i for i, way in enumerate(ways) if way is not None]
    best = min(fitting, key=lambda i: seconds[i] / (_PAYS if i else 1), default=0)
    if best == 0 and ways[-1] is None:
        return 0, "since the weights do not fit whole on each device"
    other = 0 if best else len(ways) - 1
    took = f"{1e3 * seconds[best]:.3g} ms of a step to send and update weights, and to compute again"
    if ways[other] is None:
        return best, f"{took}, and {words[other]} does not fit"
    return best, f"{took}, where {words[other]} takes {1e3 * seconds[other]:.3g}"


def keeps_experts(other: Run | None, ours: Run | None, its_seconds: float, seconds: float, between: Links) -> bool:
    """Whether experts stay on the devices of their axis, and tokens are sent.

    `other`: the run on the mesh without such an axis, `ours`: with it, and what of a step's time depends on the mesh;
    `None` where the run does not fit. What is sent and computed more must be a small share of what is saved.
    """
    if other is None or ours is None:
        return False
    more = exchange_seconds(ours, between) + max(0.0, _computed(ours) - _computed(other))
    share = _EXCHANGE if ours.expert == 2 else _EXCHANGE_OF_MORE
    return more <= share * (its_seconds - (seconds - more))


def _computed(run: Run) -> float:
    """Seconds of a step in which nothing is sent or updated."""
    return speed(run, NO_LINKS).seconds - link_seconds(run, NO_LINKS)


def to_store(settings: Settings, sizes: Sizes, before: Mapping[str, Any]) -> dict[str, str]:
    """The mesh as checkpoints have it: that of the run's begin, whatever it was resumed on."""
    if before and not settings.folder.fresh:
        return {name: before[name] for name in (NAME,) if name in before}
    return {NAME: _in_words(sizes)}


def _in_words(sizes: Sizes) -> str:
    return in_words({name: size for name, size in sizes.items() if size > 1}) or "one"
