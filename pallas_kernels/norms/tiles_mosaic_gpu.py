"""Tiles of a row pass in Mosaic GPU: how a block's warpgroups share rows."""

import dataclasses
import operator
from collections.abc import Iterator, Sequence

from liger_jax.pallas_kernels.devices import GPUS

SHARED_BYTES = GPUS["h200"].block_shared_bytes - 4 * 2**10  # barriers and sums along rows take the rest
MOST_STAGES = 8
MOST_BARRIERS = 32  # of one array
# Teams of a block × warpgroups of a team: by the number of totals, and then by the most columns. Measured on an H200
# (benchmarks/results/row_tiles.md): a team of one warpgroup waits for no other, and teams wait at different times.
TEAMS = {
    0: {7168: (4, 1), 8192: (2, 4)},
    1: {3072: (3, 1), 4096: (2, 1)},
    2: {2560: (4, 1), 3072: (3, 1), 4096: (2, 1), 7168: (2, 2)},
}
# For wider rows there is one team: its warpgroups × a thread's elements of a piece. Best first: accesses of 16 bytes
# before those of 8, many warps before few.
SHARES_OF_ONE_TEAM = (4, 8), (3, 8), (4, 4), (3, 4), (2, 8), (2, 4)
# A thread's registers for totals, by a block's warpgroups. In all a thread has 255, 168, 128, 80 or 64.
REGISTERS_FOR_TOTALS = {2: 128, 3: 96, 4: 64, 6: 40, 8: 24}


@dataclasses.dataclass(frozen=True)
class MosaicGpuTiles:
    """How a team shares a row. A warpgroup takes pieces of 4 × `warp_size` columns, and each of its warps a quarter.

    `stages` says how many rows of each matrix a team has room for in shared memory. The row that is being computed is
    one of them.
    """

    num_teams: int  # of a block; each has a row at a time
    team_size: int  # warpgroups
    vec_size: int  # a thread's elements of a piece
    num_pieces: int  # of a warpgroup
    stages: tuple[int, ...]

    @property
    def num_warpgroups(self) -> int:
        """Warpgroups of a block."""
        return self.num_teams * self.team_size

    @property
    def warp_size(self) -> int:
        """Columns of a piece that one warp has."""
        return 32 * self.vec_size

    @property
    def height(self) -> int:
        """Height of a warpgroup's columns, as an array of `warp_size` columns."""
        return 4 * self.num_pieces


def _shares(d: int, num_totals: int) -> Iterator[tuple[int, int, int]]:
    """Teams, warpgroups of a team, and a thread's elements of a piece, best first."""
    teams = [share for most, share in TEAMS.get(num_totals, {}).items() if d <= most]
    yield from ((*share, vec_size) for share in teams[:1] for vec_size in (8, 4, 2))
    yield from ((1, *share) for share in SHARES_OF_ONE_TEAM)


def _stages(row_sizes: Sequence[int], shared_bytes: int, num_warpgroups: int) -> tuple[int, ...] | None:
    """How many rows of each matrix fit shared memory; None if two do not. `row_sizes` are in bytes."""
    most = min(MOST_STAGES, MOST_BARRIERS // num_warpgroups, shared_bytes // sum(row_sizes))
    if most >= 2:
        return (most,) * len(row_sizes)
    # One row of the last matrix is enough: while it waits for its place, the other matrices' next rows arrive.
    stages = (2,) * (len(row_sizes) - 1) + (1,)
    fits = len(row_sizes) > 1 and sum(map(operator.mul, stages, row_sizes)) <= shared_bytes
    return stages if fits else None


def mosaic_gpu_tiles(
    d: int, matrix_itemsizes: Sequence[int], vector_bytes: int, num_totals: int
) -> MosaicGpuTiles | str:
    """How rows of d columns are dealt out, or the reason why they cannot be.

    `matrix_itemsizes` has the bytes of an element of each matrix that is read. `vector_bytes` is the sum of the bytes
    of an element over all vectors.
    """
    reason = f"rows of {d} columns have no even shares for warpgroups whose registers hold their sums over rows"
    for num_teams, team_size, vec_size in _shares(d, num_totals):
        num_threads, num_warpgroups = 128 * team_size, num_teams * team_size
        if d % (num_threads * vec_size) or vec_size * max(matrix_itemsizes) > 16:
            continue
        if num_totals and d * num_totals > num_threads * REGISTERS_FOR_TOTALS[num_warpgroups]:
            continue
        row_sizes = [num_teams * d * itemsize for itemsize in matrix_itemsizes]
        stages = _stages(row_sizes, SHARED_BYTES - d * vector_bytes, num_warpgroups)
        if stages is not None:
            return MosaicGpuTiles(num_teams, team_size, vec_size, d // (num_threads * vec_size), stages)
        if num_teams == 1:
            reason = f"two rows of {d} columns exceed shared memory"
    return reason
