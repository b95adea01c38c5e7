"""Causal attention by cuDNN, as JAX calls it: the fastest on NVIDIA GPUs for one segment without a softcap."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels.attention.intervals import Segments


def unsupported(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    *,
    softcap: float | None,
    capability: tuple[int, int],
    **_: Any,
) -> str | None:
    """Takes 16-bit operands of limited width. Refuses softcaps, and segments: JAX would make a (T, T) mask of them."""
    if segment_ids is not None or softcap is not None:
        return "cuDNN attention knows no segments and no softcap; use 'xla'."
    return why_not(q, capability=capability)


def why_not(q: jax.Array | jax.ShapeDtypeStruct, *, capability: tuple[int, int]) -> str | None:
    """Why cuDNN cannot take queries like q (B, T, Q, H), or None where it can. Widths over 128 need capability 9.0."""
    width, widest = q.shape[3], 256 if capability >= (9, 0) else 128
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN attention takes bfloat16 and float16, and the queries are {q.dtype}; use 'xla'."
    if width % 8 or width > widest:
        return f"cuDNN attention takes head widths up to {widest} that 8 divides, and the width is {width}; use 'xla'."
    like_q = jax.ShapeDtypeStruct(q.shape, q.dtype)
    try:
        jax.eval_shape(functools.partial(jax.nn.dot_product_attention, implementation="cudnn"), like_q, like_q, like_q)
    except RuntimeError as error:  # The program is compiled for a GPU that this machine does not have.
        return f"cuDNN cannot be asked here: {error}"
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
    before = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=True, scale=scale, local_window_size=before, implementation="cudnn"
    )
