"""The device that a computation is meant for.

It need not be attached. What is known of it decides which kernel runs.
"""

import functools
import re
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractDevice

_GPU_PLATFORMS = ("gpu", "cuda", "rocm")
Capability = tuple[int, int]
_SECONDS_TO_TELL = 300  # processes may read their checkpoints at different speeds
AMPERE, HOPPER = (8, 0), (9, 0)
# A GPU that is absent cannot be asked, so the beginning of its name tells its capability. (7, 5) stands for all that is
# older than Ampere. A name that is not here is taken for Ampere. "RTX 20" is not here, since the RTX 2000 Ada is newer,
# nor is "RTX 50", since the RTX 5000 Ada is older.
_CAPABILITY_OF: dict[Capability, tuple[str, ...]] = {
    (7, 5): (
        *("T4", "V100", "GV100", "P100", "P40", "P4", "M40", "M60", "K80"),
        *("GTX", "TITAN", "RTX 2060", "RTX 2070", "RTX 2080", "Quadro RTX", "Quadro P", "Quadro T"),
    ),
    HOPPER: ("H100", "H200", "H800", "H20", "GH200"),
    (10, 0): ("B100", "B200", "B300", "GB200", "GB300"),
    (12, 0): ("GeForce RTX 50", "RTX PRO"),
}


def device_of(*inputs: jax.Array | None) -> AbstractDevice:
    """Says for which device a computation on `inputs` is meant.

    In this order: the device that holds a concrete input, the mesh in an input's type, the mesh in context,
    `jax_default_device`, the default backend. A mesh knows its devices even where they are absent, so that programs
    can be compiled ahead of time.

    Args:
        *inputs: arrays or tracers of any shape and dtype; `None` entries are passed over.

    Returns:
        A `jax.sharding.AbstractDevice` whose `platform` is `"cpu"`, `"gpu"` or `"tpu"`.
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


def memory_of_device(*inputs: jax.Array | None) -> int | None:
    """The memory in bytes of the device that `device_of` names, or None if it is absent or does not tell.

    Where several processes run one program, they must plan the same: it is the least that any of them has.
    """
    kind = device_of(*inputs).device_kind
    own = _memory_here(kind)
    return own if own is None or jax.process_count() == 1 else _least_memory(kind, own)


def _memory_here(kind: str) -> int | None:
    try:
        limits = [(d.memory_stats() or {}).get("bytes_limit") for d in jax.local_devices() if d.device_kind == kind]
    except RuntimeError:
        return None
    return min((limit for limit in limits if limit), default=None)


@functools.cache
def _least_memory(kind: str, own: int) -> int:
    """The least of all processes' memories, which they tell each other once, through JAX's coordination service.

    It is asked while a program is traced, where no collective of devices can run.
    """
    from jax._src import distributed  # JAX has no public way to the service that `jax.distributed` starts

    client: Any = distributed.global_state.client
    if client is None:  # a TPU's hosts without `jax.distributed`: libtpu gives all of them the same
        return own
    client.key_value_set(f"liger_jax/bytes_limit/{kind}/{jax.process_index()}", str(own), True)
    limits = []
    for process in range(jax.process_count()):
        try:
            told = client.blocking_key_value_get(f"liger_jax/bytes_limit/{kind}/{process}", 1000 * _SECONDS_TO_TELL)
        except RuntimeError as error:
            raise ValueError(
                f"mode='auto' plans by the least memory of all {jax.process_count()} processes, and process {process} "
                f"has not told its own in {_SECONDS_TO_TELL} seconds. Trace the same loss in every process, or pass "
                "memory_budget_bytes, or a mode: then nothing is asked."
            ) from error
        limits.append(int(told))
    return min(limits)


def _platform(name: str) -> str:
    return "gpu" if name in _GPU_PLATFORMS else name


def compute_capability(device: AbstractDevice) -> Capability:
    """The compute capability of a GPU; (0, 0) for another platform.

    A GPU of this process tells its own. One that is known by its name alone, for which a program is compiled ahead of
    time, is looked up.
    """
    if device.platform != "gpu":
        return (0, 0)
    return _told_capabilities().get(device.device_kind) or _capability_of(device.device_kind)


def is_hopper(device: AbstractDevice) -> bool:
    """Whether a device has Hopper's matrix instructions, which neither older nor newer GPUs have."""
    return compute_capability(device)[0] == HOPPER[0]


def is_h100(device: AbstractDevice) -> bool:
    """Whether a device is an H100 or an H800 by its name. Their memory is slower than an H200's: 3.35 TB/s, not 4.8."""
    return re.search(r"\bH[18]00\b", device.device_kind) is not None


def _told_capabilities() -> dict[str, Capability]:
    """The capabilities that this process's GPUs tell, by their names.

    Where JAX was told to use no GPU there is none to ask. To ask would load the plugins of all platforms: a tenth of a
    second, which a plan for devices that are not here would wait for.
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


def _capability_of(device_kind: str) -> Capability:
    words = f" {device_kind.replace('-', ' ')} "
    named = (found for found, names in _CAPABILITY_OF.items() if any(f" {name}" in words for name in names))
    return next(named, AMPERE)
