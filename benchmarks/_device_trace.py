"""How much of a device's time a profile shows in collectives, and how much of that nothing hides."""

import glob
import pathlib
import tempfile
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

Interval = tuple[float, float]


class Share(NamedTuple):
    """Shares of the time from a profile's first kernel to its last."""

    sending: float  # the time in which a collective runs
    exposed: float  # the time of it in which no other kernel runs
    idle: float  # the time in which nothing runs


def shares(kernels: Iterable[tuple[str, float, float]]) -> Share:
    """The shares of a device's kernels.

    `kernels`: name, start and end of each, in any order; NCCL's begin with "nccl".

    >>> shares([("ncclDevKernel_AllGather", 0, 4), ("gemm", 2, 8), ("ncclDevKernel_AllReduce", 9, 10)])
    Share(sending=0.5, exposed=0.3, idle=0.1)
    """
    kernels = list(kernels)
    sending = _union((start, end) for name, start, end in kernels if name.lower().startswith("nccl"))
    computing = _union((start, end) for name, start, end in kernels if not name.lower().startswith("nccl"))
    both = _union([*sending, *computing])
    whole = both[-1][1] - both[0][0]
    exposed = _length(both) - _length(computing)
    return Share(_length(sending) / whole, exposed / whole, 1 - _length(both) / whole)


def profiled(run: Callable[[], Any]) -> list[Share]:
    """The shares of each of this process's GPUs while `run` runs and its result comes.

    `run`: queues some steps. Returns one for each GPU that the profile knows.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        (path,) = glob.glob(str(pathlib.Path(folder) / "**" / "*.xplane.pb"), recursive=True)
        planes = jax.profiler.ProfileData.from_file(path).planes
        result = []
        for plane in planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            streams = [line for line in plane.lines if line.name.startswith("Stream")]
            events = [(e.name, e.start_ns, e.start_ns + e.duration_ns) for line in streams for e in line.events]
            if kernels := [event for event in events if not event[0].startswith(("Memcpy", "Memset"))]:
                result.append(shares(kernels))
        return result


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times without overlaps, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def _length(intervals: list[Interval]) -> float:
    return sum(end - start for start, end in intervals)
