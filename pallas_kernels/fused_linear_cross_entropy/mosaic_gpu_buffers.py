"""The memory of the fused linear loss's kernels for Hopper."""

from liger_jax.pallas_kernels._hopper_tiles import ROWS
from liger_jax.pallas_kernels.fused_linear_cross_entropy import config
from liger_jax.pallas_kernels.fused_linear_cross_entropy.buffers import (
    LEAST_ENTRIES,
    Buffers,
    Memory,
    Sizes,
    entries_of_a_quarter,
    gathered_slice_bytes,
    logit_gradient_bytes,
    one_chunk_or_8192,
)
from liger_jax.pallas_kernels.fused_linear_cross_entropy.mosaic_gpu_operands import copies_slices, takes
from liger_jax.pallas_kernels.tiles import cdiv, round_up

_CUBLAS_BYTES = 32 * 2**20  # cuBLAS's workspace, for XLA's products
_ROW_BYTES = 128  # statistics, labels and cotangents of a row, where no other buffer leaves room for them


def fast(sizes: Sizes, tokens: int) -> Buffers:
    """A chunk holds E, which du overwrites."""
    n, d, v, needs_weight = sizes.n, sizes.d, sizes.v, sizes.gradients.weight
    chunk = _chunk_bytes(sizes, tokens)
    if not any(sizes.gradients):
        return Buffers(_forward_bytes(sizes), chunk)
    is_whole = tokens >= n
    dw_low_byte = 0 if is_whole else sizes.weight_sum_bytes // 4  # the lowest of the sum's three; dW has the upper two
    # With one chunk dW is written last. Until then the weight's copy is in its place.
    weight_copy = 0 if is_whole and needs_weight else sizes.weight_copy_bytes
    of_parts = 0
    if not takes(v, "fast", sizes.vocab_dim):
        is_copied = copies_slices(sizes.vocab_dim)
        # A copy of the weight's whole tiles. Their share of dW has its own buffer until it is put in its place.
        weight_slice = v * d * sizes.itemsize if is_copied and not sizes.weight_copy_bytes else 0
        # (One chunk's dW needs no such buffer at some sizes of a weight that is cast: XLA writes it to its place.)
        part_of_dw = v * d * sizes.weight_itemsize if needs_weight and (is_copied or not is_whole) else 0
        of_parts = max(weight_slice, part_of_dw)  # the second is made when the first is free
        if part_of_dw and not is_whole:
            # Both live at the same time here. The largest of the other buffers is where dW will be.
            in_its_place = max(weight_slice, dw_low_byte, 0 if is_copied else weight_copy)
            of_parts = weight_slice + part_of_dw - in_its_place
    of_weight = dw_low_byte + weight_copy + of_parts
    return Buffers(chunk + sizes.gathered_bytes + _padded_hidden_bytes(sizes) + _CUBLAS_BYTES + of_weight, chunk)


def lean(sizes: Sizes, entries: int) -> Buffers:
    """A slice has du, and copies of its rows of the weight and of dW where the kernels cannot take them in place."""
    of_slice, weight_copy, forward = _slice_bytes(sizes, entries), sizes.weight_copy_bytes, _forward_bytes(sizes)
    if not any(sizes.gradients):
        return Buffers(forward, of_slice)
    # Hidden without the rows that do not count is where dX will be.
    masked_hidden = 0 if sizes.gradients.hidden else sizes.n * sizes.d * sizes.itemsize
    if sizes.gradients.weight and not weight_copy:
        forward -= _whole_tiles_bytes(sizes)  # which are where dW will be
    backward = weight_copy + of_slice + masked_hidden + sizes.hidden_sum_bytes + _padded_hidden_bytes(sizes)
    return Buffers(max(backward, forward), of_slice)


def kept(sizes: Sizes, budget_bytes: int) -> tuple[config.KeptEntries, Buffers] | None:
    """Arrays of E, or of du, and numbers of each tile of logits; later only the tiles' maxima, and the sum of dX.

    The memory of the weight's gradient must hold E, which the kernels write there in place.
    """
    n, d, v = sizes.n, sizes.d, sizes.v
    same = sizes.itemsize == sizes.weight_itemsize == 2 and sizes.vocab_dim == 0 and not sizes.weight_is_split
    if not (same and sizes.gradients.weight and n):
        return None
    rows = round_up(n, ROWS)
    masked_hidden = 0 if sizes.gradients.hidden else n * d * sizes.itemsize
    beside = masked_hidden + sizes.hidden_sum_bytes + _padded_hidden_bytes(sizes)
    in_turn = d < config.SHORT_DEPTH
    tile = 128 if in_turn else 192 if d % 256 else 256

    def count(kept: config.KeptEntries) -> int:
        arrays = logit_gradient_bytes(sizes, rows, kept.first + kept.rest)
        of_kept, of_others = (4 * rows * cdiv(entries, tile) for entries in (kept.total, v - kept.total))
        # A kept tile writes its maximum and sum, others their log-sum-exp, and all the target if it is not gathered.
        numbers = (2 + (not in_turn)) * of_kept + (1 + (not in_turn)) * of_others
        most = max(numbers, of_kept + masked_hidden + sizes.hidden_sum_bytes)
        return arrays + _padded_hidden_bytes(sizes) + most + _ROW_BYTES * rows

    most = max(0, budget_bytes - beside) // (sizes.itemsize * rows)
    arrays = min(most, v)
    while entries := config.kept_entries(n, d, v, arrays):
        extra = count(entries)
        if extra <= budget_bytes:
            return entries, Buffers(extra, logit_gradient_bytes(sizes, rows, entries.first + entries.rest))
        arrays = entries.first + entries.rest - 256
    return None


def _chunk_bytes(sizes: Sizes, tokens: int) -> int:
    hidden = tokens * sizes.d * sizes.itemsize  # without the rows that do not count, and then its gradient
    # Each tile of logits writes a row's maximum; a tile has 128 columns if the depth is short, and else 256 or 192.
    tile_maxima = 4 * tokens * cdiv(sizes.v, 128 if sizes.d < config.SHORT_DEPTH else 256)
    return logit_gradient_bytes(sizes, tokens, sizes.v) + tile_maxima + hidden


def _slice_bytes(sizes: Sizes, entries: int) -> int:
    if sizes.weight_is_split:
        return gathered_slice_bytes(sizes, entries)
    du = logit_gradient_bytes(sizes, max(sizes.n, 1), entries)
    if takes(sizes.v, "lean", sizes.vocab_dim):
        return du
    part_of_dw = sizes.weight_itemsize if copies_slices(sizes.vocab_dim) else 0
    part_of_weight = 0 if sizes.weight_copy_bytes and part_of_dw else sizes.itemsize
    return du + entries * sizes.d * (part_of_weight + part_of_dw)


def _forward_bytes(sizes: Sizes) -> int:
    """The bytes of the statistics."""
    tile_statistics = 2 * 4 * sizes.n * cdiv(sizes.v, 256)
    return sizes.weight_copy_bytes + _padded_hidden_bytes(sizes) + _whole_tiles_bytes(sizes) + tile_statistics


def _padded_hidden_bytes(sizes: Sizes) -> int:
    """The copy of hidden with whole tiles of rows."""
    return 0 if sizes.n % ROWS == 0 else round_up(sizes.n, ROWS) * sizes.d * sizes.itemsize


def _whole_tiles_bytes(sizes: Sizes) -> int:
    """The copy of the weight's whole tiles that the lean mode reads statistics from."""
    is_copied = not takes(sizes.v, "lean", sizes.vocab_dim) and not sizes.weight_copy_bytes
    if not is_copied or not copies_slices(sizes.vocab_dim):
        return 0
    return sizes.v * sizes.d * sizes.itemsize


def _entries(sizes: Sizes) -> int:
    """Up to 72 MiB of du, and of such slices those that leave few cores idle."""
    n = max(sizes.n, 1)
    quarter = entries_of_a_quarter(sizes, _slice_bytes(sizes, 1))
    most = min(max(4096, 72 * 2**20 // (sizes.itemsize * n)), 16384, quarter)
    most = max(LEAST_ENTRIES, most // 256 * 256)
    candidates = range(min(4096, most), most + 1, 256)
    return min(candidates, key=lambda size: (config.mosaic_gpu_entry_cost(sizes.n, sizes.d, size), size))


MEMORY = Memory(
    fast=fast,
    lean=lean,
    preferred_tokens=lambda sizes: one_chunk_or_8192(sizes, fast),
    preferred_entries=_entries,
    chunk_cost=config.mosaic_gpu_chunk_cost,
    kept=kept,
    products=config.mosaic_gpu_products,
    workspace_bytes=_CUBLAS_BYTES,
)
