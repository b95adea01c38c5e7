"""Causal attention by JAX's splash attention for TPUs, which skips blocks of keys that nobody sees.

Lengths are padded to whole blocks: no position of a row sees the padding after it. The backward is either one kernel of
five products, which writes dq in one piece for each block of keys, or two kernels of seven products. It is one kernel
where the pieces are few (`block_sizes`). The compiler's schedules are in benchmarks/results/attention_schedule.md;
nothing was run on a TPU.
"""

from typing import Any

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels import _splash_attention as splash
from liger_jax.pallas_kernels.attention.config import Typed
from liger_jax.pallas_kernels.attention.intervals import Segments, whole_blocks
from liger_jax.pallas_kernels.tiles import round_up

_BLOCKS = (512, 384, 256, 128)  # positions in a block of scores: 512 × 512 are 1 MiB of VMEM in float32
_STEP = 180_000  # pairs of width 128: their product takes as long on a v5e as the rest of a step
_MOST_PIECES = 4  # of dq in a fused backward; each takes the memory of q
_LARGEST_KEY_BLOCK = 2048  # of keys, values and their float32 gradients that are in VMEM: 6 MiB at width 128
_PRODUCTS_A_BYTE = 200  # multiply-adds that a core does while it reads a byte: 120 on a v5e, 280 on a v6e


def unsupported(
    q: Typed, k: Typed, v: Typed, segment_ids: Typed | None, *, is_part: bool = False, has_sinks: bool = False, **_
) -> str | None:
    """Mosaic has no float16 and no float64, and a mask is made when the kernel is compiled."""
    if is_part:
        return "splash attention needs one query for each key, and does not support q_offset; use 'xla'."
    if has_sinks:
        return "splash attention's gradients do not support sinks; use 'xla'."
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"splash attention supports float32 and bfloat16, and the queries are {q.dtype}; use 'xla'."
    return None


def num_blocks(length: int, window: int | None, q_block: int, kv_block: int) -> int:
    """How many blocks of queries and keys hold a pair that is visible."""
    reach = length if window is None else window
    first_keys = (max(0, start - reach + 1) for start in range(0, length, q_block))
    last_keys = range(q_block - 1, length, q_block)
    return sum(last // kv_block - first // kv_block + 1 for first, last in zip(first_keys, last_keys, strict=True))


def whole_length(length: int, window: int | None) -> tuple[int, int]:
    """The padded length, and the block size, that cost least. Steps of the kernel and padding are counted."""

    def cost(block: int) -> int:
        return num_blocks(round_up(length, block), window, block, block) * (block**2 + _STEP)

    block = min(_BLOCKS, key=cost)
    return round_up(length, block), block


def block_sizes(length: int, window: int | None, block: int) -> "splash.BlockSizes":
    """The blocks for a length that `block` divides.

    The fused backward makes scores once, which saves two of seven products. It goes through larger blocks of keys, and
    sums dq's pieces at the end. It is taken where it costs less. Reading the pieces counts as multiplications.
    """
    forward = dict(block_q=block, block_kv=block, block_kv_compute=block)
    two_kernels = splash.BlockSizes(
        **forward,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    sizes = [block, 2 * block, 4 * block]
    fitting = [
        size for size in sizes if length % size == 0 and size <= _LARGEST_KEY_BLOCK and length <= _MOST_PIECES * size
    ]
    if not fitting:
        return two_kernels
    kv_block = fitting[0]
    products = lambda kv_block: num_blocks(length, window, block, kv_block) * block * kv_block
    pieces = length // kv_block
    # Reading the pieces in bfloat16, counted as multiplications and divided by the width, as `products` is.
    read = _PRODUCTS_A_BYTE * 2 * length * pieces if pieces > 1 else 0
    if 5 * products(kv_block) + read > 7 * products(block):
        return two_kernels
    return splash.BlockSizes(
        **forward, block_q_dkv=block, block_kv_dkv=kv_block, block_kv_dkv_compute=block, use_fused_bwd_kernel=True
    )


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments | None,
    *,
    window: int | None,
    softcap: float | None,
    scale: float | None,
    output_name: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """q (B, T, Q, H), k and v (B, T, K, H) → (B, T, Q, H).

    `output_name` is the `checkpoint_name` of the output and of its log-sum-exp, one number for a query and head.
    """
    _, length, query_heads, width = q.shape
    padded, block = whole_length(length, window)
    shape = padded, padded
    mask = splash.CausalMask(shape) if window is None else splash.LocalMask(shape, (window - 1, 0), offset=0)
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([mask] * query_heads),
        block_sizes=block_sizes(padded, window, block),
        attn_logits_soft_cap=softcap,
        residual_checkpoint_name=output_name,
        interpret=interpret,
    )
    ids = None if segments is None else whole_blocks(segments.ids, block)

    def heads_first(x):
        """(B, T, heads, H) → (B, heads, T in whole blocks, H): splash's order."""
        x = jnp.pad(x, ((0, 0), (0, padded - length), (0, 0), (0, 0))) if padded > length else x
        return x.swapaxes(1, 2)

    scaled = heads_first(q) * (width**-0.5 if scale is None else scale)  # splash takes no scale
    out: Any = jax.vmap(kernel)(
        scaled, heads_first(k), heads_first(v), None if ids is None else splash.SegmentIds(ids, ids)
    )
    return out.swapaxes(1, 2)[:, :length]
