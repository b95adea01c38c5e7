"""The fused distillation losses in plain XLA: products by XLA's own library, then passes over a chunk of logits.

dW is summed over chunks in float32.
"""

from typing import Any

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels.fused_linear_cross_entropy.buffers import Buffers
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import Needs
from liger_jax.pallas_kernels.fused_linear_cross_entropy.formulas import weight_gradient
from liger_jax.pallas_kernels.fused_linear_distillation import chunks
from liger_jax.pallas_kernels.fused_linear_distillation.buffers import Sizes, buffers_with_sum
from liger_jax.pallas_kernels.fused_linear_distillation.chunks import Gradients
from liger_jax.pallas_kernels.fused_linear_distillation.config import Head, HeadOptions
from liger_jax.pallas_kernels.fused_linear_distillation.topk_formulas import TopK
from liger_jax.pallas_kernels.tiles import full_like


def buffers(sizes: Sizes, mode: str, tokens: int) -> Buffers:
    """The bytes of a mode with chunks of so many tokens: the sum of dW is float32."""
    return buffers_with_sum(sizes, mode, tokens, sizes.float32_sum_bytes)


def _logits(x: jax.Array, weight: jax.Array, bias: jax.Array | None, head: HeadOptions) -> tuple[jax.Array, None]:
    return chunks.logits(x, weight, bias, head), None


def _empty(like: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return full_like(like, shape, 0, dtype)


def _start_of_sum(like: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return full_like(like, shape, 0, jnp.float32)


def _add_to_sum(total: jax.Array, du: jax.Array, x: jax.Array, head: HeadOptions, *_: Any) -> jax.Array:
    return total + weight_gradient(du, x, head)


def _end_of_sum(total: jax.Array, dtype: Any) -> jax.Array:
    return total.astype(dtype)


_BACKEND = chunks.Backend(
    logits=_logits,
    empty=_empty,
    start_of_sum=_start_of_sum,
    add_to_sum=_add_to_sum,
    end_of_sum=_end_of_sum,
    chunk_multiple=1,
)


def by_tokens(
    student: Head, teacher: Head | TopK, labels: jax.Array, scale: jax.Array, *, options: Any, needs: Needs
) -> tuple[jax.Array, Any, Gradients]:
    """`chunks.by_tokens` with XLA's products."""
    return chunks.by_tokens(student, teacher, labels, scale, options=options, needs=needs, backend=_BACKEND)
