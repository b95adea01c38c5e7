"""Accelerators that need not be there: their names, their number and their memory."""

import dataclasses
import math
import re

from jax.sharding import AbstractDevice

MIB, GIB = 2**20, 2**30


@dataclasses.dataclass(frozen=True)
class GPU:
    """An NVIDIA GPU as its compiler is told of it.

    Attributes:
        kind: the product's name, as the driver gives it.
        capability: compute capability, major and minor.
        memory_bytes: what the driver reports in all.
        cores: streaming multiprocessors.
        shared_bytes: shared memory of a core, of which a block may ask for all but 1 KiB from Ampere on.
        threads: resident threads of a core.
        float32_units: of a core.
        l2_bytes: second-level cache.
    """

    kind: str
    capability: tuple[int, int]
    memory_bytes: int
    cores: int
    shared_bytes: int
    threads: int
    float32_units: int
    l2_bytes: int

    def description(self) -> str:
        """As a text protocol buffer.

        Returns:
            What the CUDA plugin's topologies take for `target_config`.
        """
        major, minor = self.capability
        optin = self.shared_bytes - (1024 if major >= 8 else 0)
        return f"""gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
          shared_memory_per_core: {self.shared_bytes} shared_memory_per_block_optin: {optin}
          threads_per_core_limit: {self.threads} core_count: {self.cores} fpus_per_core: {self.float32_units}
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          memory_bandwidth: 2000000000000 l2_cache_size: {self.l2_bytes} clock_rate_ghz: 1.5
          device_memory_size: {self.memory_bytes} registers_per_core_limit: 65536 registers_per_block_limit: 65536
          cuda_compute_capability {{ major: {major} minor: {minor} }}
        }}
        platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
        device_description_str: "{self.kind}" """


@dataclasses.dataclass(frozen=True)
class TPU:
    """A TPU generation.

    Attributes:
        kind: as JAX names its devices.
        memory_bytes: of one device, what libtpu lets a program have.
        smallest: the smallest topology, one host.
        devices_per_chip: cores that are devices of their own.
    """

    kind: str
    memory_bytes: int
    smallest: str
    devices_per_chip: int = 1


GPUS = {
    "h100": GPU("NVIDIA H100 80GB HBM3", (9, 0), 81559 * MIB, 132, 233472, 2048, 128, 50 * MIB),
    "h200": GPU("NVIDIA H200", (9, 0), 143771 * MIB, 132, 233472, 2048, 128, 50 * MIB),
    "a100-40g": GPU("NVIDIA A100-SXM4-40GB", (8, 0), 40960 * MIB, 108, 167936, 2048, 64, 40 * MIB),
    "a100-80g": GPU("NVIDIA A100-SXM4-80GB", (8, 0), 81920 * MIB, 108, 167936, 2048, 64, 40 * MIB),
    "l4": GPU("NVIDIA L4", (8, 9), 23034 * MIB, 58, 102400, 1536, 128, 48 * MIB),
    "a10": GPU("NVIDIA A10", (8, 6), 23028 * MIB, 72, 102400, 1536, 128, 6 * MIB),
    "t4": GPU("Tesla T4", (7, 5), 15843721216, 40, 65536, 1024, 64, 4 * MIB),
    "b200": GPU("NVIDIA B200", (10, 0), 183359 * MIB, 148, 233472, 2048, 128, 126 * MIB),
}
TPUS = {
    "v4": TPU("TPU v4", int(15.25 * GIB), "2x2x1", 2),
    "v5e": TPU("TPU v5 lite", int(15.75 * GIB), "2x2"),
    "v5p": TPU("TPU v5", int(95.74 * GIB), "2x2x1"),
    "v6e": TPU("TPU v6 lite", int(31.25 * GIB), "2x2"),
    "tpu7x": TPU("TPU7x", int(94.75 * GIB), "2x2x1", 2),
}
GPUS_PER_HOST, CHIPS_PER_HOST = 8, 4


@dataclasses.dataclass(frozen=True)
class Target:
    """Equal devices, on one host or several.

    Attributes:
        name: as it was asked for, such as "h200:8" or "v5e:8x8".
        platform: "gpu" or "tpu".
        kind: the device's own name.
        count: devices.
        memory_bytes: of each.
        topology: as the compiler's plugin names it.
    """

    name: str
    platform: str
    kind: str
    count: int
    memory_bytes: int
    topology: str

    @property
    def capability(self) -> tuple[int, int]:
        """A GPU's compute capability; (0, 0) of a TPU."""
        gpu = GPUS.get(self.name.partition(":")[0])
        return gpu.capability if gpu else (0, 0)

    @property
    def description(self) -> AbstractDevice:
        """What ops are told of the device for which they are traced."""
        return AbstractDevice(self.kind, None, self.platform)


def target(name: str) -> Target:
    """Devices by name: "h200", "h200:8", "h200:32", "v5e" (one device), "v5e:8x8", "v5p:4x4x4".

    Args:
        name: one of `GPUS`, with a number of them; or one of `TPUS`, with a topology of chips.

    Returns:
        The target; no plugin is needed yet.

    Raises:
        ValueError: no such device, or no such number or topology of them.

    Example:
        >>> target("h200:32").topology, target("v5p:4x4x4").count
        ('1x4x8', 64)
    """
    kind, _, size = name.lower().partition(":")
    if kind in GPUS:
        return _gpus(kind, size)
    if kind in TPUS:
        return _tpus(kind, size)
    raise ValueError(
        f"device={name!r} is unknown. GPUs: {', '.join(GPUS)}, with a number as in 'h200:8'; "
        f"TPUs: {', '.join(TPUS)}, with a topology as in 'v5e:8x8'."
    )


def _gpus(kind: str, size: str) -> Target:
    count = int(size or 1) if not size or size.isdigit() else 0
    if count < 1 or count > GPUS_PER_HOST and count % GPUS_PER_HOST:
        raise ValueError(
            f"device='{kind}:{size}' must say how many GPUs: 1 to {GPUS_PER_HOST}, or a multiple of {GPUS_PER_HOST}, "
            f"which is a host's."
        )
    hosts = max(1, count // GPUS_PER_HOST)
    name = kind if count == 1 else f"{kind}:{count}"
    gpu = GPUS[kind]
    return Target(name, "gpu", gpu.kind, count, gpu.memory_bytes, f"1x{hosts}x{count // hosts}")


def _tpus(kind: str, size: str) -> Target:
    tpu = TPUS[kind]
    if not size:
        return Target(kind, "tpu", tpu.kind, 1, tpu.memory_bytes, tpu.smallest)
    axes = [int(axis) for axis in size.split("x")] if re.fullmatch(r"\d+(x\d+)+", size) else []
    of_host = [int(axis) for axis in tpu.smallest.split("x")]
    if len(axes) != len(of_host) or any(a < 1 or a % h for a, h in zip(axes, of_host, strict=True)):
        raise ValueError(
            f"device='{kind}:{size}' must be a topology of {len(of_host)} axes that {tpu.smallest}, a host's "
            f"{CHIPS_PER_HOST} chips, divides, such as '{kind}:{'x'.join(str(4 * h) for h in of_host)}'; "
            f"'{kind}' alone is one device."
        )
    count = math.prod(axes) * tpu.devices_per_chip
    return Target(f"{kind}:{size}", "tpu", tpu.kind, count, tpu.memory_bytes, size)
