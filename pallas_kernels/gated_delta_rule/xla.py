"""The gated delta rule in XLA: a scan over groups of chunks, which every platform runs.

The backward keeps the state before every group, and makes the rest again.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from liger_jax.pallas_kernels.gated_delta_rule.config import CHUNK, CHUNKS_A_STATE, GATED_DELTA_RULE_STATES


def chunked(arrays, number, *, scale: float) -> tuple[jax.Array, jax.Array]:
    """The output and last state of finite arguments, by a scan over groups of chunks."""
    *of_tokens, state = arrays
    batch, length, heads, width = of_tokens[2].shape
    size = min(CHUNK, 1 << (length - 1).bit_length())
    group = min(CHUNKS_A_STATE, -(-length // size))
    padding = -length % (size * group)

    def cut(x):
        """(B, T, …) as (groups, chunks, B, C, …)."""
        # Padding continues the last document with a gate and beta of 0: the state stays.
        mode = "edge" if x is number else "constant"
        x = jnp.pad(x, ((0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)), mode=mode)
        return jnp.moveaxis(x.reshape(batch, x.shape[1] // (group * size), group, size, *x.shape[2:]), 0, 2)

    by_heads = [jnp.swapaxes(cut(x), 3, 4) for x in of_tokens]
    numbers = cut(number)
    # The first chunk continues the state's document, which is 0.
    flat = numbers[..., -1].reshape(numbers.shape[0] * group, batch)
    last = jnp.pad(flat[:-1], ((1, 0), (0, 0))).reshape(numbers.shape[:3])
    chunks = *by_heads, numbers, last
    step = jax.checkpoint(functools.partial(_chunk, scale=scale))
    of_group = jax.checkpoint(lambda state, chunks: jax.lax.scan(step, state, chunks))
    named = lambda state: checkpoint_name(state, GATED_DELTA_RULE_STATES)
    state, out = jax.lax.scan(lambda state, chunks: of_group(named(state), chunks), state, chunks)
    out = jnp.moveaxis(jnp.swapaxes(out, 3, 4), 2, 0).reshape(batch, length + padding, heads, width)
    return out[:, :length], state


def _chunk(state, chunk, *, scale: float) -> tuple[jax.Array, jax.Array]:
    """One chunk of C tokens: the state (B, H, D, E) after it, and the outputs (B, H, C, E).

    With G the sum of the gates up to a token, S the state before the chunk, and u the writes,

        u_t = beta_t (v_t − exp(G_t) Sᵀ k_t − Σ_{s<t} exp(G_t − G_s) (k_t · k_s) u_s)

    is a triangular system. Every exponent is a sum of gates by itself, and so exact however far the gates reach.
    """
    q, k, v, gate, beta, number, before = chunk
    groups = v.shape[1] // k.shape[1]
    q, k = (jnp.repeat(x.astype(state.dtype), groups, axis=1) for x in (q, k))
    v, beta = v.astype(state.dtype), beta.astype(state.dtype)[..., None]
    dot = functools.partial(jnp.einsum, precision="highest", preferred_element_type=state.dtype)
    size = v.shape[2]
    order = jnp.arange(size)
    is_before = (order[:, None] > order[None])[None, None]  # (1, 1, C, C)
    is_diagonal = jnp.eye(size, dtype=bool)[None, None]
    same = (number[:, :, None] == number[:, None])[:, None]  # (B, 1, C, C)
    continues = (number == before[:, None])[:, None, :, None]  # of the state's document

    steps = jnp.where(is_before, gate[..., None], 0.0)  # [u, s]: the gate of u for what s wrote
    # With the axes of a batch, since remat policies that keep products without them would keep these.
    until = jnp.broadcast_to(jnp.tril(jnp.ones((size, size), state.dtype)), (*gate.shape, size))
    decay = jnp.exp(dot("bhtu,bhus->bhts", until, steps))
    decay = jnp.where(same & (is_before | is_diagonal), decay, 0.0)
    kept = jnp.where(continues, jnp.exp(dot("bhtu,bhu->bht", until, gate))[..., None], 0.0)  # (B, H, C, 1)

    system = jnp.where(is_before, beta * decay * dot("bhtd,bhsd->bhts", k, k), 0.0)
    writes = dot("bhts,bhse->bhte", _unit_inverse(system, dot), beta * (v - kept * dot("bhtd,bhde->bhte", k, state)))
    out = kept * dot("bhtd,bhde->bhte", q, state)
    out += dot("bhts,bhse->bhte", decay * dot("bhtd,bhsd->bhts", q, k), writes)
    state = kept[:, :, -1:] * state + dot("bhtd,bhte->bhde", k * decay[:, :, -1, :, None], writes)
    return state, scale * out


def _unit_inverse(lower: jax.Array, dot) -> jax.Array:
    """(I + L)⁻¹ of strictly lower triangular L (B, H, C, C), C a power of two, from blocks that double.

    [[A, 0], [B, D]]⁻¹ = [[A⁻¹, 0], [−D⁻¹ B A⁻¹, D⁻¹]], which is stable where powers of L are not.
    """
    size = lower.shape[-1]
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype)[None, None], lower.shape)
    order, block = jnp.arange(size), 1
    while block < size:
        row, column = order[:, None] // block, order[None] // block
        is_corner = (row == column + 1) & (row % 2 == 1)
        corner = jnp.where(is_corner[None, None], lower, 0.0)
        inverse -= dot("bhts,bhsu->bhtu", dot("bhts,bhsu->bhtu", inverse, corner), inverse)
        block *= 2
    return inverse
