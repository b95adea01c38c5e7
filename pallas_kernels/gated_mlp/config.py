"""Tile sizes of the gated feed-forward's products, and the sizes at which Hopper's kernels are faster than XLA."""

from liger_jax.pallas_kernels._hopper_tiles import ROWS, Tiles
from liger_jax.pallas_kernels.tiles import cdiv

# On an H200 below its power limit, at (N, D, F) = (16384, 2048, 8192): the product that makes up took 754 µs,
# XLA's and its pass 843; the one that makes the gradients 869 and 1030. With 4 stages and as many slots 803 and 932,
# with 3 stages 1019 and 1151: the ring's depth hides the copies. With 5 stages and 2 slots 886 and 954, with shared
# tiles of 256 columns 853 and 1122. Snakes 16 wide were within 1 %, 32 wide took 3 and 8 % longer.
TILES = Tiles(columns=128, in_turn=True, stages=5, snake_width=8)
NUM_SLOTS = 3  # pieces of each matrix that shared memory holds at a time
NUM_NEW_SLOTS = 2  # pieces of a matrix that is written and not read
TILES_OF_SUM = Tiles(columns=256)  # of x's gradient, the sum of two products
# Under the power limit (benchmarks/results/gated_mlp.md), the product that makes up is faster than XLA's at every depth
# but 4,096. There it takes 1 % longer.
DEEPEST_UP = 3072  # between 2,304 and 4,096
LEAST_TILES = 1024  # almost eight tiles for each core; fewer were not measured


def is_large(n: int, f: int) -> bool:
    """Whether (n, f) has so many tiles that the idle cores of the last round do not matter."""
    return cdiv(n, ROWS) * cdiv(f, TILES.columns) >= LEAST_TILES
