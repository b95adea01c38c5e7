"""The memory of the fused linear loss's kernels for TPU."""

from liger_jax.pallas_kernels.fused_linear_cross_entropy.buffers import (
    Buffers,
    Memory,
    Sizes,
    entries_of_a_quarter,
    gathered_slice_bytes,
    logit_gradient_bytes,
    one_chunk_or_8192,
    row_number_bytes,
    summed_bytes,
)
from liger_jax.pallas_kernels.tiles import cdiv, round_up

_LEAST_ENTRIES = 1024  # of a tile


def fast(sizes: Sizes, tokens: int) -> Buffers:
    """A chunk holds E, which du overwrites, but no float32 logits."""
    du = logit_gradient_bytes(sizes, tokens, sizes.v)
    hidden = tokens * sizes.d * sizes.itemsize  # without the rows that do not count, and then its gradient
    part_maxima = 4 * tokens * round_up(cdiv(sizes.v, 256), 128)
    chunk = du + part_maxima + hidden + row_number_bytes(tokens)
    is_whole = tokens >= sizes.n  # then dW is one product
    of_weight = sizes.weight_copy_bytes if is_whole else summed_bytes(sizes, tokens, du)
    return Buffers(chunk + sizes.gathered_bytes + of_weight, chunk)


def lean(sizes: Sizes, entries: int) -> Buffers:
    """A slice has du: the weight's slice is read, and dW's is written, in its place."""
    of_slice = _slice_bytes(sizes, entries)
    fixed = sizes.weight_copy_bytes + row_number_bytes(sizes.n)
    if not any(sizes.gradients):
        return Buffers(fixed, of_slice)
    return Buffers(of_slice + sizes.hidden_sum_bytes + fixed, of_slice)


def _slice_bytes(sizes: Sizes, entries: int) -> int:
    if sizes.weight_is_split:
        return gathered_slice_bytes(sizes, entries)
    return logit_gradient_bytes(sizes, max(sizes.n, 1), entries)


def _entries(sizes: Sizes) -> int:
    """Up to 64 MiB of du, and up to 7,168 entries."""
    most = min(max(2048, 2**26 // (sizes.itemsize * max(sizes.n, 1))), 7168)
    quarter = entries_of_a_quarter(sizes, _slice_bytes(sizes, 1))
    return max(_LEAST_ENTRIES, min(most, quarter) // 1024 * 1024)


MEMORY = Memory(
    fast=fast,
    lean=lean,
    preferred_tokens=lambda sizes: one_chunk_or_8192(sizes, fast),
    preferred_entries=_entries,
    least_entries=_LEAST_ENTRIES,
)
