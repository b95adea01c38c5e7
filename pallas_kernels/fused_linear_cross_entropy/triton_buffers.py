"""The memory of Triton's fused linear loss, which has mode "lean" only."""

from liger_jax.pallas_kernels.fused_linear_cross_entropy.buffers import (
    Buffers,
    Memory,
    Sizes,
    entries_of_128_mib,
    gathered_slice_bytes,
    logit_gradient_bytes,
    row_number_bytes,
)


def lean(sizes: Sizes, entries: int) -> Buffers:
    """A slice has du, its rows of the weight in hidden's dtype, and its rows of dW in float32."""
    of_slice = _slice_bytes(sizes, entries)
    if not any(sizes.gradients):
        return Buffers(sizes.weight_copy_bytes + row_number_bytes(sizes.n), of_slice)
    masked_hidden = sizes.n * sizes.d * sizes.itemsize
    return Buffers(of_slice + sizes.hidden_sum_bytes + masked_hidden + sizes.weight_copy_bytes, of_slice)


def _slice_bytes(sizes: Sizes, entries: int) -> int:
    if sizes.weight_is_split:
        return gathered_slice_bytes(sizes, entries)
    return logit_gradient_bytes(sizes, max(sizes.n, 1), entries) + entries * sizes.d * (4 + sizes.itemsize)


MEMORY = Memory(lean=lean, preferred_entries=lambda sizes: entries_of_128_mib(sizes, _slice_bytes(sizes, 1)))
