"""Tile sizes of the rotary embedding's Triton kernel."""

import dataclasses
import math

from liger_jax.pallas_kernels._tiles import next_power_of_2


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """Tokens of one program, the padded widths that it loads, how it walks through the heads, and its warps."""

    t_block_size: int
    half_block_size: int  # of half the rotary columns
    rest_block_size: int  # of the columns that pass through; 0 if there are none
    head_chunks: int  # programs that share a token's heads; divides the heads of q and of k
    heads_at_once: int  # loaded before the first of them is stored
    num_warps: int

    def __post_init__(self) -> None:
        for name in ("t_block_size", "half_block_size", "rest_block_size"):
            size = getattr(self, name)
            if size and size != next_power_of_2(size):
                raise ValueError(f"{name}={size} must be a power of two: Triton's arrays come in such sizes only.")


def triton_config(t: int, q_heads: int, k_heads: int, head_width: int, rotary_width: int) -> TritonConfig:
    """Tiles of 512 pairs of one head: a half is one 16-byte load of bf16 for each thread of 2 warps.

    A program holds eight heads or a few more: they share 32 registers of cosines and sines. Four of them load at once,
    32 registers as well; with about 124 a thread, 8 programs a core have 64 KiB on their way.
    On an H200 256 and 1,024 pairs took as long. Two heads at once took 22.2 µs rather than 19.5 at 14/2 × 64 and
    8 × 2,048 tokens; eight 20.0 there, and 2 % less at 32/8 and 64/8 × 128.
    """
    half_block_size = next_power_of_2(max(1, rotary_width // 2))
    rest_width = head_width - rotary_width
    rest_block_size = next_power_of_2(rest_width) if rest_width else 0
    t_block_size = min(next_power_of_2(t), max(1, 512 // max(half_block_size, rest_block_size)))
    num_warps = min(16, max(1, t_block_size * half_block_size // 256))
    shared = math.gcd(q_heads, k_heads)
    head_chunks = max(n for n in range(1, shared + 1) if shared % n == 0 and (n == 1 or q_heads + k_heads >= 8 * n))
    return TritonConfig(t_block_size, half_block_size, rest_block_size, head_chunks, 4, num_warps)
