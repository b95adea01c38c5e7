"""Ops without kernels as their formulas stand, in whatever precision they are given."""

import jax
import jax.numpy as jnp


def dyt(x: jax.Array, alpha: jax.Array, scale: jax.Array | None, bias: jax.Array | None) -> jax.Array:
    """y = tanh(alpha · x) · scale + bias, in x's dtype throughout."""
    y = jnp.tanh(alpha * x)
    y = y if scale is None else y * scale
    return y if bias is None else y + bias


def group_norm(
    x: jax.Array, scale: jax.Array | None, bias: jax.Array | None, *, num_groups: int, eps: float, channel_axis: int
) -> jax.Array:
    """x (B, ..., C, ...): (x − mean) / sqrt(var + eps) of each example's groups of channels, then scale and bias."""
    last = jnp.moveaxis(x, channel_axis, -1)
    groups = last.reshape(len(x), -1, num_groups, last.shape[-1] // num_groups)
    centred = groups - jnp.mean(groups, axis=(1, 3), keepdims=True)
    y = centred / jnp.sqrt(jnp.mean(jnp.square(centred), axis=(1, 3), keepdims=True) + eps)
    y = y.reshape(last.shape)
    y = y if scale is None else y * scale
    return jnp.moveaxis(y if bias is None else y + bias, -1, channel_axis)


def poly_norm(x: jax.Array, weight: jax.Array, bias: jax.Array | None, *, eps: float) -> jax.Array:
    """y = Σ_p weight[3 − p] · x^p / sqrt(mean(x^2p) + eps) + bias for p = 3, 2, 1, in x's dtype throughout."""
    powers = (x**3, x**2, x)
    normed = [u / jnp.sqrt(jnp.mean(jnp.square(u), axis=-1, keepdims=True) + eps) for u in powers]
    y = weight[0] * normed[0] + weight[1] * normed[1] + weight[2] * normed[2]
    return y if bias is None else y + bias


def relu_squared(x: jax.Array) -> jax.Array:
    """max(x, 0)²."""
    return jnp.maximum(x, 0) ** 2


def softmax(x: jax.Array, axis: int = -1) -> jax.Array:
    """exp(x_i) / Σ exp(x_j)."""
    weights = jnp.exp(x - jax.lax.stop_gradient(jnp.max(x, axis=axis, keepdims=True)))
    return weights / jnp.sum(weights, axis=axis, keepdims=True)


def sparsemax(x: jax.Array, axis: int = -1) -> jax.Array:
    """max(x_i − τ, 0), with τ = (Σ x_j − 1)/k over the k largest x, for the largest k with 1 + k·x₍ₖ₎ > their sum."""
    x = jnp.moveaxis(x, axis, -1)
    descending = jnp.flip(jnp.sort(x, axis=-1), axis=-1)
    sums, ranks = jnp.cumsum(descending, axis=-1), jnp.cumsum(jnp.ones_like(x), axis=-1)
    largest = 1 + ranks * descending > sums
    threshold = jnp.sum(jnp.where(largest, descending, 0), axis=-1, keepdims=True) - 1
    threshold /= jnp.sum(jnp.where(largest, 1.0, 0.0), axis=-1, keepdims=True).astype(x.dtype)
    return jnp.moveaxis(jnp.where(x > threshold, x - threshold, 0), -1, axis)


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


def gated_delta_rule(q, k, v, gate, beta, segment_ids=None, state=None):
    """The recurrence, token by token, in the dtype of the arguments."""
    (batch, length, heads, width), shared = v.shape, v.shape[2] // k.shape[2]
    q, k = (jnp.repeat(x, shared, axis=2) for x in (q, k))
    ids = jnp.zeros((batch, length), jnp.int32) if segment_ids is None else segment_ids
    begins = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)))
    state = jnp.zeros((batch, heads, q.shape[3], width), v.dtype) if state is None else state

    def step(state, token):
        q, k, v, gate, beta, begins = token
        state = jnp.exp(gate)[:, :, None, None] * jnp.where(begins[:, None, None, None], 0.0, state)
        write = beta[:, :, None] * (v - jnp.einsum("bhde,bhd->bhe", state, k))
        state = state + jnp.einsum("bhd,bhe->bhde", k, write)
        return state, jnp.einsum("bhde,bhd->bhe", state, q) * q.shape[2] ** -0.5

    state, out = jax.lax.scan(step, state, [jnp.moveaxis(x, 1, 0) for x in (q, k, v, gate, beta, begins)])
    return jnp.moveaxis(out, 0, 1), state


def causal_conv1d(x, weight, bias=None, segment_ids=None, state=None):
    """The sum over the last tokens of the document, in the dtype of the arguments."""
    (batch, length, _), taps = x.shape, weight.shape[1]
    state = jnp.zeros((batch, taps - 1, x.shape[2]), x.dtype) if state is None else state
    ids = jnp.zeros((batch, length), jnp.int32) if segment_ids is None else segment_ids
    number = jnp.cumsum(jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0))), axis=1)
    numbers, tokens = jnp.pad(number, ((0, 0), (taps - 1, 0))), jnp.concatenate([state, x], axis=1)
    out = jnp.zeros_like(x) if bias is None else jnp.zeros_like(x) + bias[None, None]
    for j in range(taps):
        same = (numbers[:, j : j + length] == number)[:, :, None]
        out = out + jnp.where(same, tokens[:, j : j + length], 0.0) * weight[:, j][None, None]
    same = (numbers[:, length:] == number[:, -1:])[:, :, None]
    return out, jnp.where(same, tokens[:, length:], 0.0)
