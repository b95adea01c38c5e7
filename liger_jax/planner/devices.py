"""Accelerators that need not be there: how many of them, and the memory that a training step may take of each."""

import dataclasses
import math
import os
import pathlib
import re

import jax
from jax.sharding import AbstractDevice

from liger_jax.pallas_kernels.devices import AMPERE, GIB, GPUS, TPUS
from liger_jax.planner import device_names
from liger_jax.planner.device_names import ANY_GPU
from liger_jax.training.errors import PINNED_GIB as PINNED_GIB
from liger_jax.training.errors import PINNED_LIMIT as PINNED_LIMIT

GPUS_PER_HOST, CHIPS_PER_HOST = 8, 4

# Memory that a process needs outside the allocator. CUDA's context and the code of cuBLAS, cuDNN and the program take
# 0.61 GiB on an H100 (JAX 0.11.2, CUDA 13, 2026-11-24). Where devices exchange gradients, NCCL has buffers, which are
# not measured.
CONTEXT_BYTES, NCCL_BYTES = int(0.7 * GIB), GIB
# The share of a GPU's memory that is left outside the allocator beside that, for programs that are captured as graphs
# and for other processes, such as a desktop's, that grow a little.
MARGIN = 0.01
# The share of the allocator's memory that is left free, for fragmentation and for what earlier programs left. 29
# steps ran on an H200: some held 2 % more than their compiler had said, none more (benchmarks/results/planner.md).
RESERVE = 0.02
NEAR = 0.1  # of the memory: estimates were as far from the compiler, one way or the other
LITTLE = 0.03  # of the memory, below which a step that fits is said to fit by a hair
MOST_GPUS = 4096


@dataclasses.dataclass(frozen=True)
class Target:
    """Equal devices, on one host or several."""

    name: str  # as it was asked for, such as "h200:8" or "v5e:8x8"
    platform: str  # "gpu" or "tpu"
    kind: str  # the device's own name
    count: int  # devices
    memory_bytes: int  # the whole memory of each device
    topology: str  # as the compiler's plugin names it
    visible_bytes: int  # what CUDA counts of a GPU's memory; all of a TPU's
    # The memory that a training step may need on each device. On a GPU it is what `allocatable` says of an empty card,
    # less `RESERVE`. On a TPU it is all that libtpu lets a program have.
    capacity_bytes: int
    given_bytes: int | None = None  # the memory of a GPU where the run says it; `None` where the table does

    @property
    def fraction(self) -> float | None:
        """The share of a GPU's memory that JAX's allocator can have on an empty card; `None` on a TPU."""
        if self.platform != "gpu":
            return None
        most = allocatable(self.visible_bytes, self.visible_bytes, self.count)
        return math.floor(1000 * most / self.visible_bytes) / 1000

    def more(self) -> "Target | None":
        """The next larger number of the same devices."""
        kind, _, size = self.name.partition(":")
        if kind in GPUS or self.given_bytes:
            count = 1 << self.count.bit_length()  # the next power of two
            return _gpus(kind, str(count), self.given_bytes) if count <= MOST_GPUS else None
        if kind not in TPUS:  # `here` may name a device that is not in the tables
            return None
        if not size:
            return target(f"{kind}:{self.topology}")
        axes = [int(axis) for axis in size.split("x")]
        last_of_smallest = max(i for i, axis in enumerate(axes) if axis == min(axes))
        axes[last_of_smallest] *= 2
        return target(f"{kind}:{'x'.join(map(str, axes))}") if math.prod(axes) <= TPUS[kind].most_chips else None

    @property
    def count_on_host(self) -> int:
        """How many of the devices one host has, at most."""
        return min(self.count, GPUS_PER_HOST if self.platform == "gpu" else CHIPS_PER_HOST)

    @property
    def capability(self) -> tuple[int, int]:
        """A GPU's compute capability, which is taken for Ampere's where it is unknown; (0, 0) for a TPU."""
        gpu = GPUS.get(self.name.partition(":")[0])
        return gpu.capability if gpu else AMPERE if self.given_bytes else (0, 0)

    @property
    def description(self) -> AbstractDevice:
        """What ops know of the device for which they are traced."""
        return AbstractDevice(self.kind, None, self.platform)


def target(name: str | None = None, memory: str | None = None) -> Target:
    """Devices by name: "h200", "RTX 4090", "h200:8", "8xh100", "v5e" (one device), "v5e:8x8", "v5p:4x4x4".

    Args:
        name: one of `GPUS`, or a similar spelling, perhaps with the number of them; one of `TPUS`, perhaps with a
            topology of chips; or "gpu" or `None` for a GPU of which only the memory is known, which is assumed to be of
            the Ampere generation.
        memory: the memory of each GPU, such as "24GiB", as the driver reports it; `None` for that of the table.

    Returns:
        The target; no plugin is needed yet.

    Raises:
        ValueError: there is no such device, or no such number or topology of them.

    Example:
        >>> target("h200:32").topology, target("v5p:4x4x4").count, target("3090").name, target(memory="24GiB").name
        ('1x4x8', 64, 'rtx3090', 'gpu')
    """
    if name is None and memory is None:
        raise ValueError("device=None: name one, such as device='rtx4090', or pass its memory, such as memory='24GiB'.")
    given = None if memory is None else device_names.memory_in_bytes(memory)
    kind, size = (ANY_GPU, "") if name is None else device_names.known_as(name)
    if kind == ANY_GPU and given is None:
        raise ValueError(f"device={name!r}: pass its memory, such as memory='24GiB'.")
    if kind not in TPUS:
        return _gpus(kind, size, given)
    if given is not None:
        raise ValueError(f"memory={memory!r}: a TPU has {TPUS[kind].memory_bytes / GIB:.2f} GiB. Leave memory out.")
    return _tpus(kind, size)


def here() -> Target | None:
    """The device that JAX finds here, with the memory that JAX may take: for a CPU its machine's."""
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit") if device.platform != "cpu" else machine_memory()
    if not limit:
        return None
    known = [name for name, row in {**GPUS, **TPUS}.items() if row.kind == device.device_kind]
    name = known[0] if len(known) == 1 else device.platform  # cards of one name may differ in memory
    return Target(name, device.platform, device.device_kind, 1, limit, "", limit, int(limit * (1 - RESERVE)))


def allocatable(free: int, visible: int, count: int) -> int:
    """What JAX's allocator may take of a GPU: what is free, less the context, the margin and several GPUs' NCCL.

    Args:
        free: bytes that no other process has.
        visible: bytes that CUDA counts of the GPU.
        count: the GPUs of the run.

    Returns:
        Bytes.
    """
    return max(0, free - CONTEXT_BYTES - int(MARGIN * visible) - (NCCL_BYTES if count > 1 else 0))


def visible_bytes(kind: str, memory: int) -> int:
    """What CUDA counts of a GPU's memory.

    Args:
        kind: the GPU's own name.
        memory: its bytes as the driver reports them.

    Returns:
        Bytes by the table, or else all of them.
    """
    known = [gpu for gpu in GPUS.values() if gpu.kind == kind and abs(gpu.memory_bytes - memory) < 0.02 * memory]
    return int(known[0].visible_gib * GIB) if known else memory


def pinned_limit(needed: int) -> int | None:
    """What XLA's pool of pinned memory must be allowed for a run.

    Returns GiB, a tenth more than needed, because the pool is cut in pieces; `None` where its default is enough.
    """
    limit = math.ceil(1.1 * needed / GIB)
    return limit if limit > PINNED_GIB else None


def machine_memory() -> int | None:
    """The memory that this process may have of its machine, or of its container."""
    try:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on Windows
        return None
    try:
        limit = pathlib.Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return whole
    return min(whole, int(limit)) if limit.isdecimal() else whole


def _gpus(kind: str, size: str, given: int | None = None) -> Target:
    count = int(size or 1) if not size or size.isdecimal() else 0
    if count < 1 or count > GPUS_PER_HOST and count % GPUS_PER_HOST:
        raise ValueError(
            f"device='{kind}:{size}' must have a number of GPUs from 1 to {GPUS_PER_HOST}, or a multiple of "
            f"{GPUS_PER_HOST}, which one host has."
        )
    hosts = max(1, count // GPUS_PER_HOST)
    name = kind if count == 1 else f"{kind}:{count}"
    gpu = GPUS.get(kind)
    memory = given or (gpu.memory_bytes if gpu else 0)
    visible = int(memory - _unseen(memory)) if given or gpu is None else int(gpu.visible_gib * GIB)
    device_kind = gpu.kind if gpu else f"GPU of {memory / GIB:.1f} GiB"
    capacity = int(allocatable(visible, visible, count) * (1 - RESERVE))
    return Target(name, "gpu", device_kind, count, memory, f"1x{hosts}x{count // hosts}", visible, capacity, given)


def _unseen(memory_bytes: int) -> float:
    """What the driver reports and CUDA does not count, at most: no row of `GPUS` has more of it."""
    return 0.45 * GIB + 0.007 * memory_bytes


def _tpus(kind: str, size: str) -> Target:
    tpu = TPUS[kind]
    memory = tpu.memory_bytes
    if not size:
        return Target(kind, "tpu", tpu.kind, 1, memory, tpu.smallest, memory, memory)
    axes = [int(axis) for axis in size.split("x")] if re.fullmatch(r"\d+(x\d+)+", size) else []
    of_host = [int(axis) for axis in tpu.smallest.split("x")]
    if len(axes) != len(of_host) or any(a < 1 or a % h for a, h in zip(axes, of_host, strict=True)):
        raise ValueError(
            f"device='{kind}:{size}' must be a topology of {len(of_host)} axes that {tpu.smallest}, a host's "
            f"{CHIPS_PER_HOST} chips, divides, such as '{kind}:{'x'.join(str(4 * h) for h in of_host)}'; "
            f"'{kind}' alone is one device."
        )
    if math.prod(axes) > tpu.most_chips:
        raise ValueError(f"device='{kind}:{size}' has {math.prod(axes)} chips, and a pod has {tpu.most_chips}.")
    count = math.prod(axes) * tpu.devices_per_chip
    return Target(f"{kind}:{size}", "tpu", tpu.kind, count, memory, size, memory, memory)
