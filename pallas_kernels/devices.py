"""The table of GPUs and TPUs: what kernels, the planner and benchmarks know of a device, which need not be there."""

import dataclasses
import re

Capability = tuple[int, int]
AMPERE, HOPPER = (8, 0), (9, 0)
MIB, GIB = 2**20, 2**30


@dataclasses.dataclass(frozen=True)
class GPU:
    """An NVIDIA GPU.

    Attributes:
        kind: the product's name, as the driver gives it.
        names: words by which cards of this chip and memory are known. Another card's name may have one, too.
        capability: compute capability, major and minor.
        memory_bytes: the whole memory, as the driver reports it.
        visible_gib: the memory that CUDA counts, of which JAX's allocator takes a fraction. It is the least figure seen
            in messages of CUDA programs that ran out of memory.
        cores: streaming multiprocessors.
        shared_bytes: shared memory of a core.
        threads: resident threads of a core.
        float32_units: float32 units of a core.
        l2_bytes: second-level cache.
        bandwidth: bytes a second of the memory, as published.
        peak_flops: operations a second of dense products in 16 bits, as published.
    """

    kind: str
    names: tuple[str, ...]
    capability: Capability
    memory_bytes: int
    visible_gib: float
    cores: int
    shared_bytes: int
    threads: int
    float32_units: int
    l2_bytes: int
    bandwidth: float
    peak_flops: float

    @property
    def block_shared_bytes(self) -> int:
        """The shared memory that one block may ask for: from Ampere on, all but 1 KiB of a core's."""
        return self.shared_bytes - (1024 if self.capability >= AMPERE else 0)


@dataclasses.dataclass(frozen=True)
class TPU:
    """A TPU generation.

    Attributes:
        kind: as JAX names its devices.
        memory_bytes: the memory that libtpu lets a program have on one device.
        smallest: the smallest topology, one host.
        most_chips: chips of the largest topology, a pod.
        macs: bfloat16 multiply-adds of a core in a cycle: 4 units of 128 × 128 up to v5p, and from v6e on 2 of
            256 × 256 that take 2 rows a cycle. With the clock these give the published peaks of a chip: 275, 197, 459,
            918 and 2,307 TFLOP/s.
        ghz: the clock.
        bandwidth: bytes a second that a core reads from the memory.
        vmem_bytes: VMEM of a core.
        cores: of a device. With two, the compiler splits an operation over them.
        devices_per_chip: cores of a chip that are devices of their own.
        chip_config: libtpu's name of the configuration in which JAX runs a chip.
    """

    kind: str
    memory_bytes: int
    smallest: str
    most_chips: int
    macs: int
    ghz: float
    bandwidth: float
    vmem_bytes: int
    cores: int = 1
    devices_per_chip: int = 1
    chip_config: str = "default"


# fmt: off
GPUS = {
    "h100": GPU("NVIDIA H100 80GB HBM3", ("H100", "H800"), HOPPER, 81559 * MIB, 79.10,
                132, 233472, 2048, 128, 50 * MIB, 3.35e12, 989e12),
    "h200": GPU("NVIDIA H200", ("H200",), HOPPER, 143771 * MIB, 139.72,
                132, 233472, 2048, 128, 50 * MIB, 4.8e12, 989e12),
    "a100-40g": GPU("NVIDIA A100-SXM4-40GB", ("A100-SXM4-40GB",), AMPERE, 40960 * MIB, 39.38,
                    108, 167936, 2048, 64, 40 * MIB, 1.555e12, 312e12),
    "a100-80g": GPU("NVIDIA A100-SXM4-80GB", ("A100-SXM4-80GB",), AMPERE, 81920 * MIB, 79.14,
                    108, 167936, 2048, 64, 40 * MIB, 2.039e12, 312e12),
    "l4": GPU("NVIDIA L4", ("L4",), (8, 9), 23034 * MIB, 21.95,
              58, 102400, 1536, 128, 48 * MIB, 0.3e12, 121e12),
    "a10": GPU("NVIDIA A10", ("A10",), (8, 6), 23028 * MIB, 21.95,
               72, 102400, 1536, 128, 6 * MIB, 0.6e12, 125e12),
    "t4": GPU("Tesla T4", ("T4",), (7, 5), 15843721216, 14.56,
              40, 65536, 1024, 64, 4 * MIB, 0.32e12, 65e12),
    "b200": GPU("NVIDIA B200", ("B200",), (10, 0), 183359 * MIB, 178.35,
                148, 233472, 2048, 128, 126 * MIB, 8e12, 2250e12),
}
TPUS = {
    # Two cores of v4, and of v5p, are one device.
    "v4": TPU("TPU v4", int(30.75 * GIB), "2x2x1", 4096,
              4 * 128 * 128, 1.05, 614e9, 16 * MIB, cores=2, chip_config="megacore"),
    "v5e": TPU("TPU v5 lite", int(15.75 * GIB), "2x2", 256, 4 * 128 * 128, 1.5, 819e9, 128 * MIB),
    "v5p": TPU("TPU v5", int(95.74 * GIB), "2x2x1", 8960, 4 * 128 * 128, 1.75, 1383e9, 64 * MIB, cores=2),
    "v6e": TPU("TPU v6 lite", int(31.25 * GIB), "2x2", 256, 2 * 2 * 256 * 256, 1.75, 1640e9, 128 * MIB),
    "tpu7x": TPU("TPU7x", int(94.75 * GIB), "2x2x1", 9216,
                 2 * 2 * 256 * 256, 2.2, 3690e9, 64 * MIB, devices_per_chip=2),
}
# fmt: on

# What the beginnings of names tell of GPUs that have no row. (7, 5) stands for all that is older than Ampere. "RTX 20"
# is not here, since the RTX 2000 Ada is newer, nor is "RTX 50", since the RTX 5000 Ada is older.
_CAPABILITY_OF_OTHERS: dict[Capability, tuple[str, ...]] = {
    (7, 5): (
        *("T4", "V100", "GV100", "P100", "P40", "P4", "M40", "M60", "K80"),
        *("GTX", "TITAN", "RTX 2060", "RTX 2070", "RTX 2080", "Quadro RTX", "Quadro P", "Quadro T"),
    ),
    HOPPER: ("H20", "GH200"),
    (10, 0): ("B100", "B300", "GB200", "GB300"),
    (12, 0): ("GeForce RTX 50", "RTX PRO"),
}


def gpu_named(device_kind: str) -> GPU | None:
    """The row of a card by its name.

    Args:
        device_kind: the name, as the driver gives it: "NVIDIA H100 PCIe".

    Returns:
        The row of a card with this chip and this memory, which may have more or less of both; None if there is none.
    """
    named = lambda gpu: any(re.search(rf"\b{re.escape(name)}\b", device_kind) for name in gpu.names)
    return next(filter(named, GPUS.values()), None)


def capability_of(device_kind: str) -> Capability:
    """The compute capability of a GPU that cannot be asked, because it is absent.

    Args:
        device_kind: its name, as the driver gives it.

    Returns:
        The capability, as far as the name tells it. A name that nobody knows is taken for Ampere.

    Example:
        >>> capability_of("NVIDIA H100 PCIe"), capability_of("NVIDIA GB300"), capability_of("NVIDIA A40")
        ((9, 0), (10, 0), (8, 0))
    """
    if (gpu := gpu_named(device_kind)) is not None:
        return gpu.capability
    words = f" {device_kind.replace('-', ' ')} "
    of_others = _CAPABILITY_OF_OTHERS.items()
    return next((found for found, names in of_others if any(f" {name}" in words for name in names)), AMPERE)
