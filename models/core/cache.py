"""The key-value cache: with the keys and values of earlier tokens, the next token costs one position's work.

A slot holds one token of every row of the batch; padding takes slots too. A query sees a slot if the slot's token is
not after its own in their row. Padding does not count in that order, so a row may be padded on either side.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from liger_jax._tree import tree_dataclass
from liger_jax.pallas_kernels.attention.formulas import weights
from liger_jax.pallas_kernels.attention.xla import CHUNK, MASKED_SCORE


@tree_dataclass
class RecurrentCache:
    """The states of layers without keys, of linear attention or of a convolution, after earlier tokens.

    Attributes:
        states: (layers, B, heads, key width, value width) float32, those of the gated delta rule; `None` in models
            whose layers are convolutions alone.
        tokens: (layers, B, W − 1, channels), the last tokens of the convolution of width W; 0 before the first one.
    """

    states: jax.Array | None
    tokens: jax.Array


@tree_dataclass
class KVCache:
    """The keys and values of B rows with S slots each; `CausalLM.init_cache` makes an empty one.

    Attributes:
        keys: (L, B, S, K, H), after the rotary embedding, of the L layers that have keys. If the layers' heads differ,
            (L, B, S, 1, W), where W is the largest K·H.
        values: as `keys`.
        positions: (B, S) int32, the index of a slot's token among the tokens of its row; −1 where there is no token.
        length: int32 scalar, the number of slots that are written. In an empty cache it is a NumPy array, so that it is
            known under jit, too.
        recurrent: the states of layers without keys; `None` in a model without such layers.
    """

    keys: jax.Array
    values: jax.Array
    positions: jax.Array
    length: jax.Array | np.ndarray
    recurrent: RecurrentCache | None = None

    def is_known_empty(self) -> bool:
        """Whether the cache is known, also under jit, to have no written slot."""
        return not isinstance(self.length, Tracer) and int(self.length) == 0


def empty_cache(config: Any, batch: int, length: int, dtype: Any) -> KVCache:
    """Makes a cache without tokens."""
    if batch < 1:
        raise ValueError(f"init_cache: batch={batch} must be at least 1.")
    if not 1 <= length <= config.longest_sequence:
        raise ValueError(
            f"init_cache: length={length} must be in [1, {config.longest_sequence}], the model's longest sequence "
            "(max_position_embeddings and rope_scaling). Use fewer tokens, or increase the config's field."
        )
    recurrent, of_layers = None, (config.num_recurrent_layers, batch)
    if (sizes := config.recurrent_sizes) is not None:
        recurrent = RecurrentCache(
            states=None if sizes.state is None else jnp.zeros((*of_layers, *sizes.state), jnp.float32),
            tokens=jnp.zeros((*of_layers, sizes.taps - 1, sizes.channels), dtype),
        )
    layers, *of_token = config.cached
    shape = (layers, batch, length, *of_token)
    return KVCache(
        keys=jnp.zeros(shape, dtype),
        values=jnp.zeros(shape, dtype),
        positions=jnp.full((batch, length), -1, jnp.int32),
        length=np.zeros((), np.int32),
        recurrent=recurrent,
    )


def with_tokens(
    cache: KVCache, shape: tuple[int, int], attention_mask: Bool[Array, "B T"] | Int[Array, "B T"] | None
) -> tuple[KVCache, Int[Array, "B T"]]:
    """Gives the next T slots to tokens; the layers then write their keys and values.

    Returns the cache with its old `length`, and the tokens' positions, −1 for padding.
    """
    batch, slots = cache.positions.shape
    if batch != shape[0]:
        raise ValueError(f"cache has {batch} rows, and input_ids has {shape[0]}; make one with init_cache.")
    if not isinstance(cache.length, Tracer) and (written := int(cache.length)) + shape[1] > slots:
        raise ValueError(
            f"cache has {slots} slots, of which {written} are written, and input_ids has {shape[1]} more positions. "
            f"Make it longer: init_cache(batch, {written + shape[1]})."
        )
    real = jnp.ones(shape, bool) if attention_mask is None else attention_mask.astype(bool)
    before = jnp.max(cache.positions, axis=1, keepdims=True)
    positions = jnp.where(real, before + jnp.cumsum(real, axis=1, dtype=jnp.int32), -1)
    written = jax.lax.dynamic_update_slice_in_dim(cache.positions, positions, cache.length, axis=1)
    return dataclasses.replace(cache, positions=written), positions


def lengthened(cache: KVCache, length: int) -> KVCache:
    """Makes a cache longer."""
    keys, values = _longer(cache.keys, 2, length), _longer(cache.values, 2, length)
    return dataclasses.replace(cache, keys=keys, values=values, positions=_longer(cache.positions, 1, length, -1))


def _longer(x, axis, length, value=0):
    widths = [(0, length - x.shape[axis] if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value)


def repeated(cache: KVCache, times: int) -> KVCache:
    """Gives each row of a cache copies, which follow it."""
    again = functools.partial(jnp.repeat, repeats=times, axis=1)
    keys, values, recurrent = jax.tree.map(again, (cache.keys, cache.values, cache.recurrent))
    positions = jnp.repeat(cache.positions, times, axis=0)
    return dataclasses.replace(cache, keys=keys, values=values, positions=positions, recurrent=recurrent)


def of_rows(cache: KVCache, rows: Int[Array, " b"]) -> KVCache:
    """Takes some rows out of a cache."""
    take = functools.partial(jnp.take, indices=rows, mode="clip", unique_indices=True, indices_are_sorted=True)
    arrays = cache.keys, cache.values, cache.recurrent
    keys, values, recurrent = jax.tree.map(functools.partial(take, axis=1), arrays)
    positions = take(cache.positions, axis=0)
    return dataclasses.replace(cache, keys=keys, values=values, positions=positions, recurrent=recurrent)


def mixes_ropes(changes_at: int | None, before: Int[Array, ""], after: Int[Array, ""]) -> Bool[Array, ""] | bool:
    """Whether tokens would meet keys in a cache that a `LongRope` has turned by its other frequencies.

    Returns True if the tokens are the first beyond the length in training, and the cache holds some within it.
    """
    if changes_at is None:
        return False
    is_mixed = (before >= 0) & (before < changes_at) & (after >= changes_at)
    if not isinstance(is_mixed, Tracer) and bool(is_mixed):
        raise ValueError(
            f"cache holds keys of {int(before) + 1} positions, and with {int(after) + 1}, which is more than "
            f"original_max_position_embeddings={changes_at}, rope_scaling rotates all of them differently. Call the "
            "model with all tokens and a new cache, as generate does."
        )
    return is_mixed


class LayerCache:
    """One layer's view of a cache during one call. Attention writes to it and reads from it.

    `cache`: the model's cache. Its `positions` include the call's tokens; its `length` does not yet. `layer`: the
    layer's number among those with keys, or among those without.
    """

    def __init__(self, cache: KVCache, layer: Int[Array, ""], is_new: bool = False):
        self.cache, self.layer, self.is_new = cache, layer, is_new

    def recurrent_states(self) -> tuple[Float[Array, "B H D E"] | None, Float[Array, "B W_1 C"]]:
        """The states of a layer of linear attention, and the last tokens of a layer's convolution."""
        assert self.cache.recurrent is not None
        states, tokens = self.cache.recurrent.states, self.cache.recurrent.tokens
        of_layer = lambda x: jax.lax.dynamic_index_in_dim(x, self.layer, keepdims=False)
        return None if states is None else of_layer(states), of_layer(tokens)

    def write_recurrent(self, state: Float[Array, "B H D E"] | None, tokens: Float[Array, "B W_1 C"]) -> None:
        """Writes what `recurrent_states` returns to the next call."""
        recurrent = self.cache.recurrent
        assert recurrent is not None
        written = lambda x, own: jax.lax.dynamic_update_index_in_dim(x, own.astype(x.dtype), self.layer, 0)
        states = None if state is None else written(recurrent.states, state)
        recurrent = RecurrentCache(states=states, tokens=written(recurrent.tokens, tokens))
        self.cache = dataclasses.replace(self.cache, recurrent=recurrent)

    def attend(
        self,
        q: Float[Array, "B T Q H"],
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        *,
        attend_to_own: Callable[..., Any],
        attend_to_cache: Callable[..., Any],
        window: int | None,
        softcap: float | None,
        scale: float | None,
        sinks: Float[Array, " Q"] | None = None,
        owner: int | None = None,
    ) -> Float[Array, "B T Q H"]:
        """Writes T keys and values, and attends to all keys in the cache.

        One token's queries go to `attend_to_cache`. If the cache was empty, the call's own keys are all there is, and
        `attend_to_own` attends to them. The exception is a row with padding between its tokens, which a window would
        count.

        `attend_to_own`: causal attention to the call's own keys and values, a function of `q`, `k` and `v`.
        `attend_to_cache`: attention of the last token of each row to the whole cache, a function of `q`, the cache's
        keys, values and positions, the layer's number and how many slots are written. `owner`: the layer that has
        written these keys and values already; `None` for this one.
        """
        cache, layer = self.cache, self.layer if owner is None else jnp.int32(owner)
        # Keys and values are rounded here as later calls will read them.
        k, v = k.astype(cache.keys.dtype), v.astype(cache.values.dtype)
        if owner is None:
            zero = jnp.zeros_like(cache.length)  # a Python 0 would be int64 where jax_enable_x64 is set
            start = (layer, zero, cache.length, zero, zero)
            keys, values = (
                jax.lax.dynamic_update_slice(x, _as_in(x, own)[None], start)
                for x, own in ((cache.keys, k), (cache.values, v))
            )
            self.cache = dataclasses.replace(cache, keys=keys, values=values)
        keys, values = (_in_heads(x, k.shape[2:]) for x in (self.cache.keys, self.cache.values))
        if q.shape[1] == 1:
            return attend_to_cache(q, keys, values, cache.positions, layer, cache.length + 1)
        own = jax.lax.dynamic_slice_in_dim(cache.positions, cache.length, q.shape[1], axis=1)

        def attend_to_all() -> Array:
            k, v = (jax.lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in (keys, values))
            options: Any = dict(window=window, softcap=softcap, scale=scale, sinks=sinks)
            return cached_attention(q, k, v, own, cache.positions, **options)

        def attend_to_these() -> Array:
            return attend_to_own(q, k.astype(q.dtype), v.astype(q.dtype))

        if window is None and self.is_new:
            return attend_to_these()
        is_prompt = cache.length == 0
        if window is not None:
            is_token = jnp.pad(own >= 0, ((0, 0), (1, 0)))
            is_prompt &= jnp.all(jnp.sum(is_token[:, 1:] & ~is_token[:, :-1], axis=1) <= 1)
        return jax.lax.cond(is_prompt, attend_to_these, attend_to_all)


def _as_in(cached: Float[Array, "L B S K W"], own: Float[Array, "B T k H"]) -> Float[Array, "B T K W"]:
    """Keys or values as a cache holds them, side by side and with zeros behind where its layers differ in heads."""
    if own.shape[2:] == cached.shape[3:]:
        return own
    flat = own.reshape(*own.shape[:2], 1, -1)
    return jnp.pad(flat, ((0, 0), (0, 0), (0, 0), (0, cached.shape[-1] - flat.shape[-1])))


def _in_heads(cached: Float[Array, "L B S K W"], heads: tuple[int, ...]) -> Float[Array, "L B S k H"]:
    """The inverse of `_as_in`, for a whole cache."""
    if heads == cached.shape[3:]:
        return cached
    return cached[..., 0, : math.prod(heads)].reshape(*cached.shape[:3], *heads)


def cached_attention(
    q: Float[Array, "B T Q H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    query_positions: Int[Array, "B T"],
    key_positions: Int[Array, "B S"],
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Float[Array, " Q"] | None = None,
) -> Float[Array, "B T Q H"]:
    """softmax(softcap·tanh(scale·q·kᵀ/softcap))·v over the keys that a query sees, with the softmax in float32.

    `key_positions`: the number of each key's token in its row; −1 for a key that no query sees. `window`: a position
    sees itself and window − 1 before it; `None` for all before it. `sinks`: one more score for each head, of a key
    without a value; `None` for none. Returns an array like `q`. For a query that sees no key the numbers are finite and
    mean nothing.
    """
    (batch, length, _, width), kv_heads, dtype = q.shape, k.shape[2], q.dtype
    scale = width**-0.5 if scale is None else scale
    k, v = k.astype(dtype), v.astype(dtype)
    sinks = None if sinks is None else sinks.reshape(kv_heads, -1)

    def attend(query, position):
        """One position's queries (B, K, Q/K, H)."""
        scores = scale * jnp.einsum("bkgh,bskh->bkgs", query, k, preferred_element_type=jnp.float32)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        distance = position[:, None] - key_positions
        visible = (distance >= 0) & (key_positions >= 0)
        if window is not None:
            visible &= distance < window
        shares = weights(jnp.where(visible[:, None, None], scores, MASKED_SCORE), sinks)
        return jnp.einsum("bkgs,bskh->bkgh", shares.astype(dtype), v)

    queries = q.reshape(batch, length, kv_heads, -1, width).swapaxes(0, 1)
    inputs = (queries, query_positions.T)
    if length <= CHUNK:
        out = jax.vmap(attend)(*inputs)
    else:
        out = jax.lax.map(lambda x: attend(*x), inputs, batch_size=CHUNK)
    return out.swapaxes(0, 1).reshape(q.shape)
