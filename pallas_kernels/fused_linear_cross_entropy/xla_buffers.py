"""The memory of XLA's fused linear loss."""

from liger_jax.pallas_kernels.fused_linear_cross_entropy.buffers import (
    Buffers,
    Memory,
    Sizes,
    entries_of_128_mib,
    logit_gradient_bytes,
    summed_bytes,
)


def fast(sizes: Sizes, tokens: int) -> Buffers:
    """A chunk has float32 logits and du."""
    logits, du = 4 * tokens * sizes.v, logit_gradient_bytes(sizes, tokens, sizes.v)
    # A GPU adds a chunk's dX to what there is of it; on a CPU it is where the logits were.
    dx = tokens * sizes.d * sizes.itemsize if sizes.platform == "gpu" else 0
    chunk = logits + du + dx
    return Buffers(chunk + sizes.gathered_bytes + summed_bytes(sizes, tokens, logits, du), chunk)


def lean(sizes: Sizes, entries: int) -> Buffers:
    """A slice has float32 logits, du, its rows of the weight in hidden's dtype, and its rows of dW."""
    n, d, itemsize = sizes.n, sizes.d, sizes.itemsize
    of_slice = _slice_bytes(sizes, entries)
    if not any(sizes.gradients):
        return Buffers(4 * n * entries + entries * d * itemsize, of_slice)
    if _writes_in_place(sizes):
        # The forward holds a slice. The backward holds its logits, its weights, the masked hidden states, and dX.
        part_of_gradients = 4 * (n * entries + entries * d + 2 * n * d)
        return Buffers(max(of_slice, part_of_gradients) + 7 * 4 * n, of_slice)  # seven numbers a token
    masked_hidden = n * d * itemsize
    return Buffers(of_slice + sizes.hidden_sum_bytes + masked_hidden, of_slice)


def _slice_bytes(sizes: Sizes, entries: int) -> int:
    n, weights = max(sizes.n, 1), entries * sizes.d
    du, logits = logit_gradient_bytes(sizes, n, entries), 4 * n * entries
    if _writes_in_place(sizes):
        return logits + max(logits, 4 * weights)
    # On a GPU a float32 dW's slice is written where it belongs.
    is_written_in_place = sizes.platform == "gpu" and sizes.weight_itemsize == 4
    return du + logits + weights * (sizes.itemsize if is_written_in_place else 4 + sizes.itemsize)


def _writes_in_place(sizes: Sizes) -> bool:
    """Float32 on a CPU: the compiler writes du over the logits, and dW's slice where it belongs."""
    is_float32 = sizes.itemsize == sizes.weight_itemsize == 4
    return sizes.platform == "cpu" and is_float32 and not sizes.weight_is_split


MEMORY = Memory(fast=fast, lean=lean, preferred_entries=lambda sizes: entries_of_128_mib(sizes, _slice_bytes(sizes, 1)))
