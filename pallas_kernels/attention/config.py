"""How much Hopper's attention takes at a time, by head width."""

import dataclasses

WIDTHS = (64, 128, 256)  # others are padded to the next


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Columns of scores that a warpgroup makes at a time for its 64 rows, and places in the rings of what they need.

    Of shared memory there are 227 KiB; at width H, 4 bytes a place, column and unit of H for both rings.
    Of registers there are 232 a thread: columns/2 float32 for each tile of scores, and H/2 for each accumulator.
    """

    columns: int
    stages: int
    second_stages: int = 0  # of the second ring, where it has fewer


FORWARD = {64: Blocks(128, 4), 128: Blocks(128, 2), 256: Blocks(64, 2)}
QUERY_GRADIENT = {64: Blocks(128, 4), 128: Blocks(64, 4), 256: Blocks(64, 2, 1)}
KEY_GRADIENTS = {64: Blocks(64, 4), 128: Blocks(64, 3), 256: Blocks(64, 2)}
KEY_GRADIENTS_IN_TURNS = {64: Blocks(64, 4), 128: Blocks(64, 4)}  # an even number of places
