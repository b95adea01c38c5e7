"""Tiles of a row pass on a TPU."""

from liger_jax.pallas_kernels.tiles import next_power_of_2, previous_power_of_2, round_up

VMEM_BYTES = 12 * 2**20  # of the default 16 MiB scope
CHUNK_SIZE = 512  # columns that are computed at a time
GROUP_ELEMENTS = 2**18  # that are computed at a time: independent work that hides the latency of sums across lanes


def n_block_size(n: int, d: int, itemsizes: int, num_totals: int) -> int:
    """Rows of a step: the most that fit, a power of two from 16 (bfloat16's tile) to 512; 0 if 16 do not fit.

    `itemsizes` is the sum of the bytes of an element over all matrices that are read or written.
    """
    d = round_up(d, 128)
    row_bytes = 2 * itemsizes * d  # double-buffered
    scale_and_bias, partial_sums = 2, 8 * num_totals
    shared_bytes = 2 * 4 * d * (scale_and_bias + partial_sums)  # double-buffered float32
    fitting = previous_power_of_2(max(1, (VMEM_BYTES - shared_bytes) // row_bytes))
    return 0 if fitting < 16 else min(512, fitting, max(16, next_power_of_2(n)))


def group_size(n_block_size: int, d: int) -> int:
    """Rows of a step that are computed at a time."""
    return min(n_block_size, 64, max(16, previous_power_of_2(GROUP_ELEMENTS // d)))
