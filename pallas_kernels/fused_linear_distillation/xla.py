"""The fused distillation losses in plain XLA: products by XLA's own library, then passes over a chunk of logits."""

from typing import Any

import jax

from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import Needs
from liger_jax.pallas_kernels.fused_linear_cross_entropy.formulas import weight_gradient
from liger_jax.pallas_kernels.fused_linear_distillation import chunks
from liger_jax.pallas_kernels.fused_linear_distillation.chunks import Gradients
from liger_jax.pallas_kernels.fused_linear_distillation.config import Head, HeadOptions, Options
from liger_jax.pallas_kernels.fused_linear_distillation.topk_formulas import TopK


def unsupported(*arrays: jax.Array | None, options: Options) -> str | None:
    """XLA runs every case."""
    return None


def _logits(x: jax.Array, weight: jax.Array, bias: jax.Array | None, head: HeadOptions) -> tuple[jax.Array, None]:
    return chunks.logits(x, weight, bias, head), None


def _add_weight_gradient(dweight: jax.Array, du: jax.Array, x: jax.Array, head: HeadOptions) -> jax.Array:
    return dweight + weight_gradient(du, x, head)


_BACKEND = chunks.Backend(_logits, _add_weight_gradient, chunk_multiple=1)


def by_tokens(
    student: Head, teacher: Head | TopK, labels: jax.Array, scale: jax.Array, *, options: Any, needs: Needs
) -> tuple[jax.Array, Any, Gradients]:
    """`chunks.by_tokens` with XLA's products."""
    return chunks.by_tokens(student, teacher, labels, scale, options=options, needs=needs, backend=_BACKEND)
