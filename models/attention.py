"""Causal self-attention by the best kernel that JAX keeps: cuDNN on NVIDIA GPUs, splash attention on TPUs, else XLA.

None of the three is ours; this file only chooses and adapts. XLA's holds a (B, Q, T, T) array, the others do not.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jaxtyping import Array, Bool, Float, Int

from liger_jax.ops import _dispatch

# Positions in a splash block: the largest that divides the sequence. 512 × 512 scores are 1 MiB of VMEM in float32.
_SPLASH_BLOCKS = (128, 256, 512)


def causal_attention(
    q: Float[Array, "B T Q H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T Q H"]:
    """softmax(q·kᵀ/√H, over earlier positions of the same segment)·v, with Q a multiple of K.

    Args:
        q: queries, any float dtype.
        k: keys, of q's dtype.
        v: values, of q's dtype.
        segment_ids: positions see only positions with their own id; `None` for one segment.

    Returns:
        An array like `q`.
    """
    device = _dispatch.device_of(q)
    if device.platform == "tpu" and why_not_splash(q) is None:
        return splash_attention(q, k, v, segment_ids)
    mask = None if segment_ids is None else _same_segment(segment_ids)
    attend = functools.partial(jax.nn.dot_product_attention, q, k, v, mask=mask, is_causal=True)
    if device.platform == "gpu" and why_not_cudnn(q, device.device_kind, masked=mask is not None) is None:
        return attend(implementation="cudnn")
    return attend(implementation="xla")


def why_not_cudnn(q: Float[Array, "B T Q H"], device_kind: str, *, masked: bool) -> str | None:
    """Says why cuDNN's fused attention cannot take queries like `q`.

    Args:
        q: queries; only shape and dtype are read.
        device_kind: the GPU's name.
        masked: whether an explicit mask comes along.

    Returns:
        The reason as a sentence, or `None` where it can.

    Example:
        >>> why_not_cudnn(jnp.zeros((1, 8, 2, 64)), "NVIDIA H200", masked=False)
        'cuDNN attention takes bfloat16 and float16, and the queries are float32.'
    """
    length, width = q.shape[1], q.shape[3]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN attention takes bfloat16 and float16, and the queries are {q.dtype}."
    if width % 8 or width > 128:  # from Hopper on 256, which is not known apart when compiling ahead of time
        return f"cuDNN attention takes head widths up to 128 that 8 divides, and the width is {width}."
    if masked and length % 2:
        return f"cuDNN attention with a mask takes even lengths, and the length is {length}."
    if _dispatch.is_before_ampere(device_kind):
        return f"cuDNN attention needs compute capability 8.0 (Ampere) or newer, and this is a {device_kind}."
    try:
        jax.eval_shape(functools.partial(jax.nn.dot_product_attention, implementation="cudnn"), q, q, q)
    except RuntimeError as error:  # only where a program is compiled for a GPU that is not there
        return f"cuDNN is not installed: {error}"
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


def _same_segment(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B 1 T T"]:
    return (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]


def splash_attention(
    q: Float[Array, "B T Q H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"] | None,
    *,
    interpret: bool = False,
) -> Float[Array, "B T Q H"]:
    """`causal_attention` by JAX's splash attention for TPUs.

    Args:
        q: queries, any float dtype; 128 divides T.
        k: keys, of q's dtype.
        v: values, of q's dtype.
        segment_ids: as in `causal_attention`.
        interpret: run in the Pallas interpreter, on any device.

    Returns:
        An array like `q`.
    """
    _, length, query_heads, width = q.shape
    block = max(size for size in _SPLASH_BLOCKS if length % size == 0)
    mask = splash.MultiHeadMask([splash.CausalMask((length, length))] * query_heads)
    sizes = splash.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block,
        block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=block,
        block_q_dq=block, block_kv_dq=block,
    )  # fmt: skip
    kernel = splash.make_splash_mha_single_device(mask, block_sizes=sizes, interpret=interpret)
    segments = None if segment_ids is None else splash.SegmentIds(segment_ids, segment_ids)
    heads_first = functools.partial(jnp.swapaxes, axis1=1, axis2=2)  # splash works on (heads, T, H), unscaled
    out = jax.vmap(kernel)(heads_first(q) * width**-0.5, heads_first(k), heads_first(v), segments)
    return heads_first(out)
