"""Tile sizes of the grouped product."""

from liger_jax.pallas_kernels._hopper_tiles import Tiles
from liger_jax.pallas_kernels.tiles import previous_power_of_2, round_up

_LEAST_ROWS, _MOST_ROWS = 8, 256
_LANES = 128
# Multiply-adds of one visit on a TPU: the compiler unrolls them, and takes minutes for a few times as many.
_MOST_MACS = 2**28


def xla_rows(m: int, num_groups: int) -> int:
    """Rows of a tile: half of an average group, so that the ends of groups waste half of the products at most."""
    return min(m, max(_LEAST_ROWS, min(_MOST_ROWS, previous_power_of_2(m // (2 * num_groups)))))


# Shared memory, at most 227 KiB: the operands' ring takes 5 · (128 + 128) · 64 · 2 bytes or 4 · (128 + 256) · 64 · 2,
# staged pieces 32 KiB, and of the product alone staged rows 16 KiB. The product is up to a fifth faster where
# warpgroups take tiles in turn. The gradient's groups are short: with half as wide tiles, one warpgroup alone copies
# too slowly what is put together from blocks.
HOPPER_PRODUCT = Tiles(columns=128, in_turn=True, stages=5)
HOPPER_GRADIENT = Tiles(columns=256, stages=4)
STAGED_PIECES = 4  # of 64 rows by 32 columns, for each warpgroup
# Rows of the two blocks in which a group begins and ends, of which XLA makes copies for the gradient.
HOPPER_EDGES = 8, 32
STAGED_COLUMNS = 64  # of 64 rows that leave one by one, for each warpgroup. The copy engine wants 128 bytes a row.


def hopper_edge_bytes(num_groups: int, a_width: int, b_width: int, itemsize: int) -> int:
    """Bytes of these copies, of both factors (M, A) and (M, B), for all groups and one that is empty."""
    return (num_groups + 1) * sum(HOPPER_EDGES) * (a_width + b_width) * itemsize


def tpu_product(m: int, k: int, n: int, num_groups: int, itemsize: int, vmem_bytes: int) -> tuple[int, int] | None:
    """Rows and columns of a tile (M, K) · (K, N) on a TPU, the widest that fit; None if none does."""
    rows, depth = _tpu_rows(m, num_groups), round_up(k, _LANES)

    def bytes_of(columns):
        operands = rows * depth + depth * columns + rows * columns  # of x, w and the result, each twice
        return 2 * operands * itemsize + 2 * rows * columns * 4  # the product, and the rows that are kept

    fitting = [c for c in _tpu_widths(n) if bytes_of(round_up(c, _LANES)) <= vmem_bytes * 3 // 4]
    quick = [c for c in fitting if rows * depth * c <= _MOST_MACS]
    return (rows, max(quick) if quick else min(fitting)) if fitting else None


def tpu_gradient(
    m: int, a_width: int, b_width: int, num_groups: int, itemsize: int, vmem_bytes: int
) -> tuple[int, int, int] | None:
    """Rows, and columns of a and b, of a tile of the weights' gradient: those that read least. None if none fit."""
    rows = _tpu_rows(m, num_groups)

    def bytes_of(a, b):
        a, b = round_up(a, _LANES), round_up(b, _LANES)
        # The factors twice and once in float32; the sum, the product, and the result twice in at most float32.
        return rows * (a + b) * (2 * itemsize + 4) + a * b * 16

    pairs = [(a, b) for a in _tpu_widths(a_width) for b in _tpu_widths(b_width)]
    fitting = [pair for pair in pairs if bytes_of(*pair) <= vmem_bytes * 3 // 4]
    quick = [(a, b) for a, b in fitting if rows * a * b <= _MOST_MACS]
    return (rows, *min(quick or fitting, key=lambda pair: 1 / pair[0] + 1 / pair[1])) if fitting else None


def _tpu_rows(m: int, num_groups: int) -> int:
    """Half of an average group, in powers of two: fewer rows leave the matrix unit waiting for weights."""
    return min(m, max(128, min(512, previous_power_of_2(m // (2 * num_groups)))))


def _tpu_widths(n: int) -> list[int]:
    """Widths of tiles that cover an axis without a rest: multiples of a register's lanes, or all of it."""
    return [n, *(width for width in range(_LANES, n, _LANES) if n % width == 0)]
