"""Tile sizes of the softmax and sparsemax Triton kernels."""

import dataclasses

from liger_jax.pallas_kernels._tiles import next_power_of_2

TRITON_MAX_WIDTH = 32768  # One row in registers: 64 float32 of a thread at 16 warps, and as many temporaries.


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """Rows and padded width of one program's tile, and its warps."""

    n_block_size: int
    f_block_size: int
    num_warps: int

    def __post_init__(self) -> None:
        for name in ("n_block_size", "f_block_size"):
            size = getattr(self, name)
            if size != next_power_of_2(size):
                raise ValueError(f"{name}={size} must be a power of two: Triton's arrays come in such sizes only.")


def triton_config(n: int, f: int) -> TritonConfig:
    """About 4,096 elements a program: each thread of 4 warps makes four loads of 16 bytes at once."""
    f_block_size = next_power_of_2(f)
    n_block_size = min(next_power_of_2(n), max(1, 4096 // f_block_size))
    return TritonConfig(n_block_size, f_block_size, min(16, max(4, n_block_size * f_block_size // 1024)))
