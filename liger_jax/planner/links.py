"""How fast devices send to each other, measured once, and what of a step's time depends on it."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from liger_jax.ops.layout import devices_along, names
from liger_jax.pallas_kernels.devices import GPUS, TPUS
from liger_jax.planner.estimate import QUANTIZED_BYTES, moment_bytes
from liger_jax.planner.step import Run
from liger_jax.training import processes, user_caches

_WHOLE_BYTES = 2**27  # of the array that is gathered, scattered and summed
_QUEUED, _TURNS = 3, 3
_GATHERS = 2  # of a layer's weights in a micro-batch, for the forward and for the backward
_TOKENS_GATHERED, _TOKENS_SCATTERED = 3, 2  # of a layer's tokens in a micro-batch, over an axis of experts
_BANDWIDTH = 1.5e12, 1.2e12, 20e9  # of memory, bytes a second: a GPU or TPU that is not in the tables, and a CPU


@dataclasses.dataclass(frozen=True)
class Links:
    """Bytes a second that each device sends while all of them do the same.

    Attributes:
        gather: each device gets the shards of all.
        scatter: each device gets its shard of the sum.
        exchange: each device gets the whole sum.
    """

    gather: float
    scatter: float
    exchange: float

    def __str__(self) -> str:
        each = (f"{name} {rate / 1e9:.3g}" for name, rate in dataclasses.asdict(self).items())
        return f"{', '.join(each)} GB/s"


ON_CPU = Links(10e9, 10e9, 10e9)  # simulated devices share one memory


def links(devices: Sequence[Any]) -> Links:
    """The links between devices, of which this process has some.

    The first call of all processes measures them, in about two seconds; a command keeps the figures in the user's
    folder for caches. All processes take those of the first one.
    """
    if devices[0].platform == "cpu":
        return ON_CPU
    path = user_caches.user_caches() / "links.json" if user_caches.are_used() else None
    key = f"{len(devices)} × {devices[0].device_kind} on {platform.node()}, {jax.process_count()} processes"
    kept = _read(path).get(f"{key}, jax {jax.__version__}") if path else None
    if (figures := processes.of_first(lambda: kept)) is None:
        own = _figures(tuple(devices))  # of all processes
        figures = processes.of_first(lambda: own)
    if path is not None and processes.is_first() and figures != kept:
        _write(path, _read(path) | {f"{key}, jax {jax.__version__}": figures})
    return Links(*figures)


@functools.cache
def _figures(devices: tuple[Any, ...]) -> list[float]:
    return [float(f"{rate:.3g}") for rate in dataclasses.astuple(measured(devices))]


def measured(devices: Sequence[Any]) -> Links:
    """Measures the links: seconds of collectives of 128 MiB.

    Args:
        devices: two or more, on which each process calls this.

    Returns:
        The links.
    """
    number = len(devices)
    mesh = Mesh(np.array(devices), ("all",), axis_types=(AxisType.Auto,))
    rows, width = NamedSharding(mesh, P("all")), max(1, _WHOLE_BYTES // (2 * number))
    shards = jax.jit(lambda: jnp.ones((number, width), jnp.bfloat16), out_shardings=rows)()

    def on_all(function: Callable[..., Any]) -> Any:
        specs: dict[str, Any] = dict(in_specs=P("all"), out_specs=P("all"))
        return jax.jit(jax.shard_map(function, mesh=mesh, check_vma=False, **specs))

    gather = on_all(lambda x: jax.lax.all_gather(x, "all", tiled=True))
    scatter = on_all(lambda x: jax.lax.psum_scatter(x, "all", tiled=True))
    exchange = on_all(lambda x: jax.lax.psum(x, "all"))
    whole = gather(shards)  # each device has all rows
    sent = 2 * width * (number - 1)
    return Links(sent / _seconds(gather, shards), sent / _seconds(scatter, whole), 2 * sent / _seconds(exchange, whole))


def link_seconds(run: Run, links: Links) -> float:
    """The part of a step's time that depends on how `data`, `fsdp` and `expert` split parameters.

    Weights are gathered and their gradients scattered over fsdp, gradients are summed over data, and the optimizer
    updates its shard of them. Experts stay on the devices of their axis, which exchange tokens. None of it is hidden
    behind products. Adapters are whole on every device of all meshes.

    Args:
        run: the run, with its mesh.
        links: of its devices.

    Returns:
        Seconds.
    """
    size = jnp.dtype(run.dtype).itemsize
    gathered = scattered = summed = updated = 0.0
    for info, x in run.model.parameters:
        number = math.prod(x.shape)
        axes = names(run.layout.spec(info, x.shape, run.mesh))
        split = devices_along([axis for axis in axes if axis in run.layout.fsdp_axes], run.mesh)
        copies = max(1, run.batch_devices // split)
        own = run.expert if info.expert_axis is not None else 1  # devices that have different experts, and gather none
        is_quantized = info.kind in ("kernel", "experts") and run.quantize is not None
        each = QUANTIZED_BYTES[run.quantize] if is_quantized and run.quantize else size
        sent = number * (1 / own - 1 / split)
        gathered += _GATHERS * each * sent
        if run.lora is None:
            scattered += size * sent
            summed += 2 * size * number / split * (1 - 1 / copies)
            updated += number / split
    seconds = gathered / links.gather + scattered / links.scatter + summed / links.exchange
    moved = 3 * jnp.dtype(run.param_dtype).itemsize + 2 * moment_bytes(run.optimizer, run.state_dtype)
    return run.micro_batches * seconds + exchange_seconds(run, links) + moved * updated / _bandwidth(run)


def exchange_seconds(run: Run, links: Links) -> float:
    """Seconds of a step in which the devices of an expert axis exchange tokens: 0 without such an axis.

    A layer gathers tokens, once more in the backward, and the gradients of their sums. It scatters the sums, and the
    tokens' gradients. All are in the computation's dtype.
    """
    layers = sum(x.shape[info.layer_axis] if info.stacked else 1 for info, x in run.model.parameters if _is_down(info))
    size = jnp.dtype(run.dtype).itemsize * run.tokens * run.model.config.hidden_size
    sent = (run.expert - 1) * size * (_TOKENS_GATHERED / links.gather + _TOKENS_SCATTERED / links.scatter)
    return run.micro_batches * layers * sent


def _is_down(info: Any) -> bool:
    return info.kind == "experts" and "down" in info.name


def _bandwidth(run: Run) -> float:
    name = run.target.name.partition(":")[0]
    gpu, tpu, cpu = _BANDWIDTH
    if run.target.platform == "tpu":
        return TPUS[name].bandwidth if name in TPUS else tpu
    if run.target.platform == "cpu":
        return cpu
    return GPUS[name].bandwidth if name in GPUS else gpu


def _seconds(function: Callable[..., Any], x: Any) -> float:
    """The least seconds of a call; all processes make equally many."""
    jax.block_until_ready(function(x))
    times = []
    for _ in range(_TURNS):
        begun = time.perf_counter()
        results = [function(x) for _ in range(_QUEUED)]
        jax.block_until_ready(results)
        times.append((time.perf_counter() - begun) / _QUEUED)
    return min(times)


def _read(path: Any) -> dict[str, list[float]]:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        numbers = lambda row: len(row) == 3 and all(isinstance(x, float) and 0 < x < math.inf for x in row)
        return {key: row for key, row in kept.items() if numbers(row)}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _write(path: Any, kept: dict[str, list[float]]) -> None:
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(kept, file, indent=1)
        os.replace(file.name, path)
