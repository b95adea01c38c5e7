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


@dataclasses.dataclass(frozen=True)
class TritonBlocks:
    """Rows that a Triton program computes, columns that it walks over at a time, warps, and stages of the copies.

    Of shared memory an L4 has 99 KiB: about 2·width·(rows + 2·columns·(num_stages − 1)) bytes.
    Of registers a thread has 255: rows·columns/(32·num_warps) for each tile of scores, and rows·width/(32·num_warps)
    for each accumulator.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int

    def __post_init__(self):
        for name in ("rows", "columns"):
            if getattr(self, name) not in (16, 32, 64, 128):
                raise ValueError(f"{name}={getattr(self, name)} must be a power of two from 16 to 128.")


TRITON_FORWARD = {
    64: TritonBlocks(128, 64, 8, 3),
    128: TritonBlocks(128, 64, 8, 3),
    256: TritonBlocks(64, 32, 8, 2),
}
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
