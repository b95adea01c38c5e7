"""The bytes that a linear loss needs beside its inputs and gradients, for each backend and mode.

There is a term for each live buffer. tests/aot compares the sums with compiled programs.
"""

from liger_jax.ops.linear.problem import DistillationProblem, Problem
from liger_jax.pallas_kernels._hopper import NUM_CORES
from liger_jax.pallas_kernels._hopper_product import ROWS
from liger_jax.pallas_kernels._tiles import cdiv, round_up
from liger_jax.pallas_kernels.fused_linear_cross_entropy import config, mosaic_gpu
from liger_jax.pallas_kernels.fused_linear_distillation.chunks import TOKENS_OF_LOGITS

_CUBLAS_BYTES = 32 * 2**20  # cuBLAS's workspace on Hopper, for XLA's products


def logits_bytes(problem: Problem) -> int:
    """What the unfused step needs: logits in float32 and their gradient in hidden's dtype, and cuBLAS's workspace."""
    workspace = _CUBLAS_BYTES if problem.kernels == "mosaic_gpu" else 0
    return (4 + problem.itemsize) * problem.n * problem.v + workspace


def fast_bytes(problem: Problem, tokens: int) -> int:
    """What the fast mode needs beside inputs and gradients, with chunks of so many tokens."""
    n, d, v, needs_weight = problem.n, problem.d, problem.v, problem.gradients.weight
    float32_dw = 4 * v * d if needs_weight and problem.weight_itemsize < 4 else 0
    chunk = chunk_bytes(problem, tokens) + problem.gathered_bytes
    if problem.kernels == "mosaic_gpu":
        if not any(problem.gradients):
            return forward_bytes(problem, entries=0)
        is_whole = tokens >= n
        dw_low_byte = 0 if is_whole else float32_dw // 4  # the lowest of the sum's three; dW holds the upper two
        # With one chunk dW is written last. Until then the weight's copy lies in its place.
        weight_copy = 0 if is_whole and needs_weight else problem.weight_copy_bytes
        of_parts = 0
        if not mosaic_gpu.takes(v, "fast", problem.vocab_dim):
            is_copied = mosaic_gpu.copies_slices(problem.vocab_dim)
            # The weight's whole tiles, and their part of dW until it is put in its place.
            weight_slice = v * d * problem.itemsize if is_copied and not problem.weight_copy_bytes else 0
            # (Beside a cast weight XLA makes one chunk's dW, at some sizes in its place at once.)
            part_of_dw = v * d * problem.weight_itemsize if needs_weight and (is_copied or not is_whole) else 0
            of_parts = max(weight_slice, part_of_dw)  # one after the other
            if part_of_dw and not is_whole:  # at a time, and the largest buffer beside it lies where dW will be
                in_its_place = max(weight_slice, dw_low_byte, 0 if is_copied else weight_copy)
                of_parts = weight_slice + part_of_dw - in_its_place
        return chunk + padded_hidden_bytes(problem) + _CUBLAS_BYTES + dw_low_byte + weight_copy + of_parts
    if problem.kernels == "mosaic_tpu" and tokens >= n:  # dW is one product
        return chunk + problem.weight_copy_bytes
    # dW is written last, from its float32 sum. Until then the largest buffer that fits lies in its place.
    room = v * d * problem.weight_itemsize if float32_dw else 0
    logits, du = 4 * tokens * v, tokens * v * problem.itemsize
    logits = 0 if problem.kernels == "mosaic_tpu" else logits  # which keeps no float32 logits
    in_its_place = max((size for size in (logits, du) if size <= room), default=0)
    return chunk - in_its_place + float32_dw + problem.weight_copy_bytes + padded_weight_bytes(problem, tokens)


def padded_weight_bytes(problem: Problem, tokens: int) -> int:
    """What XLA's copy of the weight takes, at most, in the product that makes dX on a GPU.

    Where that product has fewer tiles than the GPU has cores, XLA cuts V in two at many sizes. If V is no multiple of
    16, it pads the weight for that. The cores are an H200's; an A100 has fewer.
    """
    has_few_tiles = cdiv(tokens, 128) * cdiv(problem.d, 128) < NUM_CORES
    is_cut = problem.platform == "gpu" and problem.gradients.hidden and problem.v % 16 and has_few_tiles
    return problem.v * problem.d * problem.itemsize if is_cut else 0


def chunk_bytes(problem: Problem, tokens: int) -> int:
    """What grows with the chunk of the fast mode: logits and du, or E. (du is written in the place of E.)"""
    du = tokens * problem.v * problem.itemsize
    hidden = tokens * problem.d * problem.itemsize  # without the rows that do not count, and then its gradient
    if problem.kernels == "mosaic_tpu":
        part_maxima = 4 * tokens * round_up(cdiv(problem.v, 256), 128)
        return du + part_maxima + hidden + 4 * 128 * tokens  # and a token's numbers, in 128 lanes
    if problem.kernels != "mosaic_gpu":
        # A GPU adds a chunk's dX to what there is of it; on a CPU it lies where the logits were.
        return du + 4 * tokens * problem.v + (hidden if problem.platform == "gpu" else 0)
    # Each tile of logits leaves a row's maximum; a tile has 128 columns where the depth is short, and else 256 or 192.
    tile_maxima = 4 * tokens * cdiv(problem.v, 128 if problem.d < config.SHORT_DEPTH else 256)
    return du + tile_maxima + hidden


def lean_bytes(problem: Problem, entries: int) -> int:
    """What the lean mode needs beside inputs and gradients, with slices of so many vocabulary entries."""
    if not any(problem.gradients):
        return forward_bytes(problem, entries)
    n, d, itemsize, weight_copy = problem.n, problem.d, problem.itemsize, problem.weight_copy_bytes
    of_slice = slice_bytes(problem, entries)
    float32_dx = 4 * n * d if problem.gradients.hidden and itemsize < 4 else 0
    if problem.kernels == "mosaic_gpu":
        # Hidden without the rows that do not count lies where dX will be.
        masked_hidden = 0 if problem.gradients.hidden else n * d * itemsize
        forward = forward_bytes(problem, entries)
        if problem.gradients.weight and not weight_copy:
            forward -= whole_tiles_bytes(problem)  # which lie where dW will be
        return max(weight_copy + of_slice + masked_hidden + float32_dx + padded_hidden_bytes(problem), forward)
    if problem.kernels == "mosaic_tpu":
        return of_slice + float32_dx + 4 * 128 * n + weight_copy  # a token's numbers, in 128 lanes
    masked_hidden = n * d * itemsize
    if _writes_in_place(problem):
        # The forward holds a slice. The backward holds its logits, its weights, the masked hidden states, and dX.
        part_of_gradients = 4 * (n * entries + entries * d + 2 * n * d)
        return max(of_slice, part_of_gradients) + 7 * 4 * n  # seven numbers a token
    # XLA casts a slice of the weight at a time.
    return of_slice + float32_dx + masked_hidden + (0 if problem.kernels == "xla" else weight_copy)


def forward_bytes(problem: Problem, entries: int) -> int:
    """What the loss needs where nothing is differentiated; XLA and Triton go over slices of so many entries."""
    n, d, v, weight_copy = problem.n, problem.d, problem.v, problem.weight_copy_bytes
    if problem.kernels == "mosaic_gpu":
        tile_statistics = 2 * 4 * n * cdiv(v, 256)
        return weight_copy + padded_hidden_bytes(problem) + whole_tiles_bytes(problem) + tile_statistics
    if problem.kernels == "xla":
        return 4 * n * entries + entries * d * problem.itemsize
    return weight_copy + 4 * 128 * n  # a token's numbers, in 128 lanes on a TPU


def padded_hidden_bytes(problem: Problem) -> int:
    """Hopper's copy of hidden with whole tiles of rows."""
    return 0 if problem.n % ROWS == 0 else round_up(problem.n, ROWS) * problem.d * problem.itemsize


def whole_tiles_bytes(problem: Problem) -> int:
    """The copy of the weight's whole tiles that Hopper's lean mode reads statistics from."""
    is_copied = not mosaic_gpu.takes(problem.v, "lean", problem.vocab_dim) and not problem.weight_copy_bytes
    if not is_copied or not mosaic_gpu.copies_slices(problem.vocab_dim):
        return 0
    return problem.v * problem.d * problem.itemsize


def slice_bytes(problem: Problem, entries: int) -> int:
    """What grows with the slice of the lean mode: logits, their gradient du, and parts of the weight and of dW."""
    n, d, itemsize = max(problem.n, 1), problem.d, problem.itemsize
    du = n * entries * itemsize
    if problem.split is not None and problem.kernels != "xla":  # a gathered slice, and its gradient
        return du + 2 * entries * d * problem.weight_itemsize
    if problem.kernels == "mosaic_gpu":
        if mosaic_gpu.takes(problem.v, "lean", problem.vocab_dim):
            return du
        part_of_dw = problem.weight_itemsize if mosaic_gpu.copies_slices(problem.vocab_dim) else 0
        part_of_weight = 0 if problem.weight_copy_bytes and part_of_dw else itemsize
        return du + entries * d * (part_of_weight + part_of_dw)
    if problem.kernels == "mosaic_tpu":
        return du  # the weight's slice is read, and dW's is written, in its place
    logits = 4 * n * entries if problem.kernels == "xla" else 0
    if _writes_in_place(problem):
        return logits + max(logits, 4 * entries * d)
    # On a GPU, XLA writes a float32 dW's slice where it belongs.
    is_written_in_place = (problem.kernels, problem.platform, problem.weight_itemsize) == ("xla", "gpu", 4)
    return du + logits + entries * d * (itemsize if is_written_in_place else 4 + itemsize)


def _writes_in_place(problem: Problem) -> bool:
    """XLA in float32 on a CPU: its compiler writes du over the logits, and dW's slice where it belongs."""
    is_float32 = problem.itemsize == problem.weight_itemsize == 4
    return problem.platform == "cpu" and problem.kernels == "xla" and is_float32 and problem.split is None


def distillation_bytes(problem: DistillationProblem, mode: str, tokens: int) -> int:
    """What a distillation loss needs beside inputs and gradients, with chunks of so many tokens."""
    dx = problem.itemsize * problem.n * problem.d  # for a cotangent of 1, until the backward
    is_summed = tokens < problem.n or problem.itemsize > problem.weight_itemsize  # else dW is one product
    fixed = dx if mode == "lean" else _sum_bytes(problem) if is_summed else 0
    return problem.head_copies_bytes + fixed + distillation_chunk_bytes(problem, mode, tokens)


def distillation_chunk_bytes(problem: DistillationProblem, mode: str, tokens: int) -> int:
    """What grows with the chunk: raw logits and the gradient by them in hidden's dtype.

    A teacher whose log-probabilities are stored scatters them into float32.
    """
    scattered = 4 if problem.num_heads == 1 else 0
    raw, du = problem.itemsize * problem.num_heads + scattered, problem.itemsize
    of_logits = TOKENS_OF_LOGITS if mode == "fast" and is_whole(problem, tokens) else tokens
    return problem.v * (of_logits * raw + tokens * du)


def float32_sum_bytes(problem: DistillationProblem) -> int:
    """What a float32 sum of the weight's gradient over chunks takes beside the gradient."""
    return 4 * problem.v * problem.d if problem.weight_itemsize < 4 else 0


def _sum_bytes(problem: DistillationProblem) -> int:
    """What the sum takes. Hopper's has three bytes for a weight of 16 bits, and the gradient holds two of them."""
    is_in_bytes = problem.implementation == "mosaic_gpu" and problem.weight_itemsize == 2
    return float32_sum_bytes(problem) // 4 if is_in_bytes else float32_sum_bytes(problem)


def is_whole(problem: DistillationProblem, tokens: int) -> bool:
    """Whether a chunk of mode "fast" holds all tokens, and the logits of fewer."""
    return tokens >= problem.n > TOKENS_OF_LOGITS
