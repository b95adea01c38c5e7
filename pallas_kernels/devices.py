"""The table of GPUs and TPUs that kernels, the planner and benchmarks use, also for devices that are not attached."""

import dataclasses
import functools
import re

Capability = tuple[int, int]
AMPERE, HOPPER = (8, 0), (9, 0)
MIB, GIB = 2**20, 2**30


@dataclasses.dataclass(frozen=True)
class GPU:
    """An NVIDIA GPU."""

    kind: str  # the product's name, as the driver gives it
    # Words by which cards of this chip and memory are known. Another card's name may have one, too.
    names: tuple[str, ...]
    capability: Capability  # compute capability, major and minor
    memory_bytes: int  # the whole memory, as the driver reports it
    # The memory that CUDA counts, of which JAX's allocator takes a fraction. It is the least figure seen in messages of
    # CUDA programs that ran out of memory.
    visible_gib: float
    cores: int  # streaming multiprocessors
    shared_bytes: int  # shared memory of a core
    threads: int  # resident threads of a core
    float32_units: int  # float32 units of a core
    l2_bytes: int  # second-level cache
    bandwidth: float  # bytes a second of the memory, as published
    peak_flops: float  # operations a second of dense products in 16 bits, as published

    @property
    def block_shared_bytes(self) -> int:
        """The shared memory that one block may ask for: from Ampere on, all but 1 KiB of a core's."""
        return self.shared_bytes - (1024 if self.capability >= AMPERE else 0)


@dataclasses.dataclass(frozen=True)
class TPU:
    """A TPU generation."""

    kind: str  # as JAX names its devices
    memory_bytes: int  # the memory that libtpu lets a program have on one device
    smallest: str  # the smallest topology, one host
    most_chips: int  # chips of the largest topology, a pod
    # Bfloat16 multiply-adds of a core in a cycle: 4 units of 128 × 128 up to v5p, and from v6e on 2 of 256 × 256 that
    # take 2 rows a cycle. With the clock these give the published peaks of a chip: 275, 197, 459, 918 and 2,307
    # TFLOP/s.
    macs: int
    ghz: float  # the clock
    bandwidth: float  # bytes a second that a core reads from the memory
    vmem_bytes: int  # VMEM of a core
    cores: int = 1  # of a device. With two, the compiler splits an operation over them.
    devices_per_chip: int = 1  # cores of a chip that are separate devices
    chip_config: str = "default"  # libtpu's name of the configuration in which JAX runs a chip


def _card(
    kind: str, capability: Capability, mib: int, visible_gib: float, cores: int, l2_mib: int, gbytes: int, tflops: float
) -> GPU:
    """A card for graphics, workstations or inference, from the second Ampere on: their cores are equally large."""
    name = re.sub("NVIDIA |GeForce |Tesla | Generation| Workstation Edition", "", kind)
    rates = dict(bandwidth=gbytes * 1e9, peak_flops=tflops * 1e12)
    sizes = dict(shared_bytes=102400, threads=1536, float32_units=128, l2_bytes=l2_mib * MIB)
    return GPU(kind, (name,), capability, mib * MIB, visible_gib, cores, **sizes, **rates)


# The peaks are of products in 16 bits that are summed in float32 and not sparse, which halves many a headline. Where
# two rows have a name in common, the one with less memory comes first.
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
    "h100-pcie": GPU("NVIDIA H100 PCIe", ("H100 PCIe",), HOPPER, 81559 * MIB, 79.10,
                     114, 233472, 2048, 128, 50 * MIB, 2.0e12, 756e12),
    "h100-nvl": GPU("NVIDIA H100 NVL", ("H100 NVL",), HOPPER, 95830 * MIB, 93.10,
                    132, 233472, 2048, 128, 50 * MIB, 3.9e12, 835e12),
    "gh200": GPU("NVIDIA GH200 480GB", ("GH200", "GH200 480GB"), HOPPER, 97871 * MIB, 94.50,
                 132, 233472, 2048, 128, 50 * MIB, 4.0e12, 989e12),
    "h20": GPU("NVIDIA H20", ("H20",), HOPPER, 97871 * MIB, 94.99,
               78, 233472, 2048, 128, 60 * MIB, 4.0e12, 148e12),
    "a30": GPU("NVIDIA A30", ("A30",), AMPERE, 24576 * MIB, 23.50,
               56, 167936, 2048, 64, 24 * MIB, 0.933e12, 165e12),
    "v100-16g": GPU("Tesla V100-SXM2-16GB", ("V100",), (7, 0), 16384 * MIB, 15.75,
                    80, 98304, 2048, 64, 6 * MIB, 0.9e12, 125e12),
    "v100-32g": GPU("Tesla V100-SXM2-32GB", ("V100-SXM2-32GB", "V100-PCIE-32GB", "V100S-PCIE-32GB"), (7, 0),
                    32768 * MIB, 31.73, 80, 98304, 2048, 64, 6 * MIB, 0.9e12, 125e12),
    "rtx2080ti": GPU("NVIDIA GeForce RTX 2080 Ti", ("RTX 2080 Ti",), (7, 5), 11264 * MIB, 10.57,
                     68, 65536, 1024, 64, 11 * MIB // 2, 0.616e12, 53.8e12),
    "titan-rtx": GPU("NVIDIA TITAN RTX", ("TITAN RTX",), (7, 5), 24220 * MIB, 23.43,
                     72, 65536, 1024, 64, 6 * MIB, 0.672e12, 130.5e12),
    # GA102 to GA107
    "rtx3060": _card("NVIDIA GeForce RTX 3060", (8, 6), 12288, 11.49, 28, 3, 360, 25.5),
    "rtx3060ti": _card("NVIDIA GeForce RTX 3060 Ti", (8, 6), 8192, 7.60, 38, 4, 448, 32.4),
    "rtx3070": _card("NVIDIA GeForce RTX 3070", (8, 6), 8192, 7.60, 46, 4, 448, 40.6),
    "rtx3070ti": _card("NVIDIA GeForce RTX 3070 Ti", (8, 6), 8192, 7.60, 48, 4, 608, 43.5),
    "rtx3080-10g": _card("NVIDIA GeForce RTX 3080", (8, 6), 10240, 9.62, 68, 5, 760, 59.5),
    "rtx3080-12g": _card("NVIDIA GeForce RTX 3080", (8, 6), 12288, 11.49, 70, 6, 912, 61.3),
    "rtx3080ti": _card("NVIDIA GeForce RTX 3080 Ti", (8, 6), 12288, 11.49, 80, 6, 912, 68.2),
    "rtx3090": _card("NVIDIA GeForce RTX 3090", (8, 6), 24576, 23.52, 82, 6, 936, 71.0),
    "rtx3090ti": _card("NVIDIA GeForce RTX 3090 Ti", (8, 6), 24564, 23.52, 84, 6, 1008, 80.0),
    "rtx-a4000": _card("NVIDIA RTX A4000", (8, 6), 16376, 15.57, 48, 4, 448, 76.7),
    "rtx-a4500": _card("NVIDIA RTX A4500", (8, 6), 20470, 19.50, 56, 6, 640, 94.6),
    "rtx-a5000": _card("NVIDIA RTX A5000", (8, 6), 24564, 23.52, 64, 6, 768, 111.1),
    "rtx-a6000": _card("NVIDIA RTX A6000", (8, 6), 49140, 47.27, 84, 6, 768, 154.8),
    "a2": _card("NVIDIA A2", (8, 6), 15356, 14.50, 10, 2, 200, 18.0),
    "a10g": _card("NVIDIA A10G", (8, 6), 23028, 21.95, 80, 6, 600, 70.0),
    "a40": _card("NVIDIA A40", (8, 6), 46068, 44.34, 84, 6, 696, 149.7),
    # AD102 to AD107
    "rtx4060": _card("NVIDIA GeForce RTX 4060", (8, 9), 8188, 7.60, 24, 24, 272, 30.2),
    "rtx4060ti-8g": _card("NVIDIA GeForce RTX 4060 Ti", (8, 9), 8188, 7.60, 34, 32, 288, 44.1),
    "rtx4060ti-16g": _card("NVIDIA GeForce RTX 4060 Ti", (8, 9), 16380, 15.57, 34, 32, 288, 44.1),
    "rtx4070": _card("NVIDIA GeForce RTX 4070", (8, 9), 12282, 11.49, 46, 36, 504, 58.3),
    "rtx4070-super": _card("NVIDIA GeForce RTX 4070 SUPER", (8, 9), 12282, 11.49, 56, 48, 504, 71.0),
    "rtx4070ti": _card("NVIDIA GeForce RTX 4070 Ti", (8, 9), 12282, 11.49, 60, 48, 504, 80.2),
    "rtx4070ti-super": _card("NVIDIA GeForce RTX 4070 Ti SUPER", (8, 9), 16376, 15.57, 66, 48, 672, 88.2),
    "rtx4080": _card("NVIDIA GeForce RTX 4080", (8, 9), 16376, 15.57, 76, 64, 717, 97.5),
    "rtx4080-super": _card("NVIDIA GeForce RTX 4080 SUPER", (8, 9), 16376, 15.57, 80, 64, 736, 104.4),
    "rtx4090": _card("NVIDIA GeForce RTX 4090", (8, 9), 24564, 23.52, 128, 72, 1008, 165.2),
    "rtx-4000-ada": _card("NVIDIA RTX 4000 Ada Generation", (8, 9), 20475, 19.50, 48, 48, 360, 106.9),
    "rtx-5000-ada": _card("NVIDIA RTX 5000 Ada Generation", (8, 9), 32760, 31.34, 100, 72, 576, 261.1),
    "rtx-6000-ada": _card("NVIDIA RTX 6000 Ada Generation", (8, 9), 49140, 47.27, 142, 96, 960, 364.2),
    "l40": _card("NVIDIA L40", (8, 9), 46068, 44.31, 142, 96, 864, 181.0),
    "l40s": _card("NVIDIA L40S", (8, 9), 46068, 44.31, 142, 96, 864, 362.0),
    # GB202 to GB206
    "rtx5060ti-8g": _card("NVIDIA GeForce RTX 5060 Ti", (12, 0), 8151, 7.46, 36, 32, 448, 47.4),
    "rtx5060ti-16g": _card("NVIDIA GeForce RTX 5060 Ti", (12, 0), 16311, 15.46, 36, 32, 448, 47.4),
    "rtx5070": _card("NVIDIA GeForce RTX 5070", (12, 0), 12227, 11.46, 48, 48, 672, 61.7),
    "rtx5070ti": _card("NVIDIA GeForce RTX 5070 Ti", (12, 0), 16303, 15.46, 70, 48, 896, 87.9),
    "rtx5080": _card("NVIDIA GeForce RTX 5080", (12, 0), 16303, 15.46, 84, 64, 960, 112.6),
    "rtx5090": _card("NVIDIA GeForce RTX 5090", (12, 0), 32607, 31.34, 170, 96, 1792, 209.5),
    "rtx-pro-6000": _card("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0), 97887, 94.96,
                          188, 128, 1792, 503.8),
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

# The capability by the beginnings of names, for GPUs without a row. (7, 5) stands for all older than Ampere. "RTX 20"
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


@functools.cache
def gpu_named(device_kind: str) -> GPU | None:
    """The row of a card by its name.

    Returns the row with the longest of the names in it: a card with this chip and this memory, which may have more or
    less of both; None if there is none, and for a laptop's card, whose chip is another one.
    """
    if "Laptop" in device_kind:
        return None
    matches = [(len(name), gpu) for gpu in GPUS.values() for name in gpu.names if _stands_in(name, device_kind)]
    return max(matches, key=lambda pair: pair[0], default=(0, None))[1]


def _stands_in(name: str, device_kind: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", device_kind) is not None


def capability_of(device_kind: str) -> Capability:
    """The compute capability of a GPU that cannot be asked, because it is absent.

    Returns the capability, as far as the name says it. A name that nobody knows is taken for Ampere.
    """
    if (gpu := gpu_named(device_kind)) is not None:
        return gpu.capability
    words = f" {device_kind.replace('-', ' ')} "
    of_others = _CAPABILITY_OF_OTHERS.items()
    return next((capability for capability, names in of_others if any(f" {name}" in words for name in names)), AMPERE)
