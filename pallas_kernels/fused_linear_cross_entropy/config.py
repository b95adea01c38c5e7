"""What the kernels are compiled for, their tile sizes, and the choice of mode and chunk."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels._hopper import Tiles
from liger_jax.pallas_kernels._tiles import next_power_of_2, round_up
from liger_jax.pallas_kernels.cross_entropy.config import LogitOptions

LEAST_TOKEN_CHUNK = 128
LEAST_VOCAB_SLICE = 512
TPU_VMEM_BYTES = 12 * 2**20  # of the 16 MiB that a kernel may use unless it asks for more; v4 has no more


class Inputs(NamedTuple):
    """The arrays of the loss, flat over tokens."""

    hidden: jax.Array  # (N, D)
    weight: jax.Array  # (V, D) or (D, V)
    labels: jax.Array  # (N,) int32
    bias: jax.Array | None  # (V,)
    class_weights: jax.Array | None  # (V,) float32


class Needs(NamedTuple):
    """Which gradients are asked for."""

    hidden: bool
    weight: bool
    bias: bool


class Gradients(NamedTuple):
    """Of hidden (N, D), weight and bias (V,), in their dtypes; None where not asked for."""

    hidden: jax.Array | None
    weight: jax.Array | None
    bias: jax.Array | None


@dataclasses.dataclass(frozen=True)
class LinearOptions:
    """Static options. `chunk_size` counts tokens in mode "fast", vocabulary entries in mode "lean"."""

    logit: LogitOptions
    weight_layout: str  # "vd" or "dv"
    precision: jax.lax.PrecisionLike
    mode: str
    chunk_size: int

    @property
    def vocab_dim(self) -> int:
        """Which axis of the weight is the vocabulary."""
        return self.weight_layout.index("v")


@dataclasses.dataclass(frozen=True)
class Plan:
    """A mode, its chunk size, and the bytes it needs beside inputs and gradients."""

    mode: str
    chunk_size: int
    extra_bytes: int


def plan(
    n: int,
    d: int,
    v: int,
    *,
    itemsize: int,
    weight_itemsize: int,
    platform: str,
    mode: str,
    chunk_size: int | None,
    memory_budget_bytes: int | None,
) -> Plan:
    """Chooses the chunk, and between "fast" and "lean" where `mode` is "auto".

    "fast" makes the gradients in the forward from chunks of tokens: 3 products, and a float32 accumulator as
    large as the weight. "lean" recomputes slices of the vocabulary: 4 products, and no accumulator but dX's.
    "auto" is fast where that keeps within the budget. A budget too small for the least chunk is a ValueError.
    """
    fast_bytes = lambda chunk: _fast_bytes(chunk, d, v, itemsize, weight_itemsize)
    lean_bytes = lambda chunk: _lean_bytes(n, chunk, d, itemsize)
    if mode == "auto":
        least = chunk_size or min(n, LEAST_TOKEN_CHUNK)
        within = memory_budget_bytes is None or fast_bytes(least) <= memory_budget_bytes
        mode = "fast" if within else "lean"
    if mode == "fast":
        default, total, least, extra_bytes = token_chunk(platform), n, LEAST_TOKEN_CHUNK, fast_bytes
    else:
        default, total, least, extra_bytes = vocab_slice(n, itemsize), v, LEAST_VOCAB_SLICE, lean_bytes
    chunk = max(1, min(chunk_size or default, total))
    if memory_budget_bytes is None:
        return Plan(mode, chunk, extra_bytes(chunk))
    while chunk_size is None and extra_bytes(chunk) > memory_budget_bytes and chunk > least:
        chunk = max(least, chunk // 2)
    if extra_bytes(chunk) > memory_budget_bytes:
        raise ValueError(
            f"fused_linear_cross_entropy: memory_budget_bytes={memory_budget_bytes} is too small: mode={mode!r} "
            f"needs {extra_bytes(chunk)} bytes beside inputs and gradients with chunk_size={chunk}. "
            "Raise the budget, or split the tokens over several calls."
        )
    return Plan(mode, chunk, extra_bytes(chunk))


def token_chunk(platform: str) -> int:
    """Tokens in a chunk of the fast mode.

    An accelerator reads and writes the weight's float32 gradient once a chunk, 8·V·D bytes for 6·C·V·D operations:
    on an H200 2,048 tokens come within 3 % of the whole batch at a width of 4,096, where 512 cost 30 % more
    (benchmarks/results/token_chunks.md). A CPU is slow enough for 256.
    """
    return 256 if platform == "cpu" else 2048


def vocab_slice(n: int, itemsize: int) -> int:
    """Vocabulary entries in a slice of the lean mode: 128 MiB of logits, in multiples of a matrix unit's tile."""
    return max(LEAST_VOCAB_SLICE, 2**27 // ((4 + itemsize) * max(n, 1)) // 256 * 256)


def _fast_bytes(chunk: int, d: int, v: int, itemsize: int, weight_itemsize: int) -> int:
    logits = chunk * v * (4 + itemsize)  # float32, and their gradient as the products take it
    accumulator = 0 if weight_itemsize == 4 else 4 * v * d  # dW in float32; a float32 weight's dW is itself
    weight_copy = 0 if weight_itemsize == itemsize else v * d * itemsize
    return logits + accumulator + weight_copy + chunk * d * 4


def _lean_bytes(n: int, chunk: int, d: int, itemsize: int) -> int:
    logits = n * chunk * (4 + itemsize)
    accumulator = 0 if itemsize == 4 else 4 * n * d  # dX in float32
    return logits + accumulator + chunk * d * (4 + itemsize)


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """Tile of hidden (n, d) and of the weight (v, d), warps, and depth of the software pipeline over d."""

    n_block_size: int
    v_block_size: int
    d_block_size: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        for name in ("n_block_size", "v_block_size", "d_block_size"):
            size = getattr(self, name)
            if size != next_power_of_2(size) or size < 16:
                raise ValueError(f"{name}={size} must be a power of two, at least 16: Triton's products take no other.")


def triton_config(n: int, v: int, d: int, dtype: jax.typing.DTypeLike) -> TritonConfig:
    """Shared memory: stages · (n + v) · d · itemsize = 128 KiB in bf16, of an A100's 163 and an H200's 227."""
    wide = jnp.dtype(dtype).itemsize > 2
    n_block_size, v_block_size, d_block_size = (64, 64, 32) if wide else (128, 128, 64)
    fit = lambda block, size: min(block, max(16, next_power_of_2(size)))
    return TritonConfig(
        fit(n_block_size, n),
        fit(v_block_size, v),
        fit(d_block_size, d),
        num_warps=4 if wide else 8,
        num_stages=3 if wide else 4,
    )


def triton_vocab_splits(n_tiles: int, v_tiles: int) -> int:
    """Parts of the vocabulary that run side by side: about 1,056 programs, eight for each multiprocessor."""
    return max(1, min(v_tiles, 1056 // max(1, n_tiles)))


def mosaic_gpu_tiles(depth: int) -> Tiles:
    """Shared tiles; where the contracted axis is short, tiles in turn, to hide the epilogue."""
    return Tiles(columns=128, in_turn=True, stages=5) if depth < 1536 else Tiles()


@dataclasses.dataclass(frozen=True)
class TpuConfig:
    """Tile of hidden (n, d) and of the weight (v, d)."""

    n_block_size: int
    v_block_size: int
    d_block_size: int


def tpu_config(n: int, v: int, d: int, itemsize: int) -> TpuConfig:
    """512 × 512 tiles with the widest d that divides evenly and fits.

    Live in VMEM: the float32 product n·v, which the epilogue holds about 4 times over (product, logits,
    exponentials, masks), and double-buffered tiles of hidden, weight and (gradient only) the written n·v.
    """
    n_block_size = min(512, round_up(n, 16))
    v_block_size = min(512, round_up(v, 128))
    fixed_bytes = n_block_size * v_block_size * (4 * 4 + 2 * itemsize)
    d_block_size = d
    if d % 128 == 0:
        candidates = [size for size in range(128, min(d, 2048) + 1, 128) if d % size == 0]
        tile_bytes = lambda size: 2 * (n_block_size + v_block_size) * size * itemsize
        fitting = [size for size in candidates if fixed_bytes + tile_bytes(size) <= TPU_VMEM_BYTES]
        d_block_size = max(fitting, default=128)
    return TpuConfig(n_block_size, v_block_size, d_block_size)
