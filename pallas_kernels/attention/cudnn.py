"""Causal attention by cuDNN, as JAX calls it: the fastest on NVIDIA GPUs for one segment without a softcap.

Supported cases are those of training, because an op cannot know whether it will be differentiated. They are fewer than
those of inference: JAX (0.10.2 to 0.12.0, `check_is_flash_attention`) requires even lengths in training, since it
counts the empty array that stands for no bias as a bias, and cuDNN's own backward takes no single position. So an odd
row is padded with one position. No position before it attends to it, with any window, and its own output is cut off:
its gradient is 0, and it adds exactly 0 to the others'. This costs a copy of q, k and v.
"""

import functools
import math

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels.attention.config import Typed
from liger_jax.pallas_kernels.attention.intervals import Segments

_TOO_MANY = 2**31  # elements of q: at 1.0001 times as many, its gradient and k's were wrong on an H200
_LARGEST_GRID = 65_535  # blocks along a grid's second and third axes; cuDNN fails at launch with a batch of 70,000


def unsupported(
    q: Typed,
    k: Typed,
    v: Typed,
    segment_ids: Typed | None,
    *,
    window: int | None,
    softcap: float | None,
    scale: float | None = None,
    is_part: bool = False,
    has_sinks: bool = False,
    capability: tuple[int, int],
) -> str | None:
    """Takes 16-bit operands of limited width. Refuses softcaps, and segments: JAX would make a (T, T) mask of them."""
    if is_part:
        return "cuDNN attention needs one query for each key, and does not support q_offset; use 'xla'."
    if has_sinks:
        return "cuDNN attention does not support sinks; use 'xla'."
    if segment_ids is not None or softcap is not None:
        return "cuDNN attention does not support segments and softcaps; use 'xla'."
    if scale is not None and scale <= 0:  # it returned NaN on an H100
        return f"cuDNN attention supports positive scales, and scale is {scale}; use 'xla', or negate the queries."
    return why_not(q, k, window=window, capability=capability)


def why_not(q: Typed, k: Typed, *, window: int | None = None, capability: tuple[int, int]) -> str | None:
    """Why cuDNN cannot train on q (B, T, Q, H), and keys and values like k (B, T, K, H), or None where it can.

    Widths over 128 need capability 9.0. JAX's own checks are asked last: they know the version of cuDNN, and ask the
    GPU of this process, where there is one.
    """
    width, widest = q.shape[3], 256 if capability >= (9, 0) else 128
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN attention supports bfloat16 and float16, and the queries are {q.dtype}; use 'xla'."
    if width % 8 or width > widest:
        return f"cuDNN attention supports head widths up to {widest} in multiples of 8, and it is {width}; use 'xla'."
    for name, size in dict(B=q.shape[0], Q=q.shape[2]).items():
        if size > _LARGEST_GRID:
            return f"cuDNN attention supports B and Q up to {_LARGEST_GRID:,}, and {name} is {size:,}; use 'xla'."
    if (size := math.prod(q.shape)) >= _TOO_MANY:
        return f"cuDNN attention supports fewer than {_TOO_MANY:,} queries' numbers, and there are {size:,}; use 'xla'."
    like_q, like_k = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k))
    run = functools.partial(attend, segments=None, window=window, softcap=None, scale=None)
    try:
        jax.eval_shape(lambda *arrays: jax.vjp(run, *arrays)[0], like_q, like_k, like_k)
    except RuntimeError as error:  # cuDNN is absent, as where a program is compiled for another machine, or refuses
        return f"cuDNN attention cannot train here: {error} Use 'xla'."
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
) -> jax.Array:
    """q (B, T, Q, H), k and v (B, T, K, H) → (B, T, Q, H)."""
    del segments, softcap  # `unsupported` refuses them
    length, before = q.shape[1], None if window is None else (window - 1, 0)
    if length % 2:
        q, k, v = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (q, k, v))
    out = jax.nn.dot_product_attention(
        q, k, v, is_causal=True, scale=scale, local_window_size=before, implementation="cudnn"
    )
    return out[:, :length]
