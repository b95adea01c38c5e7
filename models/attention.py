"""Causal self-attention by the best kernel that JAX keeps: cuDNN on NVIDIA GPUs, splash attention on TPUs, else XLA.

The first two are not ours; this file chooses and adapts. None of the three holds a (T, T) array: XLA's goes through
chunks of queries, and makes their scores anew in the backward.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jaxtyping import Array, Float, Int

from liger_jax.models.remat import ATTENDED
from liger_jax.ops import _dispatch

# Positions in a splash block: the largest that divides the sequence. 512 × 512 scores are 1 MiB of VMEM in float32.
_SPLASH_BLOCKS = (128, 256, 512)
CHUNK = 256  # queries at a time in XLA
_SPANS = 8  # of queries, each with keys of its own length: 9/16 of all scores are computed, where 8/16 are needed
HIDDEN = -1e30  # the score of what may not be seen; finite, so that a row without anything to see is no NaN


def causal_attention(
    q: Float[Array, "B T Q H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"] | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> Float[Array, "B T Q H"]:
    """softmax(softcap·tanh(scale·q·kᵀ/softcap), over what a position may see)·v, with Q a multiple of K.

    Args:
        q: queries, any float dtype.
        k: keys, of q's dtype.
        v: values, of q's dtype.
        segment_ids: positions see only positions with their own id; `None` for one segment.
        window: a position sees itself and window − 1 before it; `None` for all before it.
        softcap: bound of the scores; `None` for none.
        scale: factor of the scores; `None` for 1/√H.

    Returns:
        An array like `q`.

    Raises:
        ValueError: `window` is not positive.

    Example:
        >>> q = jnp.ones((1, 4, 2, 8))
        >>> causal_attention(q, q, q, window=2).shape
        (1, 4, 2, 8)
    """
    if window is not None and window < 1:
        raise ValueError(f"window={window} must be at least 1, since a position sees itself; pass None for no window.")
    device = _dispatch.device_of(q)
    options = dict(window=window, softcap=softcap, scale=scale)
    if device.platform == "tpu" and why_not_splash(q) is None:
        return splash_attention(q, k, v, segment_ids, **options)
    plain = segment_ids is None and softcap is None
    if device.platform == "gpu" and plain and why_not_cudnn(q, device.device_kind) is None:
        before = None if window is None else (window - 1, 0)
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=True, scale=scale, local_window_size=before, implementation="cudnn"
        )
    return checkpoint_name(chunked_attention(q, k, v, segment_ids, **options), ATTENDED)


def why_not_cudnn(q: Float[Array, "B T Q H"], device_kind: str) -> str | None:
    """Says why cuDNN's fused attention cannot take queries like `q`.

    Segments and softcaps it does not take at all: JAX hands it a segment as a (T, T) mask.

    Args:
        q: queries; only shape and dtype are read.
        device_kind: the GPU's name.

    Returns:
        The reason as a sentence, or `None` where it can.

    Example:
        >>> why_not_cudnn(jnp.zeros((1, 8, 2, 64)), "NVIDIA H200")
        'cuDNN attention takes bfloat16 and float16, and the queries are float32.'
    """
    width = q.shape[3]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN attention takes bfloat16 and float16, and the queries are {q.dtype}."
    widest = 256 if _dispatch.is_hopper(device_kind) else 128
    if width % 8 or width > widest:
        return f"cuDNN attention takes head widths up to {widest} that 8 divides, and the width is {width}."
    if _dispatch.is_before_ampere(device_kind):
        return f"cuDNN attention needs compute capability 8.0 (Ampere) or newer, and this is a {device_kind}."
    try:
        jax.eval_shape(functools.partial(jax.nn.dot_product_attention, implementation="cudnn"), q, q, q)
    except RuntimeError as error:  # where a program is compiled for a GPU that is not there; then no wider heads, too
        return f"cuDNN cannot be asked here: {error}"
    return None


def why_not_splash(q: Float[Array, "B T Q H"]) -> str | None:
    """Says why TPU splash attention cannot take queries like `q`.

    Args:
        q: queries; only the shape is read.

    Returns:
        The reason as a sentence, or `None` where it can.

    Example:
        >>> why_not_splash(jnp.zeros((1, 100, 2, 64)))
        'Splash attention takes lengths that 128 divides, and the length is 100.'
    """
    if q.shape[1] % _SPLASH_BLOCKS[0]:
        return f"Splash attention takes lengths that {_SPLASH_BLOCKS[0]} divides, and the length is {q.shape[1]}."
    return None


def splash_attention(
    q: Float[Array, "B T Q H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"] | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    interpret: bool = False,
) -> Float[Array, "B T Q H"]:
    """`causal_attention` by JAX's splash attention for TPUs.

    Args:
        q: queries, any float dtype; 128 divides T.
        k: keys, of q's dtype.
        v: values, of q's dtype.
        segment_ids: as in `causal_attention`, like the three options after it.
        window: see there.
        softcap: see there.
        scale: see there.
        interpret: run in the Pallas interpreter, on any device.

    Returns:
        An array like `q`.
    """
    _, length, query_heads, width = q.shape
    block = max(size for size in _SPLASH_BLOCKS if length % size == 0)
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
    segments = None if segment_ids is None else splash.SegmentIds(segment_ids, segment_ids)
    heads_first = functools.partial(jnp.swapaxes, axis1=1, axis2=2)  # splash works on (heads, T, H), unscaled
    out = jax.vmap(kernel)(
        heads_first(q) * (width**-0.5 if scale is None else scale), heads_first(k), heads_first(v), segments
    )
    return heads_first(out)


def chunked_attention(
    q: Float[Array, "B T Q H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"] | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> Float[Array, "B T Q H"]:
    """`causal_attention` in XLA: 256 queries at a time, whose scores are made anew in the backward.

    Args:
        q: queries, any float dtype.
        k: keys, of q's dtype.
        v: values, of q's dtype.
        segment_ids: as in `causal_attention`, like the three options after it.
        window: see there.
        softcap: see there.
        scale: see there.

    Returns:
        An array like `q`.
    """
    batch, length, query_heads, width = q.shape
    kv_heads, dtype = k.shape[2], q.dtype
    scale = width**-0.5 if scale is None else scale
    chunk = min(CHUNK, length)
    segments = jnp.zeros((batch, length), jnp.int32) if segment_ids is None else segment_ids
    grouped = q.reshape(batch, length, kv_heads, query_heads // kv_heads, width)
    # The gradients of keys and values are summed over chunks in the dtype that the chunks are handed.
    k32, v32 = k.astype(jnp.float32), v.astype(jnp.float32)

    @functools.partial(jax.checkpoint, static_argnums=4)
    def attend(queries, own_segments, start, first, count):
        """Queries (B, C, K, Q/K, H) from position `start` on, to `count` keys from `first` on."""
        seen = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=count, axis=1)
        seen_k, seen_v = seen(k32).astype(dtype), seen(v32).astype(dtype)
        scores = scale * jnp.einsum("bckgh,bskh->bkgcs", queries, seen_k, preferred_element_type=jnp.float32)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        distance = (start + jnp.arange(queries.shape[1]))[:, None] - (first + jnp.arange(count))[None]
        near = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        visible = near[None] & (own_segments[:, :, None] == seen(segments)[:, None])
        weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, HIDDEN), axis=-1)
        return jnp.einsum("bkgcs,bskh->bckgh", weights.astype(dtype), seen_v)

    def span(first_query: int, chunks: int) -> Any:
        """So many whole chunks of queries, one after the other, each with as many keys as the last of them needs."""
        end = first_query + chunks * chunk
        keys = end if window is None else min(end, chunk + window - 1)
        in_chunks = lambda x: x[:, first_query:end].reshape(batch, chunks, chunk, *x.shape[2:]).swapaxes(0, 1)
        first_key = lambda start: 0 if window is None else jnp.maximum(start + chunk - keys, 0)
        starts = first_query + chunk * jnp.arange(chunks)
        out = jax.lax.map(
            lambda x: attend(*x, first_key(x[2]), keys), (in_chunks(grouped), in_chunks(segments), starts)
        )
        return out.swapaxes(0, 1).reshape(batch, chunks * chunk, *grouped.shape[2:])

    whole = length // chunk
    step = math.ceil(whole / _SPANS)
    parts = [span(i * chunk, min(step, whole - i)) for i in range(0, whole, step)]
    if length % chunk:
        rest = whole * chunk
        first_key = 0 if window is None else max(0, rest - window + 1)
        parts.append(attend(grouped[:, rest:], segments[:, rest:], rest, first_key, length - first_key))
    return jnp.concatenate(parts, axis=1).reshape(q.shape)
