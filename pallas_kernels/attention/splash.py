"""Causal attention by JAX's splash attention for TPUs, which skips blocks of keys that nobody sees."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from liger_jax.pallas_kernels.attention.intervals import Segments

# Positions in a block: the largest that divides the sequence. 512 × 512 scores are 1 MiB of VMEM in float32.
_BLOCKS = (128, 256, 512)


def unsupported(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, **_) -> str | None:
    """Whole blocks of positions only."""
    if q.shape[1] % _BLOCKS[0]:
        return f"splash attention takes lengths that {_BLOCKS[0]} divides, and the length is {q.shape[1]}; use 'xla'."
    return None


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    *,
    window: int | None,
    softcap: float | None,
    scale: float | None,
    interpret: bool = False,
) -> jax.Array:
    """q (B, T, Q, H), k and v (B, T, K, H) → (B, T, Q, H)."""
    _, length, query_heads, width = q.shape
    block = max(size for size in _BLOCKS if length % size == 0)
    shape = length, length
    mask = splash.CausalMask(shape) if window is None else splash.LocalMask(shape, (window - 1, 0), offset=0)
    sizes = splash.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block,
        block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=block,
        block_q_dq=block, block_kv_dq=block,
    )  # fmt: skip
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([mask] * query_heads), block_sizes=sizes, attn_logits_soft_cap=softcap, interpret=interpret
    )
    ids = None if segments is None else splash.SegmentIds(segments.ids, segments.ids)
    heads_first = functools.partial(jnp.swapaxes, axis1=1, axis2=2)  # splash works on (heads, T, H), unscaled
    out = jax.vmap(kernel)(
        heads_first(q) * (width**-0.5 if scale is None else scale), heads_first(k), heads_first(v), ids
    )
    return heads_first(out)
