"""Tile sizes of the rotary embedding's Triton kernel."""

import dataclasses

from liger_jax.pallas_kernels._tiles import next_power_of_2

TRITON_MAX_TOKEN_SIZE = 65536  # elements of one token's heads: half of them in registers, 64 a thread at 16 warps


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """Tokens of one program, the padded widths that it loads, and its warps."""

    t_block_size: int
    half_block_size: int  # of half the rotary columns
    rest_block_size: int  # of the columns that pass through; 0 if there are none
    num_warps: int

    def __post_init__(self) -> None:
        for name in ("t_block_size", "half_block_size", "rest_block_size"):
            size = getattr(self, name)
            if size and size != next_power_of_2(size):
                raise ValueError(f"{name}={size} must be a power of two: Triton's arrays come in such sizes only.")


def triton_config(t: int, heads: int, head_width: int, rotary_width: int) -> TritonConfig:
    """About 4,096 elements of the larger of q and k a program: a half of 2,048 is 16 a thread of 4 warps."""
    half_block_size = next_power_of_2(max(1, rotary_width // 2))
    rest_width = head_width - rotary_width
    rest_block_size = next_power_of_2(rest_width) if rest_width else 0
    token_size = next_power_of_2(heads) * next_power_of_2(head_width)
    t_block_size = min(next_power_of_2(t), max(1, 4096 // token_size))
    num_warps = min(16, max(4, t_block_size * token_size // 1024))
    return TritonConfig(t_block_size, half_block_size, rest_block_size, num_warps)
