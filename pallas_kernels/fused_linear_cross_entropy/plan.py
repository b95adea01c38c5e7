"""Mode and chunk from shapes and memory: what each way of computing the loss needs beside inputs and gradients.

"fast" makes the gradients in the forward from chunks of tokens, with 3 products of 2·N·D·V operations. "lean" makes
statistics first, then recomputes slices of the vocabulary: 4 products, and no buffer as large as the weight.
The byte counts are those of the compiled programs (tests/aot compares them), with one term for each live buffer.
"""

import bisect
import dataclasses
from collections.abc import Callable

from liger_jax.pallas_kernels._tiles import cdiv, round_up
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import mosaic_gpu_chunk_cost, mosaic_gpu_vocab_slice

LEAST_TOKENS, LEAST_FAST_TOKENS, LEAST_ENTRIES = 128, 1024, 512
_WORKSPACE_BYTES = 32 * 2**20  # of cuBLAS on Hopper, for the products that are XLA's
_TILE = 128
_MOST_CHUNKS = 4096  # sizes that are compared; more than half a million tokens in one chunk go in coarser steps


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes of the loss, bytes an element, which gradients are asked for, and whose kernels run."""

    n: int
    d: int
    v: int
    itemsize: int
    weight_itemsize: int
    platform: str
    implementation: str = "xla"
    hidden_gradient: bool = True
    weight_gradient: bool = True

    @property
    def weight_copy_bytes(self) -> int:
        """The weight in hidden's dtype, in which products are taken."""
        return 0 if self.weight_itemsize == self.itemsize else self.v * self.d * self.itemsize

    def fast_bytes(self, tokens: int) -> int:
        """Beside inputs and gradients, with chunks of so many tokens."""
        du = tokens * self.v * self.itemsize
        float32_weight = 4 * self.v * self.d if self.weight_gradient and self.weight_itemsize < 4 else 0
        if self.implementation == "mosaic_gpu":
            partials = 3 * 4 * tokens * cdiv(self.v, 256)
            one_chunk = tokens >= self.n
            accumulator = 0 if one_chunk else float32_weight // 4  # the lowest byte of a sum; dW holds the upper two
            # dW is written last: until then the weight's copy lies in its place.
            copy = 0 if one_chunk and self.weight_gradient else self.weight_copy_bytes
            hidden = 0 if one_chunk else tokens * self.d * self.itemsize  # the chunk's, and then its gradient
            return du + partials + accumulator + copy + hidden + _WORKSPACE_BYTES
        logits = 4 * tokens * self.v
        # dW is written last, from its accumulator: until then the largest buffer that fits lies in its place.
        room = self.v * self.d * self.weight_itemsize if float32_weight else 0
        reused = max((size for size in (logits, du) if size <= room), default=0)
        return du + logits - reused + float32_weight + self.weight_copy_bytes

    def lean_bytes(self, entries: int) -> int:
        """Beside inputs and gradients, with slices of so many vocabulary entries."""
        du = self.n * entries * self.itemsize
        float32_hidden = 4 * self.n * self.d if self.hidden_gradient and self.itemsize < 4 else 0
        if self.implementation == "mosaic_gpu":
            partials = 2 * 4 * self.n * cdiv(self.v, 256)
            return self.weight_copy_bytes + max(du + float32_hidden, partials)
        if self.implementation == "mosaic_tpu":
            weight_slice, rows = entries * self.d * self.itemsize, 4 * 128 * self.n
            return du + float32_hidden + weight_slice + rows + self.weight_copy_bytes
        masked = self.n * self.d * self.itemsize
        logits = 4 * self.n * entries if self.implementation == "xla" else 0
        parts = entries * self.d * (4 + self.itemsize)  # of the weight and of dW
        copy = 0 if self.implementation == "xla" else self.weight_copy_bytes
        return du + logits + float32_hidden + masked + parts + copy

    @property
    def fast_tokens(self) -> int:
        """Tokens in a chunk where memory is no matter.

        dW's accumulator is read and written once a chunk: on an H200 2,048 tokens come within 3 % of the whole batch
        at a width of 4,096 in XLA, where 512 cost 30 % more (benchmarks/results/token_chunks.md). Hopper's kernels
        need no accumulator where one chunk holds all tokens: half as much more memory goes into that. A CPU is slow
        enough for 256.
        """
        if self.platform == "cpu":
            return 256
        if self.implementation != "mosaic_gpu" or not self.weight_gradient:
            return 2048
        return max(self.n, 1) if self.fast_bytes(self.n) <= 1.5 * self.fast_bytes(8192) else 8192

    @property
    def lean_entries(self) -> int:
        """Vocabulary entries in a slice where memory is no matter: 128 MiB of logits and du."""
        if self.implementation == "mosaic_gpu":
            return mosaic_gpu_vocab_slice(self.n, self.d, self.itemsize)
        if self.implementation == "mosaic_tpu":
            return max(2048, 2**25 // (self.itemsize * max(self.n, 1)) // 1024 * 1024)
        return max(LEAST_ENTRIES, 2**27 // ((4 + self.itemsize) * max(self.n, 1)) // 256 * 256)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the fused loss is computed.

    Attributes:
        implementation: "xla", "triton", "mosaic_gpu" or "mosaic_tpu".
        mode: "fast" or "lean".
        chunk_size: tokens in a chunk ("fast"), vocabulary entries in a slice ("lean").
        extra_bytes: what the compiled loss and its gradients need beside inputs and gradients.
    """

    implementation: str
    mode: str
    chunk_size: int
    extra_bytes: int


def plan(
    problem: Problem,
    mode: str,
    chunk_size: int | None = None,
    budget_bytes: int | None = None,
    budget_is_a_wish: bool = False,
) -> Plan:
    """The first that fits: "fast" in ever smaller chunks of 1,024 tokens or more, then "lean" ("auto"), or one mode.

    What is named outright is kept: a mode with its chunk size, whatever it needs. Where nothing fits, the answer to a
    wish is the last mode at its best size, and else a ValueError.
    """
    kinds = {
        "fast": (max(problem.n, 1), problem.fast_tokens, LEAST_TOKENS, problem.fast_bytes),
        "lean": (max(problem.v, 1), problem.lean_entries, LEAST_ENTRIES, problem.lean_bytes),
    }
    kind, size, extra, best = mode, 0, 0, 0
    for kind in ("fast", "lean") if mode == "auto" else (mode,):
        total, preferred, least, bytes_of = kinds[kind]
        if kind == "fast" and mode == "auto" and problem.platform != "cpu":
            least = LEAST_FAST_TOKENS  # below that, lean is as fast
        best = min(chunk_size or preferred, total)
        fits = lambda size, bytes_of=bytes_of: budget_bytes is None or bytes_of(size) <= budget_bytes
        if chunk_size:
            sizes = [best]
        elif kind == "fast" and problem.implementation == "mosaic_gpu":  # has kernels for a shorter last chunk, too
            sizes = _cheapest(problem, min(preferred, total), min(least, total))
        else:
            sizes = [_largest_part(total, preferred, least, fits)]
        if kind == "lean" and not chunk_size:  # a shorter last slice has kernels, too: the size need not divide
            sizes = [min(preferred, total), *sizes]
        for size in sizes:
            if fits(size):
                return Plan(problem.implementation, kind, size, bytes_of(size))
        extra = bytes_of(size)
    if budget_is_a_wish:
        return Plan(problem.implementation, kind, best, kinds[kind][3](best))
    raise ValueError(
        f"fused_linear_cross_entropy: memory_budget_bytes={budget_bytes} is too small: mode={kind!r} needs {extra} "
        f"bytes beside inputs and gradients with chunk_size={size}. "
        "Raise the budget, or split the tokens over several calls."
    )


def _cheapest(problem: Problem, most: int, least: int) -> list[int]:
    """Chunks in whole tiles, or all tokens in one, by what they cost."""
    step = _TILE * cdiv(most - least + 1, _TILE * _MOST_CHUNKS)
    sizes = {most, *range(round_up(least, _TILE), most, step)}
    return sorted(sizes, key=lambda tokens: (mosaic_gpu_chunk_cost(problem.n, problem.d, tokens), tokens))


def _largest_part(total: int, preferred: int, least: int, fits: Callable[[int], bool]) -> int:
    """The largest of equal parts of `total` that fits, in whole tiles and up to the preferred size; or the least one.

    More bytes are needed for a larger part, so that bisection over the number of parts finds it.
    """
    least = min(least, total)
    size_of = lambda parts: max(least, min(total, round_up(cdiv(total, parts), min(_TILE, least))))
    numbers = range(cdiv(total, preferred), total + 1)
    found = bisect.bisect_left(numbers, True, key=lambda parts: fits(size_of(parts)))
    return size_of(numbers[min(found, len(numbers) - 1)])
