"""Rotary position embedding in plain XLA: one fused pass over q and one over k, if XLA does not fuse them further."""

import functools
import itertools

import jax
import jax.numpy as jnp

from liger_jax.pallas_kernels._tiles import promoted
from liger_jax.pallas_kernels.rope import formulas


def unsupported(q: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array, *, layout: str) -> str | None:
    """XLA runs every case."""
    return None


def _rotated(x: jax.Array, cos: jax.Array, sin: jax.Array, *, inverse: bool, layout: str) -> jax.Array:
    """Rotates the first R columns of x (B, T, heads, H); cos and sin (1|B, T, R)."""
    rotary, rest = jnp.split(x, [cos.shape[-1]], axis=-1)
    dtype = promoted(x.dtype, jnp.float32)
    halves = functools.partial(jnp.split, indices_or_sections=2, axis=-1)
    pairs = halves(rotary) if layout == "half" else (rotary[..., 0::2], rotary[..., 1::2])
    cos_halves, sin_halves = (halves(table.astype(dtype)[:, :, None, :]) for table in (cos, sin))
    rotated = formulas.rotated_halves(pairs, cos_halves, sin_halves, inverse=inverse)
    if layout == "interleaved":
        rotated = (jnp.stack(rotated, axis=-1).reshape(rotary.shape),)
    return jnp.concatenate([*rotated, rest], axis=-1)


def _merged(table: jax.Array, sections: tuple[int, ...]) -> jax.Array:
    """(3, 1|B, T, R) → (1|B, T, R): the columns of each section come from its own table."""
    *edges, _ = itertools.accumulate((*sections, *sections))
    parts = jnp.split(table, edges, axis=-1)
    return jnp.concatenate([part[i % 3] for i, part in enumerate(parts)], axis=-1)


def rotate(
    q: jax.Array,
    k: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    sections: tuple[int, ...] | None,
    inverse: bool,
    layout: str,
) -> tuple[jax.Array, jax.Array]:
    """q (B, T, Q, H), k (B, T, K, H), cos and sin ([3,] 1|B, T, R) → q and k, rotated; inverse for the gradient."""
    if sections is not None:
        cos, sin = _merged(cos, sections), _merged(sin, sections)
    q, k = (_rotated(x, cos, sin, inverse=inverse, layout=layout) for x in (q, k))
    return q, k
