"""Where a computation is meant to run: the device, its memory, and whether its mesh lets a kernel run.

The device need not be attached. Its known properties decide which kernel runs. An op makes its `Place` once.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractDevice

from liger_jax.ops.meshes import OF_MODELS
from liger_jax.pallas_kernels.devices import HOPPER, Capability, capability_of, gpu_named

_GPU_PLATFORMS = ("gpu", "cuda", "rocm")
_SECONDS_TO_TELL = 300  # seconds, since processes may read their checkpoints at different speeds


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a computation is meant to run."""

    device: AbstractDevice
    memory_bytes: int | None = None  # of the device; None if it was not asked for, or is unknown
    mesh_refusal: str | None = None  # why a mesh forbids what the compiler cannot partition; None if it does not

    @property
    def platform(self) -> str:
        """ "cpu", "gpu" or "tpu"."""
        return self.device.platform

    @property
    def capability(self) -> Capability:
        """The compute capability of a GPU; (0, 0) on another platform.

        A GPU of this process reports its own. One that is known by its name alone, for which a program is compiled
        ahead of time, is looked up.
        """
        if self.platform != "gpu":
            return (0, 0)
        return _told_capabilities().get(self.device.device_kind) or capability_of(self.device.device_kind)

    @property
    def is_hopper(self) -> bool:
        """Whether the device has Hopper's matrix instructions, which neither older nor newer GPUs have."""
        return self.capability[0] == HOPPER[0]

    @property
    def is_h100(self) -> bool:
        """Whether the device is an H100 or an H800, whose memory is slower than an H200's: 3.35 TB/s, not 4.8."""
        gpu = gpu_named(self.device.device_kind)
        return gpu is not None and "H100" in gpu.kind


def place_of(
    *inputs: jax.Array | None, beside: Iterable[jax.Array | None] = (), memory_is_needed: bool = False
) -> Place:
    """Where a computation on `inputs` is meant to run.

    `*inputs`: arrays or tracers, from which `device_of` finds the device; `None` entries are passed over. `beside`:
    more of them, which do not decide the device, but may be sharded over a mesh. `memory_is_needed`: whether to ask for
    the device's memory, about which processes may have to talk.
    """
    device = device_of(*inputs)
    memory_bytes = _memory_of(device) if memory_is_needed else None
    return Place(device, memory_bytes, _mesh_refusal(x for x in (*inputs, *beside) if isinstance(x, jax.Array)))


def _mesh_refusal(arrays: Iterable[jax.Array]) -> str | None:
    """The reason why a computation that the compiler cannot partition cannot run on the meshes of these arrays.

    None if every axis of a mesh is Manual or has one device.
    """
    for mesh in {jax.typeof(x).sharding.mesh for x in arrays}:
        if mesh.explicit_axes or mesh.size > 1 and mesh.auto_axes:
            return (
                f"it is not partitioned over the mesh axes {mesh.axis_names}; "
                f"call it inside jax.shard_map, which makes every axis Manual. {OF_MODELS}"
            )
    return None


def device_of(*inputs: jax.Array | None) -> AbstractDevice:
    """Says for which device a computation on `inputs` is meant.

    In this order: the device that holds a concrete input, the mesh in an input's type, the mesh in context,
    `jax_default_device`, the default backend. A mesh knows its devices even where they are absent, so that programs
    can be compiled ahead of time.
    """
    arrays = [x for x in inputs if x is not None]
    for x in arrays:
        if not isinstance(x, Tracer) and isinstance(x, jax.Array):
            return described(next(iter(x.devices())))
    meshes = [jax.typeof(x).sharding.mesh for x in arrays] + [jax.sharding.get_abstract_mesh()]
    for mesh in meshes:
        if mesh.abstract_device is not None:
            device = mesh.abstract_device
            return AbstractDevice(device.device_kind, device.num_cores, _platform(device.platform))
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]  # made at run time
    if isinstance(default, jax.Device):
        return described(default)
    platform = default if isinstance(default, str) else jax.default_backend()
    return described(jax.local_devices(backend=platform)[0])


def described(device: Any) -> AbstractDevice:
    """The kind and the platform of a device, which is what programs can know of it."""
    return AbstractDevice(device.device_kind, None, _platform(device.platform))


def _memory_of(device: AbstractDevice) -> int | None:
    """The memory of a device in bytes, or None if it is absent or unknown.

    If several processes run one program, all must make the same plan: it is the least memory of them all.
    """
    own = _memory_here(device.device_kind)
    return own if own is None or jax.process_count() == 1 else _least_memory(device.device_kind, own)


def _memory_here(kind: str) -> int | None:
    try:
        limits = [(d.memory_stats() or {}).get("bytes_limit") for d in jax.local_devices() if d.device_kind == kind]
    except RuntimeError:
        return None
    return min((limit for limit in limits if limit), default=None)


@functools.cache
def _least_memory(kind: str, own: int) -> int:
    """The least of all processes' memories, which they report once, through JAX's coordination service.

    It is asked while a program is traced, where no collective of devices can run.
    """
    client = jax_service()
    if client is None:  # a TPU's hosts without `jax.distributed`: libtpu gives all of them the same
        return own
    client.key_value_set(f"liger_jax/bytes_limit/{kind}/{jax.process_index()}", str(own), True)
    limits = []
    for process in range(jax.process_count()):
        try:
            reported = client.blocking_key_value_get(f"liger_jax/bytes_limit/{kind}/{process}", 1000 * _SECONDS_TO_TELL)
        except RuntimeError as error:
            raise ValueError(
                f"mode='auto' plans by the least memory of all {jax.process_count()} processes, and process {process} "
                f"has not reported its own in {_SECONDS_TO_TELL} seconds. Trace the same loss in every process, or "
                "pass memory_budget_bytes, or a mode: then nothing is asked."
            ) from error
        limits.append(int(reported))
    return min(limits)


def jax_service() -> Any:
    """JAX's client of the service that `jax.distributed` starts; `None` where it has started none."""
    from jax._src import distributed  # JAX has no public way to it

    return distributed.global_state.client


def _platform(name: str) -> str:
    return "gpu" if name in _GPU_PLATFORMS else name


def _told_capabilities() -> dict[str, Capability]:
    """The capabilities that this process's GPUs report, by their names.

    Empty if JAX may not use GPUs. Asking would load the plugins of all platforms, a tenth of a second, for which a plan
    for absent devices would have to wait.
    """
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]  # made at run time
    if platforms and not set(_GPU_PLATFORMS) & set(platforms.split(",")):
        return {}
    try:
        gpus = jax.local_devices(backend="gpu")
    except RuntimeError:  # there is none
        return {}
    texts = {gpu.device_kind: getattr(gpu, "compute_capability", None) for gpu in gpus}
    return {kind: _parsed(text) for kind, text in texts.items() if re.fullmatch(r"\d+\.\d+", str(text))}


def _parsed(text: str) -> Capability:
    major, minor = map(int, text.split("."))
    return major, minor
