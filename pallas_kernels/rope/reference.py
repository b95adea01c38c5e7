"""Rotary position embedding as its formula stands: the oracle of the tests, in whatever precision it is given."""

import jax
import jax.numpy as jnp


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, layout: str = "half") -> jax.Array:
    """x (B, T, heads, H), cos and sin (1|B, T, R): x·cos + (−x₂, x₁)·sin for the first R columns (x₁, x₂).

    In the interleaved layout x₁ are the even columns and x₂ the odd ones.
    """
    rotary_width = cos.shape[-1]
    columns = jnp.arange(rotary_width)
    if layout == "interleaved":
        columns = jnp.concatenate([columns[0::2], columns[1::2]])
    x, rest = x[..., columns], x[..., rotary_width:]
    first, second = jnp.split(x, 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    rotated = x * cos[:, :, None, :] + turned * sin[:, :, None, :]
    return jnp.concatenate([rotated[..., jnp.argsort(columns)], rest], axis=-1)


def apply_rope(
    q: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array, layout: str = "half"
) -> tuple[jax.Array, jax.Array]:
    """Rotates q (B, T, Q, H) and k (B, T, K, H)."""
    return rotate(q, cos, sin, layout), rotate(k, cos, sin, layout)


def apply_mrope(
    q: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array, sections: tuple[int, ...], layout: str = "half"
) -> tuple[jax.Array, jax.Array]:
    """cos and sin (3, 1|B, T, R): the section of pair i says which of the three tables rotates it."""
    table = jnp.repeat(jnp.arange(3), jnp.array(sections), total_repeat_length=cos.shape[-1] // 2)
    chosen = jnp.arange(3)[:, None] == jnp.concatenate([table, table])
    cos, sin = (jnp.sum(jnp.where(chosen[:, None, None, :], x, 0), axis=0) for x in (cos, sin))
    return apply_rope(q, k, cos, sin, layout)
