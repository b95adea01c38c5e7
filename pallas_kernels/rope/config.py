"""Tile sizes of the rotary embedding's Triton kernel."""

import dataclasses
import math

from liger_jax.pallas_kernels._tiles import next_power_of_2


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """Tile sizes of one program: its tokens, the padded widths that it loads, how it takes the heads, and its warps."""

    t_block_size: int
    half_block_size: int  # width of half the rotary columns, padded
    rest_block_size: int  # width of the columns that pass through, padded; 0 if there are none
    head_chunks: int  # programs that share a token's heads; it divides the numbers of heads of q and of k
    heads_at_once: int  # heads that are loaded before the first of them is stored
    num_warps: int

    def __post_init__(self) -> None:
        for name in ("t_block_size", "half_block_size", "rest_block_size"):
            size = getattr(self, name)
            if size and size != next_power_of_2(size):
                raise ValueError(f"{name}={size} must be a power of two: Triton's arrays come in such sizes only.")


def triton_config(t: int, q_heads: int, k_heads: int, head_width: int, rotary_width: int) -> TritonConfig:
    """Tiles of 512 pairs of one head: a half is one 16-byte load of bf16 for each thread of 2 warps.

    A program has eight heads or a few more, which share 32 registers of cosines and sines. It loads four of them at
    once into another 32 registers. A thread needs about 124 registers, so a core runs 8 programs and waits for 64 KiB
    at a time.
    Measured on an H200: tiles of 256 and of 1,024 pairs took as long. At 14/2 heads of width 64 and 8 × 2,048 tokens
    four heads at once took 19.5 µs, two 22.2 and eight 20.0. At 32/8 and 64/8 heads of width 128 eight took 2 % less
    than four.
    """
    half_block_size = next_power_of_2(max(1, rotary_width // 2))
    rest_width = head_width - rotary_width
    rest_block_size = next_power_of_2(rest_width) if rest_width else 0
    t_block_size = min(next_power_of_2(t), max(1, 512 // max(half_block_size, rest_block_size)))
    num_warps = min(16, max(1, t_block_size * half_block_size // 256))
    shared = math.gcd(q_heads, k_heads)
    head_chunks = max(n for n in range(1, shared + 1) if shared % n == 0 and (n == 1 or q_heads + k_heads >= 8 * n))
    return TritonConfig(t_block_size, half_block_size, rest_block_size, head_chunks, 4, num_warps)
