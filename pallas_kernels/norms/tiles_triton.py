"""Tile sizes of a pass over rows: pure functions of shape, dtype and direction."""

import dataclasses
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from liger_jax.pallas_kernels._tiles import cdiv, next_power_of_2, round_up

TRITON_MAX_WIDTH = 65536  # one row in registers: 128 float32 a thread at 16 warps
MULTIPROCESSORS = 132  # of an H100 or H200
HOPPER_SHARED_BYTES = 223 * 2**10  # of a block's 227 KiB: barriers and sums along rows take the rest
HOPPER_MOST_STAGES = 8
HOPPER_MOST_BARRIERS = 32  # of one array
# Teams of a block × warpgroups of a team, by sums over rows and by the most columns, as measured on an H200
# (benchmarks/results/row_tiles.md): a team of one warpgroup meets no other, and teams wait at different times.
HOPPER_TEAMS = {
    0: {7168: (4, 1), 8192: (2, 4)},
    1: {3072: (3, 1), 4096: (2, 1)},
    2: {2560: (4, 1), 3072: (3, 1), 4096: (2, 1), 7168: (2, 2)},
}
# Beyond, warpgroups of the one team × elements of a piece for each thread, best first: accesses of 16 bytes, then of 8;
# many warps, then few.
HOPPER_SHARES = (4, 8), (3, 8), (4, 4), (3, 4), (2, 8), (2, 4)
# Registers of a thread for sums over rows, of 255, 168, 128, 80 and 64, by warpgroups.
HOPPER_SUMS = {2: 128, 3: 96, 4: 64, 6: 40, 8: 24}
TPU_VMEM_BYTES = 12 * 2**20  # of the default 16 MiB scope
TPU_CHUNK = 512  # columns at a time
TPU_GROUP_SIZE = 2**18  # elements at a time: independent work that hides the latency of sums across lanes


@dataclasses.dataclass(frozen=True)
class TritonConfig:
    """Rows a step, pieces of a row, their number, warps, programs, and steps of each.

    loads_ahead: the next step's rows. keeps_columns: in registers, rather than read where they are used. streams: what
    is written leaves the L2 cache before what is read does.
    """

    n_block_size: int
    d_block_size: int
    num_pieces: int
    num_warps: int
    num_programs: int
    num_steps: int = 1
    loads_ahead: bool = True
    keeps_columns: bool = False
    streams: bool = False

    def __post_init__(self) -> None:
        for size in (self.n_block_size, self.d_block_size):
            if size != next_power_of_2(size):
                raise ValueError(f"{size} must be a power of two: Triton's arrays come in such sizes only.")

    @property
    def width(self) -> int:
        """Of all pieces."""
        return self.num_pieces * self.d_block_size


@dataclasses.dataclass(frozen=True)
class MosaicGpuConfig:
    """How a team deals out a row: each warpgroup gets pieces of 4 × `warp_size` columns, of which each warp has one.

    stages: how many rows of each matrix shared memory holds for a team, the one that is computed among them.
    """

    num_teams: int  # of a block: rows at a time
    team_size: int  # warpgroups
    vec_size: int  # of a thread's elements of a piece
    num_pieces: int  # of a warpgroup
    stages: tuple[int, ...]

    @property
    def num_warpgroups(self) -> int:
        """Of a block."""
        return self.num_teams * self.team_size

    @property
    def warp_size(self) -> int:
        """Columns of a piece that one warp has."""
        return 32 * self.vec_size

    @property
    def height(self) -> int:
        """Of a warpgroup's columns as an array of `warp_size` columns."""
        return 4 * self.num_pieces


def previous_power_of_2(n: int) -> int:
    """The largest that is at most n, and at least 1."""
    return 1 << max(0, n.bit_length() - 1)


class _Share(NamedTuple):
    """How a pass over rows is dealt out to programs.

    elements: of a step, or one row if that has more. programs: of a core, or None for one of each step. piece: columns
    of it at most.
    """

    elements: int
    num_warps: int
    programs: int | None
    piece: int


_Table = Mapping[int, _Share]  # by the most columns of 16 bits

# On an H200 each within a few per cent of the best tile, of 16,384 rows and more in bfloat16
# (benchmarks/results/row_tiles.md). One warp has a row of up to 5,120 columns, or two of 4,096, in its registers: warps
# that share a row wait for each other at each of its sums.
_NARROW: _Table = {1024: _Share(1024, 1, None, 512), 4096: _Share(1, 1, None, 1024)}
_ONE_MATRIX: _Table = {
    **_NARROW,
    5120: _Share(1, 1, None, 512),
    7168: _Share(1, 8, 4, 1024),
    8192: _Share(1, 16, 2, 8192),
    TRITON_MAX_WIDTH: _Share(1, 16, None, 4096),
}
_TWO_STAGES: _Table = {**_ONE_MATRIX, 7168: _Share(1, 4, None, 1024), 8192: _Share(1, 4, 2, 4096)}
_TWO_MATRICES: _Table = {
    **_NARROW,
    7168: _Share(1, 8, None, 1024),
    8192: _Share(1, 16, None, 8192),
    TRITON_MAX_WIDTH: _Share(1, 8, 2, 4096),
}
# A core holds eight programs of one warp that have wide rows. So few rows would come in two waves, the second almost
# empty, and more warps a row are faster: at 5,120 columns 14.7 µs, of one warp 17.2.
_FEW_ROWS = 2048
_FEW = {1024: _NARROW[1024], 3072: _NARROW[4096], 5120: _Share(1, 4, None, 4096)}
# With sums over rows programs walk over them: registers of a core hold two steps and these sums.
_ONE_SUM: _Table = {
    512: _Share(512, 1, 16, 512),
    1024: _Share(2048, 4, 4, 1024),
    3072: _Share(1, 4, 4, 512),
    4096: _Share(1, 8, 2, 1024),
    7168: _Share(1, 4, 2, 1024),
    8192: _Share(1, 16, 1, 8192),
    TRITON_MAX_WIDTH: _Share(1, 16, 1, 4096),
}
_THREE_MATRICES: _Table = {
    1024: _Share(1024, 1, 8, 512),
    2560: _Share(1, 4, 3, 1024),
    4096: _Share(1, 4, 2, 2048),
    8192: _Share(1, 16, 1, 8192),
    TRITON_MAX_WIDTH: _Share(1, 8, 1, 4096),
}
_TWO_SUMS: _Table = {
    512: _Share(1024, 1, 8, 512),
    1024: _Share(2048, 4, 4, 1024),
    2048: _Share(1, 4, 4, 512),
    2560: _Share(1, 4, 3, 512),
    3584: _Share(1, 8, 2, 1024),
    4096: _Share(1, 4, 2, 2048),
    7168: _Share(1, 8, 1, 1024),
    8192: _Share(1, 16, 1, 8192),
    TRITON_MAX_WIDTH: _Share(1, 8, 1, 4096),
}


def _table(n: int, num_rows: int, num_stages: int, num_sums: int) -> _Table:
    """For n rows of so many matrices, with so many sums along a row one after the other and over all rows."""
    if num_rows > 2:
        return _THREE_MATRICES
    if num_sums:
        return _ONE_SUM if num_sums == 1 else _TWO_SUMS
    table = _TWO_MATRICES if num_rows == 2 else _ONE_MATRIX if num_stages <= 1 else _TWO_STAGES
    return table if n > _FEW_ROWS else _FEW | {width: share for width, share in table.items() if width > max(_FEW)}


def piece_size(d: int, most: int) -> int:
    """The largest power of two up to `most` with at most a seventh idle in all pieces; any of up to 1,024 columns."""
    if d <= 1024:
        return min(most, next_power_of_2(d))
    return max(2**k for k in range(7, most.bit_length()) if 7 * (round_up(d, 2**k) - d) <= d)


def triton_config(n: int, d: int, itemsize: int, num_rows: int, num_stages: int, num_sums: int) -> TritonConfig:
    """The tiles for n rows of d elements of `itemsize` bytes.

    `num_rows` is how many matrices are read, `num_stages` how many sums along a row follow each other, `num_sums` how
    many sums over all rows are made.
    """
    columns = min(d * cdiv(itemsize, 2), TRITON_MAX_WIDTH)  # of 16 bits that fill as many registers
    table = _table(n, num_rows, num_stages, num_sums)
    share = table[min(width for width in table if columns <= width)]
    d_block_size = piece_size(d, share.piece)
    num_pieces = cdiv(d, d_block_size)
    n_block_size = min(next_power_of_2(n), previous_power_of_2(share.elements // (num_pieces * d_block_size)))
    num_blocks = cdiv(n, n_block_size)
    num_programs = num_blocks if share.programs is None else min(num_blocks, share.programs * MULTIPROCESSORS)
    is_wide = columns > 8192  # registers hold no second step beside the sums, and no columns
    return TritonConfig(
        n_block_size,
        d_block_size,
        num_pieces,
        share.num_warps,
        num_programs,
        cdiv(num_blocks, num_programs),
        loads_ahead=not (is_wide and num_sums),
        keeps_columns=not is_wide and share.programs is not None,
        # On an H200 worth 1 to 1.7 % forward at 8,192 columns of bfloat16 and 1 % backward at 2,048 and 2,304, but
        # nothing forward up to 4,096 and backward at 896 and 1,536. Others were not measured.
        streams=n > _FEW_ROWS and columns > (1536 if num_sums else 4096),
    )


def _hopper_shares(d: int, num_sums: int) -> Iterator[tuple[int, int, int]]:
    """Teams, warpgroups of each, and elements of a thread's piece, best first."""
    teams = [share for most, share in HOPPER_TEAMS.get(num_sums, {}).items() if d <= most]
    yield from ((*share, vec_size) for share in teams[:1] for vec_size in (8, 4, 2))
    yield from ((1, *share) for share in HOPPER_SHARES)


def _hopper_stages(row_sizes: Sequence[int], shared_bytes: int, num_warpgroups: int) -> tuple[int, ...] | None:
    """How many rows of each matrix, of so many bytes a row, shared memory holds; None where two are too many."""
    most = min(HOPPER_MOST_STAGES, HOPPER_MOST_BARRIERS // num_warpgroups, shared_bytes // sum(row_sizes))
    if most >= 2:
        return (most,) * len(row_sizes)
    # The last matrix may wait for its place: meanwhile the others' next rows arrive.
    stages = (2,) * (len(row_sizes) - 1) + (1,)
    fits = len(row_sizes) > 1 and sum(map(operator.mul, stages, row_sizes)) <= shared_bytes
    return stages if fits else None


def mosaic_gpu_config(d: int, row_bytes: Sequence[int], column_bytes: int, num_sums: int) -> MosaicGpuConfig | str:
    """How rows of d columns are dealt out, or the reason why they are not.

    `row_bytes` are an element's of each matrix that is read, `column_bytes` an element's of all arrays of columns
    together, `num_sums` how many sums over all rows are made.
    """
    reason = f"rows of {d} columns have no even shares for warpgroups whose registers hold their sums over rows"
    for num_teams, team_size, vec_size in _hopper_shares(d, num_sums):
        num_threads, num_warpgroups = 128 * team_size, num_teams * team_size
        if d % (num_threads * vec_size) or vec_size * max(row_bytes) > 16:
            continue
        if num_sums and d * num_sums > num_threads * HOPPER_SUMS[num_warpgroups]:
            continue
        row_sizes, shared_bytes = [num_teams * d * size for size in row_bytes], HOPPER_SHARED_BYTES - d * column_bytes
        stages = _hopper_stages(row_sizes, shared_bytes, num_warpgroups)
        if stages is not None:
            return MosaicGpuConfig(num_teams, team_size, vec_size, d // (num_threads * vec_size), stages)
        if num_teams == 1:
            reason = f"two rows of {d} columns exceed shared memory"
    return reason


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
