"""The static options of the kernels, and their tile sizes."""

import dataclasses
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels._hopper_tiles import ROWS, Tiles
from liger_jax.pallas_kernels.cross_entropy.config import LogitOptions
from liger_jax.pallas_kernels.hopper import NUM_CORES
from liger_jax.pallas_kernels.tiles import cdiv, next_power_of_2, round_up

SHORT_DEPTH = 1536  # tiles in turn are faster for products less deep than this (benchmarks/results/tiles.md)
LEAST_KEPT = 4096  # entries of a slice where exponentials are kept
_SHARED_TILES = Tiles(columns=256), Tiles(columns=192)

Typed = jax.Array | jax.ShapeDtypeStruct  # an array, or its shape and dtype


class Inputs(NamedTuple):
    """The arrays of the loss, flat over tokens."""

    hidden: jax.Array  # (N, D)
    weight: jax.Array  # (V, D) or (D, V)
    labels: jax.Array  # (N,) int32
    bias: jax.Array | None  # (V,)
    class_weights: jax.Array | None  # (V,) float32

    @property
    def num_vectors(self) -> int:
        """The number of vectors: 0 to 2, of a bias and class weights."""
        return sum(x is not None for x in (self.bias, self.class_weights))


class Needs(NamedTuple):
    """Which gradients are asked for."""

    hidden: bool
    weight: bool
    bias: bool


@runtime_checkable
class HeadProducts(Protocol):
    """What products with a head depend on: `LinearOptions`, or the distillation's options of one head."""

    @property
    def vocab_dim(self) -> int:
        """Which axis of the weight is the vocabulary."""
        ...

    @property
    def precision(self) -> jax.lax.PrecisionLike:
        """The products' precision."""
        ...


class Gradients(NamedTuple):
    """The gradients by hidden (N, D), the weight and the bias (V,), in their dtypes; None where not asked for."""

    hidden: jax.Array | None
    weight: jax.Array | None
    bias: jax.Array | None


@dataclasses.dataclass(frozen=True)
class KeptEntries:
    """The first entries of the vocabulary, whose exponentials are kept for all tokens; the others' are recomputed.

    They come in three spans. `first` and `rest` entries have arrays of their own. Between them, `blocks` blocks of D
    entries are kept where the weight's gradient (V, D) will be: a block (N, D) takes N of its V rows, and the last
    block ends at the last of them. The gradient's rows are written in the order of the vocabulary. No row is written
    before the block there has been read if `first` + i · D ≤ V − (`blocks` − i) · N for each i.
    """

    first: int  # also the entries of a slice
    blocks: int
    rest: int
    width: int  # D

    @property
    def in_blocks(self) -> int:
        """The entries that are kept in the gradient's place."""
        return self.blocks * self.width

    @property
    def total(self) -> int:
        """The entries that are kept."""
        return self.first + self.in_blocks + self.rest

    def first_row(self, n: int, v: int) -> int:
        """The row of the weight's gradient where the first block begins, for a padded number of tokens."""
        return v // 64 * 64 - self.blocks * n


def kept_entries(n: int, d: int, v: int, arrays: int) -> KeptEntries | None:
    """The largest share that separate arrays of `arrays` entries allow; None if the kernels cannot divide it.

    A slice has `LEAST_KEPT` entries or a few more, in whole blocks, so that its products leave few cores idle.
    """
    n, end = round_up(n, ROWS), v // 64 * 64
    first = round_up(LEAST_KEPT, d)
    if d % ROWS or v % 8 or arrays < first or first + d > end:
        return None
    blocks = min((end - first) // n, (end - first) // d)
    rest = min(arrays - first, end - first - blocks * d) // 256 * 256
    whole = end - first - blocks * d
    rest = whole if v % 64 == 0 and whole <= arrays - first else rest
    return KeptEntries(first, blocks, rest, d) if blocks > 0 else None


@dataclasses.dataclass(frozen=True)
class LinearOptions:
    """What the kernels are compiled for.

    Mode and chunk size are the plan's (liger_jax/ops/linear/plan.py). Before there is a plan, `unsupported` gets the
    caller's mode, which may be "auto".
    """

    logit: LogitOptions
    weight_layout: str  # "vd" or "dv"
    precision: jax.lax.PrecisionLike
    mode: str  # "fast" or "lean"
    chunk_size: int  # tokens in a chunk ("fast"), vocabulary entries in a slice ("lean")
    kept: KeptEntries | None = None  # in mode "fast" with one chunk; None to keep all entries' exponentials

    @property
    def vocab_dim(self) -> int:
        """Which axis of the weight is the vocabulary."""
        return self.weight_layout.index("v")


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

    def fit(block, size):
        return min(block, max(16, next_power_of_2(size)))

    return TritonConfig(
        fit(n_block_size, n),
        fit(v_block_size, v),
        fit(d_block_size, d),
        num_warps=4 if wide else 8,
        num_stages=3 if wide else 4,
    )


def triton_vocab_splits(n_tiles: int, v_tiles: int) -> int:
    """Splits of the vocabulary that run side by side: eight programs for each multiprocessor, or a few more."""
    return max(1, min(v_tiles, 8 * NUM_CORES // max(1, n_tiles)))


def mosaic_gpu_tiles(depth: int, rows: int, columns: int) -> Tiles:
    """The tiles of a product. A short product has tiles in turn; others have tiles that two warpgroups share.

    Shared tiles have the width that leaves the fewest cores idle. With tiles in turn, a tile's epilogue is hidden
    behind the other warpgroup's product, but twice as much of b is read. On an H200 they win below a depth of about
    1,500 (benchmarks/results/tiles.md).
    """
    if depth < SHORT_DEPTH:
        return Tiles(columns=128, in_turn=True, stages=5)
    return min(_SHARED_TILES, key=lambda tiles: mosaic_gpu_rounds(tiles, rows, columns))


def mosaic_gpu_logit_tiles(d: int, rows: int, columns: int) -> Tiles:
    """Tiles of the product that makes logits. A band of hidden's rows stays in L2 while the whole weight passes.

    A band takes up to 16 MiB of an H200's 50. Tiles in turn are fastest with all rows in one band (4 % at D = 896).
    Shared tiles are slower with more than 16 row tiles in a band; at D = 8,192, 8 row tiles are 1.5 % faster than 16.
    """
    tiles = mosaic_gpu_tiles(d, rows, columns)
    most = max(1, 2**24 // (2 * ROWS * d))
    return dataclasses.replace(tiles, snake_width=most if tiles.in_turn else min(16, most))


def mosaic_gpu_block_tiles(d: int, rows: int, columns: int) -> Tiles:
    """`mosaic_gpu_logit_tiles` of logits that are kept in blocks of D columns: a tile lies in one block."""
    tiles = mosaic_gpu_logit_tiles(d, rows, columns)
    if d % tiles.columns == 0:
        return tiles
    return dataclasses.replace(tiles, columns=next(size for size in (256, 192, 128) if d % size == 0))


def mosaic_gpu_rounds(tiles: Tiles, rows: int, columns: int) -> float:
    """How many columns of b each core goes through, one tile after the other, for a product of this size.

    A column counts 3 % more in tiles of 192 columns, because each copy of a's tile then serves fewer columns.
    """
    cost = 1.0 if tiles.columns == 256 else 1.03
    return cost * cdiv(cdiv(rows, ROWS) * cdiv(columns, tiles.columns), NUM_CORES) * tiles.columns


def mosaic_gpu_entry_cost(n: int, d: int, size: int) -> float:
    """The cost of a vocabulary entry in the lean mode's gradients, if a slice has `size` entries.

    The cost of du and the cost of dW are added. Each is the number of columns that a core goes through, times the
    product's depth: D for du, N for dW.
    """
    du = mosaic_gpu_rounds(mosaic_gpu_tiles(d, n, size), n, size) * d
    dw = mosaic_gpu_rounds(mosaic_gpu_tiles(n, size, d), size, d) * n
    return (du + dw) / size


def mosaic_gpu_chunk_cost(n: int, d: int, tokens: int) -> float:
    """The cost of the fast mode's gradients in chunks of `tokens` tokens, in columns that a core goes through.

    The first term is the product that makes dX. Idle time of a core counts as a quarter, because the other cores run
    faster meanwhile: their power is limited. (On an H200, 10.4 rounds of 5,504 tokens took 0.7 % longer a
    token than 8.97 rounds of 4,736.) The second term is the sum of dW. If there are several chunks, each reads and
    writes three bytes an entry, which costs 3 % of D; the first does not read, and the last writes two. (6 bytes an
    entry took 1.5 ms beside dX's 52 at (16384, 8192, 128256).)
    """

    def rounds(rows):
        return mosaic_gpu_rounds(mosaic_gpu_tiles(2**20, rows, d), rows, d)

    whole, rest = divmod(n, tokens)
    without_idling = n * d / (ROWS * NUM_CORES)
    with_idling = whole * rounds(tokens) + (rounds(rest) if rest else 0)
    passes = cdiv(n, tokens) - 2 / 3 if tokens < n else 0
    return without_idling + 0.25 * (with_idling - without_idling) + passes * 0.03 * d


def mosaic_gpu_products(n: int, d: int, v: int, tokens: int, kept: KeptEntries | None) -> float:
    """The cost of mode "fast", in products of 2·N·D·V operations.

    Three, and what chunks of `tokens` tokens cost more by `mosaic_gpu_chunk_cost`. With `kept` it is one chunk. Then
    the logits of what is not kept are multiplied once more, at 1.06 of a product, and each slice reads and writes dX's
    float32 sum (at 4.2 TB/s and 690 TFLOP/s). What two H200s took more than for one chunk is within 0.05 of that with
    `kept`, and within 0.07 with 5 to 16 chunks (benchmarks/results/loss_h200.md).
    """
    chunks = 2.0 + mosaic_gpu_chunk_cost(n, d, n if kept else tokens) * ROWS * NUM_CORES / (n * d)
    return chunks if kept is None else chunks + 1.06 * (1 - kept.total / v) + 660 / v * cdiv(v, kept.first)


def mosaic_gpu_sum_tiles() -> Tiles:
    """Tiles, in turn, of a product that is added to memory: one tile's sums move while the other is multiplied."""
    return Tiles(columns=128, in_turn=True, stages=4, snake_width=8)


@dataclasses.dataclass(frozen=True)
class TpuConfig:
    """Tile of hidden (n, d) and of the weight (v, d).

    `keeps_hidden` says whether a tile of hidden is copied once to an array of 32-bit registers, in which it stays while
    the weight's tiles pass. Values of two bytes arrive in halves of registers. Without the copy these are put together,
    and spilled, for each product.
    """

    n_block_size: int
    v_block_size: int
    d_block_size: int
    keeps_hidden: bool


def tpu_config(
    n: int,
    v: int,
    d: int,
    itemsize: int,
    vmem_bytes: int,
    *,
    num_statistics: int = 5,
    keeps_maxima: bool = False,
    num_vectors: int = 0,
) -> TpuConfig:
    """Square tiles of 1,024, or of the size that fits.

    If d is 4,096 or less, a tile has all of d. Up to 8,192 it has all of d and half of the columns. If d is larger, it
    has the widest slice of d up to 2,048. A tile also has half of the columns if the last tile would be mostly empty.

    A tile of r rows with all of d makes r FLOP for each byte that it reads (bf16). A tile with a slice of d makes half
    as many, because hidden is read again for each weight tile. v6e's HBM asks for 561 FLOP a byte, which 1,024 rows
    with all of d give. In 16 MiB there is room for 512 rows.

    The memory that is left free has room for five statistics of a tile's rows. More statistics are counted.
    `keeps_maxima` says whether the rows' maxima are written too, in mode "fast". `num_vectors` is the number of vectors
    among bias and class weights: each spills as much as a product. Maxima and vectors are counted if a tile has a slice
    of d. If they were not, v4's 16 MiB would be exceeded by 0.06 MiB (maxima at (8192, 4096, 128256)) and 1.34 MiB (all
    options at (8192, 8192, 128256)). A tile with all of d has room for them: it spills less than is counted.
    """
    room = vmem_bytes - max(4 * 2**20, vmem_bytes // 8)
    # The compiler writes out the product of one tile, and float32 at 'highest' six times. Beyond `most` multiplications
    # that takes minutes.
    blocks, deepest, most = ((1024, 512, 256, 128), 2048, 2**32) if itemsize <= 2 else ((512, 256, 128), 512, 2**28)
    slices = [size for size in range(128, min(d - 1, deepest) + 1, 128) if d % size == 0]
    for block in blocks:
        whole = [(width, d) for width in (block, block // 2) if block * width * d <= most or d % 128]
        for width, d_block_size in whole + [(block, size) for size in reversed(slices)]:
            width = width if round_up(v, width) - v <= v // 16 else width // 2
            n_block_size, v_block_size = min(block, round_up(n, 16)), min(max(width, 128), round_up(v, 128))
            tiles = TpuConfig(n_block_size, v_block_size, d_block_size, d_block_size == d and itemsize == 2)
            needed = tpu_vmem_bytes(tiles, itemsize) + tpu_row_bytes(n_block_size, num_statistics - 5)
            if d_block_size < d:
                maxima = 2 * 4 * 128 * n_block_size if keeps_maxima else 0  # double-buffered, in 128 lanes
                needed += maxima + num_vectors * 4 * n_block_size * v_block_size
            if needed <= room:
                return tiles
    return TpuConfig(min(128, round_up(n, 16)), 128, min([*slices, d]), keeps_hidden=False)


def tpu_row_bytes(n: int, num_statistics: int) -> int:
    """Bytes of the statistics of n rows: 128 lanes per row while they are computed, and twice that for the output."""
    return max(0, num_statistics) * 3 * 4 * 128 * n


def tpu_vmem_bytes(tiles: TpuConfig, itemsize: int) -> int:
    """The VMEM that a kernel with these tiles needs."""
    n, v, d = tiles.n_block_size, tiles.v_block_size, tiles.d_block_size
    product = 4 * n * v
    spilled = 2 * product  # at most: 1 product in both kernels with all of d, 1.3 otherwise, more with all options
    written = 2 * n * v * itemsize  # double-buffered, by the gradient only
    read = 2 * (n + v) * d * itemsize  # double-buffered
    kept = n * d * itemsize if tiles.keeps_hidden else 0
    return product + spilled + written + read + kept
