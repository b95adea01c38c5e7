"""The device that a computation is meant for.

It need not be attached. What is known of it decides which kernel runs.
"""

from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractDevice

_GPU_PLATFORMS = ("gpu", "cuda", "rocm")
_HOPPER = ("H100", "H200", "H800", "H20", "GH200")
# Triton's matrix instructions need sm_80. The product names of older GPUs begin like this. "RTX 20" is not among them:
# the RTX 2000 Ada is newer.
_BEFORE_AMPERE = (
    *("T4", "V100", "GV100", "P100", "P40", "P4", "M40", "M60", "K80"),
    *("GTX", "TITAN", "RTX 2060", "RTX 2070", "RTX 2080", "Quadro RTX", "Quadro P", "Quadro T"),
)


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
    """The memory in bytes of the device that `device_of` names, or None if it is absent or does not tell."""
    kind = device_of(*inputs).device_kind
    try:
        device = next(device for device in jax.local_devices() if device.device_kind == kind)
        return (device.memory_stats() or {}).get("bytes_limit")
    except (RuntimeError, StopIteration):
        return None


def _platform(name: str) -> str:
    return "gpu" if name in _GPU_PLATFORMS else name


def is_hopper(device_kind: str) -> bool:
    """Whether a GPU of this name has Hopper's matrix units."""
    return any(f" {name}" in f" {device_kind.replace('-', ' ')} " for name in _HOPPER)


def is_before_ampere(device_kind: str) -> bool:
    """Whether a GPU of this name is too old for Triton's matrix instructions."""
    words = f" {device_kind.replace('-', ' ')} "
    return any(f" {name}" in words for name in _BEFORE_AMPERE)
