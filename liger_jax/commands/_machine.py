"""This machine's devices, drivers and packages for JAX, and what is broken."""

import ctypes
import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path

import jax

from liger_jax import _packages
from liger_jax._install import install_command

_CUDA_LIBRARIES = ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12")  # installed by the plugin's extra
_PLUGIN = re.compile(r"jax-(cuda\d+|rocm\d+)-(plugin|pjrt)")


@dataclasses.dataclass(frozen=True)
class Machine:
    """This machine's packages, driver and devices."""

    versions: Mapping[str, str]  # of all packages that are installed, by their names
    has_driver: bool  # whether NVIDIA's driver is here
    platforms: str  # what JAX_PLATFORMS says; empty if nothing
    devices: tuple[str, ...]  # the devices that JAX finds, in words
    platform: str  # their platform; empty if JAX finds none
    error: str = ""  # why JAX finds none; empty if it does

    @property
    def plugins(self) -> dict[str, str]:
        """The versions of JAX's plugins for GPUs by their names."""
        return {name: version for name, version in self.versions.items() if _PLUGIN.fullmatch(name)}


def found() -> Machine:
    """Examines this machine."""
    try:
        devices, error = jax.devices(), ""
    except RuntimeError as raised:
        devices, error = [], " ".join(str(raised).split())
    return Machine(
        versions=_packages.versions(),
        has_driver=_has_driver(),
        platforms=os.environ.get("JAX_PLATFORMS", ""),
        devices=tuple(f"{device.platform} {device.id}: {device.device_kind}" for device in devices),
        platform=jax.default_backend() if devices else "",
        error=error,
    )


def problems(machine: Machine, requirements: Mapping[str, str] | None = None) -> list[str]:
    """What is broken, each with its cure."""
    needed = _packages.requirements() if requirements is None else requirements
    wrong = _packages.wrong_versions(machine.versions, needed)
    jaxlib = machine.versions.get("jaxlib", "")
    wrong += [
        f"{name} is {plugin_version}, and jaxlib is {jaxlib}: JAX does not use a plugin of another version. "
        f"pip install --upgrade 'jax[cuda13]=={machine.versions.get('jax', jaxlib)}'"
        for name, plugin_version in machine.plugins.items()
        if plugin_version != jaxlib
    ]
    for_gpus = not machine.platforms or any(name in machine.platforms for name in ("cuda", "gpu"))
    has_libraries = any(name in machine.versions for name in _CUDA_LIBRARIES)
    if for_gpus and machine.plugins and has_libraries and not machine.has_driver:
        wrong.append(
            f"{min(machine.plugins)} is installed, and NVIDIA's driver is not: libcuda.so.1 cannot be loaded. Install "
            "the driver, in a container pass the GPUs on, or set JAX_PLATFORMS=cpu."
        )
    elif for_gpus and machine.has_driver and not machine.plugins:
        wrong.append(f"NVIDIA's driver is here, and JAX has no plugin for it: {install_command('cuda')}.")
    elif for_gpus and machine.has_driver and machine.platform == "cpu":
        wrong.append("NVIDIA's driver and JAX's plugin are here, and JAX finds no GPU. JAX_PLATFORMS=cuda says why.")
    if machine.error:
        wrong.append(f"JAX finds no device: {machine.error}")
    return wrong


def _has_driver() -> bool:
    if not Path("/proc/driver/nvidia/version").exists() and not any(Path("/dev").glob("nvidia[0-9]*")):
        return False
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
