"""The bytes of a distillation loss's buffers, for its plan (liger_jax/ops/linear/distillation_plan.py).

Each engine has a function `buffers` of the sizes, the mode and the tokens of a chunk. There is a term for each live
buffer. tests/aot compares the sums with compiled programs.
"""

import dataclasses

from liger_jax.pallas_kernels.fused_linear_cross_entropy.buffers import Buffers
from liger_jax.pallas_kernels.fused_linear_distillation.chunks import TOKENS_OF_LOGITS


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the bytes of a distillation loss on one device depend on."""

    n: int  # tokens
    d: int  # width of the student's hidden states
    v: int  # entries of the vocabulary
    itemsize: int  # bytes of an element of the student's hidden states
    weight_itemsize: int
    num_heads: int  # 2 where the teacher's logits are made here, 1 where its log-probabilities are stored
    head_copies_bytes: int  # products take hidden's dtype: heads of another one are copied

    @property
    def float32_sum_bytes(self) -> int:
        """What a float32 sum of the weight's gradient over chunks takes beside the gradient."""
        return 4 * self.v * self.d if self.weight_itemsize < 4 else 0


def buffers_with_sum(sizes: Sizes, mode: str, tokens: int, sum_bytes: int) -> Buffers:
    """The bytes of an engine that takes `sum_bytes` to sum the weight's gradient over chunks."""
    dx = sizes.itemsize * sizes.n * sizes.d  # for a cotangent of 1, until the backward
    is_summed = tokens < sizes.n or sizes.itemsize > sizes.weight_itemsize  # else dW is one product
    fixed = dx if mode == "lean" else sum_bytes if is_summed else 0
    chunk = _chunk_bytes(sizes, mode, tokens)
    return Buffers(sizes.head_copies_bytes + fixed + chunk, chunk)


def _chunk_bytes(sizes: Sizes, mode: str, tokens: int) -> int:
    """Raw logits and the gradient by them in hidden's dtype.

    A teacher whose log-probabilities are stored scatters them into float32.
    """
    scattered = 4 if sizes.num_heads == 1 else 0
    raw, du = sizes.itemsize * sizes.num_heads + scattered, sizes.itemsize
    is_whole = tokens >= sizes.n > TOKENS_OF_LOGITS  # a chunk of all tokens holds the logits of fewer
    of_logits = TOKENS_OF_LOGITS if mode == "fast" and is_whole else tokens
    return sizes.v * (of_logits * raw + tokens * du)
