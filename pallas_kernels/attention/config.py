"""Tile sizes of the attention kernels for Hopper and for Triton, by head width."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels.tiles import cdiv

Typed = jax.Array | jax.ShapeDtypeStruct  # arrays, or their types, by which it is decided whether a kernel can run
WIDTHS = (64, 128, 256)  # others are padded to the next


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How many columns of scores a warpgroup makes at a time for its 64 rows, and how many places the rings have.

    Shared memory has 227 KiB. At width H, both rings together take 4 · H · columns bytes for each place.
    A thread has 232 registers. A tile of scores takes columns/2 of them, and an accumulator H/2.
    """

    columns: int
    stages: int
    second_stages: int = 0  # places of the second ring, if it has fewer than the first


FORWARD = {64: Blocks(128, 4), 128: Blocks(128, 2), 256: Blocks(64, 2)}
QUERY_GRADIENT = {64: Blocks(128, 4), 128: Blocks(64, 4), 256: Blocks(64, 2, 1)}
KEY_GRADIENTS = {64: Blocks(64, 4), 128: Blocks(64, 3), 256: Blocks(64, 2)}
KEY_GRADIENTS_IN_TURNS = {64: Blocks(64, 4), 128: Blocks(64, 4)}  # an even number of places
GRADIENTS = {64: Blocks(128, 2), 128: Blocks(64, 2)}


class OnePass(NamedTuple):
    """Rows of one document whose gradients were measured to be faster in one pass than by Hopper's two kernels.

    Tiles wait for each other, which costs more if they have fewer steps. A tile has a step for each block of queries
    and each head of the group.
    """

    shortest: int  # queries of a row
    smallest_group: int  # query heads for each head of keys
    fewest_tiles: int  # of 128 keys


# By head width; benchmarks/results/attention.md has the measurements.
ONE_PASS = {
    64: (OnePass(1024, 7, 256), OnePass(2048, 4, 512), OnePass(8192, 1, 256)),
    128: (OnePass(2048, 4, 1024), OnePass(8192, 1, 2048), OnePass(32768, 1, 512)),
}
ONE_PASS_WINDOW = {64: 1024}  # the smallest window of such rows; at width 128 two kernels are faster with windows


def is_faster_in_one_pass(q: Typed, k: Typed, window: int | None) -> bool:
    """Whether the gradients of q (B, Tq, Q, H) and k (B, Tk, K, H), rows of one document, are faster in one pass."""
    batch, q_length, query_heads, width = q.shape
    k_length, kv_heads = k.shape[1:3]
    num_tiles = batch * kv_heads * cdiv(k_length, 128)
    padded = next((size for size in WIDTHS if size >= width), 0)
    if window is not None and window < min(ONE_PASS_WINDOW.get(padded, k_length), k_length):
        return False
    return any(
        q_length >= case.shortest and query_heads // kv_heads >= case.smallest_group and num_tiles >= case.fewest_tiles
        for case in ONE_PASS.get(padded, ())
    )


@dataclasses.dataclass(frozen=True)
class TritonBlocks:
    """The rows of a Triton program, the columns that it takes at a time, its warps, and the stages of its copies.

    An L4 has 99 KiB of shared memory. A program needs about 2·width·(rows + 2·columns·(num_stages − 1)) bytes.
    A thread has 255 registers. A tile of scores takes rows·columns/(32·num_warps) of them, and an accumulator
    rows·width/(32·num_warps).
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int

    def __post_init__(self):
        for name in ("rows", "columns"):
            if getattr(self, name) not in (16, 32, 64, 128):
                raise ValueError(f"{name}={getattr(self, name)} must be a power of two from 16 to 128.")


TRITON_FORWARD = {64: TritonBlocks(128, 64, 8, 3), 128: TritonBlocks(128, 64, 8, 3), 256: TritonBlocks(64, 32, 8, 2)}
TRITON_QUERY_GRADIENT = {
    64: TritonBlocks(128, 64, 8, 2),
    128: TritonBlocks(128, 32, 8, 2),
    256: TritonBlocks(64, 16, 8, 2),
}
TRITON_KEY_GRADIENTS = {
    64: TritonBlocks(128, 32, 8, 2),
    128: TritonBlocks(64, 64, 8, 2),
    256: TritonBlocks(32, 32, 8, 2),
}


@dataclasses.dataclass(frozen=True)
class DecodeBlocks:
    """The slots of a cache that a program takes at a time, its warps, and the stages of its copies.

    A program needs about 4·width·slots·(num_stages − 1) bytes of shared memory, of 227 KiB on Hopper. To keep the
    memory of an H200 busy, some 32 KiB have to be on their way to each multiprocessor.
    """

    slots: int
    num_warps: int
    num_stages: int

    def __post_init__(self):
        if self.slots not in (16, 32, 64, 128):
            raise ValueError(f"slots={self.slots} must be a power of two from 16 to 128.")


TRITON_DECODE = {64: DecodeBlocks(64, 4, 3), 128: DecodeBlocks(64, 4, 3), 256: DecodeBlocks(32, 4, 3)}


def unsupported(q: Typed, k: Typed, v: Typed, segments: Any, *, scale: float | None, **_: Any) -> str | None:
    """Why the kernels for Hopper and Triton cannot run: they take 16-bit operands of widths that fit the registers."""
    widest = WIDTHS[-1]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the kernel supports bfloat16 and float16, and the queries are {q.dtype}; use 'xla'."
    if q.shape[3] > widest:
        return f"the kernel supports head widths up to {widest}, and the width is {q.shape[3]}; use 'xla'."
    if scale is not None and scale <= 0:
        return f"the kernel supports positive scales, and scale is {scale}; use 'xla', or negate the queries."
    return None
