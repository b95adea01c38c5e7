"""Tiles of a row pass in Triton: rows a step, pieces of a row, warps, and programs.

The tables were measured on an H200 (benchmarks/results/row_tiles.md, made by `python -m benchmarks.row_tiles`).
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from liger_jax.pallas_kernels.devices import GPUS
from liger_jax.pallas_kernels.tiles import cdiv, next_power_of_2, previous_power_of_2, round_up

MAX_WIDTH = 65536  # one row in registers: 128 float32 a thread at 16 warps
MULTIPROCESSORS = GPUS["h200"].cores


@dataclasses.dataclass(frozen=True)
class TritonTiles:
    """How rows are divided among programs, and how a program runs: its warps and its loads ahead."""

    n_block_size: int  # rows of a step
    d_block_size: int  # columns of a piece
    num_pieces: int  # of a row
    num_warps: int
    num_programs: int
    num_steps: int = 1  # of a program
    loads_ahead: bool = True  # the next step's rows, while this step's are computed
    keeps_vectors: bool = False  # in registers; otherwise they are read where they are used
    evicts_outputs_first: bool = False  # from the L2 cache, so that what is read stays longer

    def __post_init__(self) -> None:
        for name in ("n_block_size", "d_block_size"):
            size = getattr(self, name)
            if size != next_power_of_2(size):
                raise ValueError(f"{name}={size} must be a power of two: Triton's arrays come in such sizes only.")

    @property
    def width(self) -> int:
        """Columns of all pieces."""
        return self.num_pieces * self.d_block_size


class _Share(NamedTuple):
    """How a pass is dealt out to programs."""

    step_elements: int  # at most; a step is one row if that has more
    num_warps: int
    programs_per_core: int | None  # None: one program for each step
    most_columns: int  # of a piece


_Table = Mapping[int, _Share]  # by the most columns of 16 bits

# Each share is within a few per cent of the best tile on an H200, for 16,384 rows and more in bfloat16. One warp holds
# a whole row in its registers, up to 5,120 columns, or 4,096 with two matrices: warps that share a row wait for each
# other at each of its sums.
_NARROW: _Table = {1024: _Share(1024, 1, None, 512), 4096: _Share(1, 1, None, 1024)}
_ONE_MATRIX: _Table = {
    **_NARROW,
    5120: _Share(1, 1, None, 512),
    7168: _Share(1, 8, 4, 1024),
    8192: _Share(1, 16, 2, 8192),
    MAX_WIDTH: _Share(1, 16, None, 4096),
}
_TWO_STAGES: _Table = {**_ONE_MATRIX, 7168: _Share(1, 4, None, 1024), 8192: _Share(1, 4, 2, 4096)}
_TWO_MATRICES: _Table = {
    **_NARROW,
    7168: _Share(1, 8, None, 1024),
    8192: _Share(1, 16, None, 8192),
    MAX_WIDTH: _Share(1, 8, 2, 4096),
}
# A core holds eight programs of one warp with a wide row. A few more rows than that in all cores would come in two
# waves, of which the second is almost empty. Four warps a row are faster then: at 5,120 columns 14.7 µs, not 17.2.
_FEW_ROWS = 2048
_FEW = {1024: _NARROW[1024], 3072: _NARROW[4096], 5120: _Share(1, 4, None, 4096)}
# A pass with totals has few programs, which walk over rows: a core's registers hold two steps and the totals.
_ONE_TOTAL: _Table = {
    512: _Share(512, 1, 16, 512),
    1024: _Share(2048, 4, 4, 1024),
    3072: _Share(1, 4, 4, 512),
    4096: _Share(1, 8, 2, 1024),
    7168: _Share(1, 4, 2, 1024),
    8192: _Share(1, 16, 1, 8192),
    MAX_WIDTH: _Share(1, 16, 1, 4096),
}
_THREE_MATRICES: _Table = {
    1024: _Share(1024, 1, 8, 512),
    2560: _Share(1, 4, 3, 1024),
    4096: _Share(1, 4, 2, 2048),
    8192: _Share(1, 16, 1, 8192),
    MAX_WIDTH: _Share(1, 8, 1, 4096),
}
_TWO_TOTALS: _Table = {
    512: _Share(1024, 1, 8, 512),
    1024: _Share(2048, 4, 4, 1024),
    2048: _Share(1, 4, 4, 512),
    2560: _Share(1, 4, 3, 512),
    3584: _Share(1, 8, 2, 1024),
    4096: _Share(1, 4, 2, 2048),
    7168: _Share(1, 8, 1, 1024),
    8192: _Share(1, 16, 1, 8192),
    MAX_WIDTH: _Share(1, 8, 1, 4096),
}


def _table(n: int, num_matrices: int, num_stages: int, num_totals: int) -> _Table:
    """The shares of a pass over n rows; the arguments mean what they mean in `triton_tiles`."""
    if num_matrices > 2:
        return _THREE_MATRICES
    if num_totals:
        return _ONE_TOTAL if num_totals == 1 else _TWO_TOTALS
    table = _TWO_MATRICES if num_matrices == 2 else _ONE_MATRIX if num_stages <= 1 else _TWO_STAGES
    return table if n > _FEW_ROWS else _FEW | {width: share for width, share in table.items() if width > max(_FEW)}


def piece_size(d: int, most: int) -> int:
    """Columns of a piece: the largest power of two up to `most` that leaves at most a seventh of d's lanes idle.

    Up to 1,024 columns any share may be idle.
    """
    if d <= 1024:
        return min(most, next_power_of_2(d))
    return max(2**k for k in range(7, most.bit_length()) if 7 * (round_up(d, 2**k) - d) <= d)


def triton_tiles(n: int, d: int, itemsize: int, num_matrices: int, num_stages: int, num_totals: int) -> TritonTiles:
    """The tiles for n rows of d elements of `itemsize` bytes.

    `num_matrices` is how many matrices are read, and `num_stages` how many sums along a row are made one after the
    other.
    """
    columns = min(d * cdiv(itemsize, 2), MAX_WIDTH)  # of 16 bits, which fill as many registers
    table = _table(n, num_matrices, num_stages, num_totals)
    share = table[min(width for width in table if columns <= width)]
    d_block_size = piece_size(d, share.most_columns)
    num_pieces = cdiv(d, d_block_size)
    n_block_size = min(next_power_of_2(n), previous_power_of_2(share.step_elements // (num_pieces * d_block_size)))
    num_blocks = cdiv(n, n_block_size)
    most_programs = num_blocks if share.programs_per_core is None else share.programs_per_core * MULTIPROCESSORS
    num_programs = min(num_blocks, most_programs)
    is_wide = columns > 8192  # beside the totals, registers hold no second step, and no vectors
    return TritonTiles(
        n_block_size,
        d_block_size,
        num_pieces,
        share.num_warps,
        num_programs,
        num_steps=cdiv(num_blocks, num_programs),
        loads_ahead=not (is_wide and num_totals),
        keeps_vectors=not is_wide and share.programs_per_core is not None,
        # On an H200 this gains 1 to 1.7 % forward at 8,192 columns of bfloat16, and 1 % backward at 2,048 and 2,304. It
        # gains nothing forward up to 4,096, nor backward at 896 and 1,536. Other widths were not measured.
        evicts_outputs_first=n > _FEW_ROWS and columns > (1536 if num_totals else 4096),
    )
