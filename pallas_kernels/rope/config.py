"""Tile sizes of the rotary kernel."""

import dataclasses

from liger_jax.pallas_kernels._tiles import next_power_of_2


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """Padded heads of q and k, padded half of the rotated width, warps."""

    q_block_size: int
    k_block_size: int
    half_block_size: int
    num_warps: int


def triton_config(q_heads: int, k_heads: int, half: int) -> TritonConfig:
    """One position a program: all its heads share one row of cos and sin."""
    q_block_size, k_block_size, half_block_size = (next_power_of_2(n) for n in (q_heads, k_heads, half))
    num_warps = min(8, max(1, q_block_size * half_block_size // 256))
    return TritonConfig(q_block_size, k_block_size, half_block_size, num_warps)
