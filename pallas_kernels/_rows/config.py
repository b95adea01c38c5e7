"""Tile sizes of a pass over rows: pure functions of shape, dtype and direction."""

import dataclasses

from liger_jax.pallas_kernels._tiles import cdiv, next_power_of_2, round_up

TRITON_MAX_WIDTH = 65536  # one row in registers: 128 float32 a thread at 16 warps
MULTIPROCESSORS = 132  # of an H100 or H200
TPU_VMEM_BYTES = 12 * 2**20  # of the default 16 MiB scope
TPU_CHUNK = 512  # columns at a time
TPU_GROUP_SIZE = 2**18  # elements at a time: independent work that hides the latency of sums across lanes


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """Rows a step, pieces of a row, warps, programs, and steps of each.

    keeps_rows: in registers, and the next step's. keeps_columns: these too, rather than read where they are used.
    """

    n_block_size: int
    d_block_sizes: tuple[int, ...]
    num_warps: int
    num_programs: int
    num_steps: int = 1
    keeps_rows: bool = True
    keeps_columns: bool = False

    def __post_init__(self) -> None:
        for size in (self.n_block_size, *self.d_block_sizes):
            if size != next_power_of_2(size):
                raise ValueError(f"{size} must be a power of two: Triton's arrays come in such sizes only.")

    @property
    def d_starts(self) -> tuple[int, ...]:
        """Where the pieces of a row begin."""
        return tuple(sum(self.d_block_sizes[:i]) for i in range(len(self.d_block_sizes)))


def pieces(d: int, largest: int) -> tuple[int, ...]:
    """Powers of two that cover d columns with at most a seventh idle: 5,120 is 4,096 + 1,024, not 8,192."""
    sizes, left = (), d
    while left > largest or next_power_of_2(left) > max(128, left + d // 7):
        sizes += (min(largest, previous_power_of_2(left)),)
        left -= sizes[-1]
    return (*sizes, max(next_power_of_2(left), 128 if sizes else 1))


def previous_power_of_2(n: int) -> int:
    """The largest that is at most n, and at least 1."""
    return 1 << max(0, n.bit_length() - 1)


def triton_config(n: int, d: int, num_rows: int, num_stages: int, num_sums: int) -> TritonConfig:
    """What measured best on an H200 (benchmarks/results/row_tiles.md).

    `num_rows` is how many matrices are read, `num_stages` how many sums along a row follow each other, `num_sums` how
    many sums over all rows are made.
    """
    keeps_rows = d <= 8192
    d_block_sizes = pieces(d, TRITON_MAX_WIDTH if keeps_rows else 4096)
    width = sum(d_block_sizes)
    if not num_sums:
        # 16 elements a thread, and twice as many where a second sum waits for the first.
        size = 2048 * max(1, num_stages)
        n_block_size = min(next_power_of_2(n), max(1, size // next_power_of_2(width)))
        num_warps = min(16, max(4, previous_power_of_2(4 * n_block_size * width // size)))
        num_warps = num_warps if keeps_rows else min(16, 8 * num_rows)
        return TritonConfig(n_block_size, d_block_sizes, num_warps, cdiv(n, n_block_size), keeps_rows=keeps_rows)
    # On each core 8,192 elements at a time and 16 warps; half of these where registers must hold two sums over rows.
    n_block_size = min(next_power_of_2(n), 2 if d * num_sums <= 4096 else 1)
    num_warps = min(16, max(4, next_power_of_2(cdiv(n_block_size * width, 512))))
    num_warps = 4 if num_sums > 1 and 2048 < d <= 4096 else num_warps
    tiles = cdiv(n, n_block_size)
    num_programs = min(tiles, MULTIPROCESSORS * max(1, 8192 // (n_block_size * width)))
    num_steps = cdiv(tiles, num_programs)
    return TritonConfig(
        n_block_size, d_block_sizes, num_warps, num_programs, num_steps, keeps_rows, keeps_columns=keeps_rows
    )


def tpu_n_block_size(n: int, d: int, row_itemsizes: int, num_column_outputs: int) -> int:
    """Rows per step on a TPU: the most that fit, a power of two from 16 (bfloat16's tile) to 512; 0 if none do.

    `row_itemsizes` is the sum over the row inputs and outputs.
    """
    d = round_up(d, 128)
    row_bytes = 2 * row_itemsizes * d  # double-buffered
    shared_bytes = 2 * 4 * d * (2 + 8 * num_column_outputs)  # scale and bias; 8 partial sums of each output
    fitting = previous_power_of_2(max(1, (TPU_VMEM_BYTES - shared_bytes) // row_bytes))
    return 0 if fitting < 16 else min(512, fitting, max(16, next_power_of_2(n)))


def tpu_group_size(n_block_size: int, d: int) -> int:
    """Rows of a step that are computed at a time."""
    return min(n_block_size, 64, max(16, previous_power_of_2(TPU_GROUP_SIZE // d)))
