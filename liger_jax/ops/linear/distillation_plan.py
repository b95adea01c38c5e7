"""How a distillation loss is computed in the available memory: its mode, its chunk of tokens and its bytes.

It goes over chunks of tokens in both modes, "fast" and "lean" (pallas_kernels/fused_linear_distillation/chunks.py).
"""

import dataclasses

from liger_jax.ops.kernels import Kernels
from liger_jax.ops.linear.plan import LEAST_TOKENS, Plan, too_small
from liger_jax.ops.linear.problem import budget_that_counts
from liger_jax.pallas_kernels.fused_linear_cross_entropy.buffers import Buffers
from liger_jax.pallas_kernels.fused_linear_distillation import mosaic_gpu, xla
from liger_jax.pallas_kernels.fused_linear_distillation.buffers import Sizes

KERNELS = Kernels("distillation", {"xla": xla, "mosaic_gpu": mosaic_gpu}, {"gpu": ("mosaic_gpu",)})
_LEAST_TOKENS = 64  # in a chunk that is cut to fit a budget
_LEAN_BYTES = 384 * 2**20  # of a chunk in mode "lean", at most: 512 tokens of 128,256 entries in bfloat16
_TILE = 128  # chunks of mode "lean" are multiples of it


@dataclasses.dataclass(frozen=True)
class DistillationProblem:
    """All that the plan of a distillation loss on one device depends on."""

    sizes: Sizes
    platform: str  # "cpu", "gpu" or "tpu"
    implementation: str  # the kernels' name
    mode: str  # "auto", "fast" or "lean"
    chunk_size: int | None  # tokens; None to choose
    hard_budget_bytes: int | None
    soft_budget_bytes: int | None
    op: str  # for messages

    @property
    def budget_bytes(self) -> int | None:
        """The budget in effect."""
        return budget_that_counts(self.mode, self.hard_budget_bytes, self.soft_budget_bytes)

    def buffers(self, mode: str, tokens: int) -> Buffers:
        """What the kernels need in a mode, with chunks of so many tokens."""
        return KERNELS.modules[self.implementation].buffers(self.sizes, mode, tokens)


def plan_distillation(problem: DistillationProblem) -> Plan:
    """The plan of a distillation loss, for all gradients.

    The soft budget says whether the mode can be "fast", and does not shorten its chunks.
    """
    mode, hard = problem.mode, problem.hard_budget_bytes
    if mode == "auto":
        budget, least = problem.budget_bytes, min(problem.sizes.n, problem.chunk_size or LEAST_TOKENS)
        mode = "fast" if budget is None or problem.buffers("fast", least).extra <= budget else "lean"
    plans = []
    for tokens in _sizes(problem, mode):
        extra, growing = problem.buffers(mode, tokens)
        plans.append(Plan(problem.implementation, mode, max(1, tokens), extra, growing))
        if hard is None or extra <= hard:
            return plans[-1]
    raise too_small(problem.op, hard, plans)


def _sizes(problem: DistillationProblem, mode: str) -> list[int]:
    """Tokens in a chunk to try, the best ones first.

    In mode "fast", dW's sum is read and written once a chunk, for which 2,048 tokens are enough work. A GPU takes one
    chunk of all tokens where their gradient by the logits needs at most twice the bytes of a float32 sum.
    """
    sizes = problem.sizes
    if problem.chunk_size:
        return [min(sizes.n, problem.chunk_size)]
    preferred = 128 if problem.platform == "cpu" else 2048
    if mode == "lean":
        of_token = problem.buffers("lean", 1).growing
        preferred = max(_LEAST_TOKENS, _LEAN_BYTES // of_token // _TILE * _TILE)
    chunks = [min(sizes.n, preferred)]
    du = sizes.n * sizes.v * sizes.itemsize
    if mode == "fast" and problem.platform == "gpu" and du <= 2 * sizes.float32_sum_bytes:
        chunks.insert(0, sizes.n)
    while chunks[-1] > _LEAST_TOKENS:
        chunks.append(max(_LEAST_TOKENS, chunks[-1] // 2))
    return chunks
