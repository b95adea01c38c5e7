"""The memory that an engine needs, for the plan of a loss (liger_jax/ops/linear/plan.py).

Each engine has a `MEMORY`: the bytes of its buffers in each mode, and the chunks and slices that it prefers. There is a
term for each live buffer. tests/aot compares the sums with compiled programs.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import KeptEntries, Needs
from liger_jax.pallas_kernels.hopper import NUM_CORES
from liger_jax.pallas_kernels.tiles import cdiv

LEAST_ENTRIES = 512  # entries in a slice, unless an engine requires more


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes that the bytes of a loss on one device depend on."""

    n: int  # tokens
    d: int  # width of the hidden states
    v: int  # entries of the vocabulary
    itemsize: int  # bytes of an element of hidden
    weight_itemsize: int
    vocab_dim: int  # which axis of the weight is the vocabulary
    platform: str  # "cpu", "gpu" or "tpu"
    gradients: Needs
    weight_is_split: bool  # the number of its shards over the devices that split the tokens

    @property
    def weight_copy_bytes(self) -> int:
        """Products take hidden's dtype: a weight of another one is copied."""
        return 0 if self.weight_itemsize == self.itemsize else self.v * self.d * self.itemsize

    @property
    def gathered_bytes(self) -> int:
        """The whole weight and the whole of its gradient, which mode "fast" holds where each device has a shard."""
        return (1 + self.gradients.weight) * self.v * self.d * self.weight_itemsize if self.weight_is_split else 0

    @property
    def weight_sum_bytes(self) -> int:
        """The weight's gradient as a float32 sum, where it needs a separate one."""
        return 4 * self.v * self.d if self.gradients.weight and self.weight_itemsize < 4 else 0

    @property
    def hidden_sum_bytes(self) -> int:
        """The hidden states' gradient as a float32 sum, where it needs a separate one."""
        return 4 * self.n * self.d if self.gradients.hidden and self.itemsize < 4 else 0


class Buffers(NamedTuple):
    """The bytes of a mode with chunks or slices of one size."""

    extra: int  # beside inputs and gradients
    growing: int  # the bytes that grow with the chunk of tokens, or with the slice of the vocabulary


def long_chunk(_: Sizes) -> int:
    """The tokens in a chunk for kernels that read and write a sum of dW once a chunk.

    On an H200 chunks of 2,048 tokens come within 3 % of the whole batch at a width of 4,096 in XLA, where chunks of 512
    cost 30 % more (benchmarks/results/token_chunks.md).
    """
    return 2048


@dataclasses.dataclass(frozen=True)
class Memory:
    """How an engine uses memory. Its functions are pure."""

    lean: Callable[[Sizes, int], Buffers]  # the bytes of mode "lean" with slices of so many vocabulary entries
    preferred_entries: Callable[[Sizes], int]  # the entries in a slice where memory is no matter
    # The bytes of mode "fast" with chunks of so many tokens; None for an engine that has no such mode.
    fast: Callable[[Sizes, int], Buffers] | None = None
    preferred_tokens: Callable[[Sizes], int] = long_chunk  # the tokens in a chunk where memory is no matter
    # The fewest entries of a slice: a few tiles, below which products take longer without needing much less.
    least_entries: int = LEAST_ENTRIES
    # The cost of mode "fast" for N, D and the tokens in a chunk, of which the last may have fewer. None for an engine
    # whose chunks all have the same size.
    chunk_cost: Callable[[int, int, int], float] | None = None
    # The largest share of the vocabulary whose exponentials can be kept in so many bytes, and the bytes; None for none.
    kept: Callable[[Sizes, int], tuple[KeptEntries, Buffers] | None] | None = None
    # The cost of mode "fast" for N, D, V, the tokens in a chunk and the share that is kept, in products.
    products: Callable[[int, int, int, int, KeptEntries | None], float] | None = None
    workspace_bytes: int = 0  # what a library's products take, which the unfused step's products take too


# --- what several engines share ---------------------------------------------------------------------------------------


def logit_gradient_bytes(sizes: Sizes, tokens: int, entries: int) -> int:
    """du, the gradient by the logits."""
    return tokens * entries * sizes.itemsize


def row_number_bytes(tokens: int) -> int:
    """A number for each token. On a TPU it has 128 lanes."""
    return 4 * 128 * tokens


def gathered_slice_bytes(sizes: Sizes, entries: int) -> int:
    """A slice where each device has a shard of the weight: du, and the gathered weights and their gradient."""
    return logit_gradient_bytes(sizes, max(sizes.n, 1), entries) + 2 * entries * sizes.d * sizes.weight_itemsize


def summed_bytes(sizes: Sizes, tokens: int, *of_logits: int) -> int:
    """What mode "fast" takes beside a chunk, where XLA makes the products of the gradients and sums dW in float32.

    dW is written last, from its sum. Until then the largest buffer `of_logits` that fits is in its place.
    """
    room = sizes.v * sizes.d * sizes.weight_itemsize if sizes.weight_sum_bytes else 0
    in_its_place = max((size for size in of_logits if size <= room), default=0)
    return sizes.weight_sum_bytes - in_its_place + sizes.weight_copy_bytes + padded_weight_bytes(sizes, tokens)


def padded_weight_bytes(sizes: Sizes, tokens: int) -> int:
    """The most bytes of XLA's copy of the weight, in the product that computes dX on a GPU.

    Where that product has fewer tiles than the GPU has cores, XLA cuts V in two at many sizes. If V is no multiple of
    16, it pads the weight for that. The cores are an H200's; an A100 has fewer.
    """
    has_few_tiles = cdiv(tokens, 128) * cdiv(sizes.d, 128) < NUM_CORES
    is_cut = sizes.platform == "gpu" and sizes.gradients.hidden and sizes.v % 16 and has_few_tiles
    return sizes.v * sizes.d * sizes.itemsize if is_cut else 0


def one_chunk_or_8192(sizes: Sizes, fast: Callable[[Sizes, int], Buffers]) -> int:
    """The tokens in a chunk for kernels that need no sum of dW where one chunk holds all tokens.

    That chunk may take half as much more memory than chunks of 8,192 tokens. Without dW there is nothing to sum.
    """
    if not sizes.gradients.weight:
        return long_chunk(sizes)
    return max(sizes.n, 1) if fast(sizes, sizes.n).extra <= 1.5 * fast(sizes, 8192).extra else 8192


def entries_of_a_quarter(sizes: Sizes, bytes_of_entry: int) -> int:
    """The entries in a slice whose buffers take a quarter of the logits in 16 bits."""
    return max(sizes.n, 1) * sizes.v // 2 // bytes_of_entry


def entries_of_128_mib(sizes: Sizes, bytes_of_entry: int) -> int:
    """The entries in a slice with up to 128 MiB of logits and du, and up to a quarter of all logits in 16 bits."""
    most = 2**27 // ((4 + sizes.itemsize) * max(sizes.n, 1))
    return max(LEAST_ENTRIES, min(most, entries_of_a_quarter(sizes, bytes_of_entry)) // 256 * 256)
