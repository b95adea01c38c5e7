"""Tile sizes of the RMSNorm kernels: pure functions of shape, dtype and direction."""

import dataclasses

from liger_jax.pallas_kernels._tiles import cdiv, next_power_of_2, round_up

TRITON_MAX_WIDTH = 65536  # one row in registers: 128 float32 a thread at 16 warps
TPU_VMEM_BYTES = 12 * 2**20  # of the default 16 MiB scope


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """Rows per step, padded width, warps, and programs that share the rows in the backward."""

    n_block_size: int
    d_block_size: int
    num_warps: int
    num_programs: int

    def __post_init__(self) -> None:
        for name in ("n_block_size", "d_block_size"):
            size = getattr(self, name)
            if size != next_power_of_2(size):
                raise ValueError(f"{name}={size} must be a power of two: Triton's arrays come in such sizes only.")


def triton_config(n: int, d: int) -> TritonConfig:
    """About 4,096 elements a step: 16 bytes a load for each of 4 warps, four loads in flight."""
    d_block_size = next_power_of_2(d)
    n_block_size = min(next_power_of_2(n), max(1, 4096 // d_block_size))
    num_warps = min(16, max(4, n_block_size * d_block_size // 1024))
    # 256 programs: two for each of an H200's 132 multiprocessors, each with one float32 partial of dscale.
    return TritonConfig(n_block_size, d_block_size, num_warps, min(256, cdiv(n, n_block_size)))


def tpu_n_block_size(n: int, d: int, itemsize: int) -> int:
    """Rows per step on a TPU: the most that fit, at most 512, in multiples of the 16 sublanes that bf16 packs."""
    row_bytes = round_up(d, 128) * (
        3 * 2 * itemsize  # x, dy, dx, each double-buffered
        + 4 * 4  # float32 x, dy, x̂ and their product
    )
    return max(0, min(512, round_up(n, 16), TPU_VMEM_BYTES // row_bytes // 16 * 16))
