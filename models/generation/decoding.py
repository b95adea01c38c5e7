"""Decoding: token after token with a key-value cache, from which rows are removed when they have ended.

`all_at_once` is one program, which may be traced into another one. `by_parts` has a program for the prompts and one for
each number of rows that occurs; between them the host reads how many rows have not ended. The cache has room for all
tokens from the start, and attention reads only its filled slots.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Int, Integer

from liger_jax._tree import tree_dataclass
from liger_jax.models.core.cache import KVCache, lengthened, of_rows, repeated
from liger_jax.models.generation.sampling import chosen, log_probs_of

_FEWEST_ROWS = 8  # the least size to which a batch is reduced: below it, reading the weights dominates a step
_FEWEST_TOKENS = 16  # remaining steps for which rows are removed: moving the others costs as much as a step or two


class Request(NamedTuple):
    """The prompts to continue, and how tokens are chosen."""

    prompts: Integer[Array, "B T"]  # their ids, padded in front
    mask: Bool[Array, "B T"]  # 0 where a token is padding
    choice: Any  # None for the likeliest tokens, or (key, temperature, top_p or None, top_k or None)
    ends: Any  # the tokens that end a row, and the one that fills it then


class Sizes(NamedTuple):
    """The static sizes of a program."""

    new: int  # the most tokens that a row gets
    times: int  # the rows of a prompt
    return_log_probs: bool  # whether tokens have log-probabilities


@tree_dataclass
class Decoding:
    """The state of decoding: N rows in all, of which n are still decoded."""

    count: jax.Array  # int32 scalar, how many tokens a row has that has not ended
    tokens: jax.Array  # (N, new) int32
    log_probs: jax.Array | None  # (N, new) float32, or None
    rows: jax.Array | None  # (n,) int32, the numbers of the rows that are decoded, ascending; None for all
    ended: jax.Array  # (n,) bool, which of them have ended
    cache: KVCache  # of n rows


@functools.partial(jax.jit, static_argnums=(0, 3))
def all_at_once(graph: Any, params: Any, request: Request, sizes: Sizes) -> Decoding:
    """Decodes until all rows have ended or have all their tokens; all rows stay in the batch."""
    model = nnx.merge(graph, params)
    return _decoded(model, _begun(model, request, sizes), request, sizes, 0)


def by_parts(graph: Any, params: Any, request: Request, sizes: Sizes) -> Decoding:
    """Does the same, but halves the batch whenever at most half of its rows have not ended."""
    state, numbers = _begin(graph, params, request, sizes)
    while True:
        count, living = np.asarray(numbers).tolist()
        left = sizes.new - count
        if not left or not living:
            return state
        if living <= _half(len(state.ended), left):
            state = _without_ended(state, _rows_for(living, len(state.ended)))
        state, numbers = _decode(graph, params, state, request, sizes, np.int32(_half(len(state.ended), left)))


def lowered(graph: Any, params: Any, request: Request, sizes: Sizes, by_parts: bool) -> list[Any]:
    """The program of `all_at_once`, or those with which `by_parts` begins, for parameters of these types."""
    if not by_parts:
        return [all_at_once.lower(graph, params, request, sizes)]
    begin = _begin.lower(graph, params, request, sizes)
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), begin.out_info[0])
    half = _half(len(state.ended), sizes.new - 1)
    return [begin, _decode.lower(graph, params, state, request, sizes, np.int32(half))]


def _half(rows, left):
    """Half of the rows: if no more than these have not ended, the others are removed. 0 if that is not worth it.

    It is not worth it for small batches and for the last few tokens.
    """
    return rows // 2 if rows // 2 >= _FEWEST_ROWS and left >= _FEWEST_TOKENS else 0


def _rows_for(living, rows):
    """The smallest batch, by halving, that holds all rows which have not ended."""
    while rows // 2 >= max(living, _FEWEST_ROWS):
        rows //= 2
    return rows


# --- the programs' functions ------------------------------------------------------------------------------------------


def of_prompts(
    model: Any, prompts: Integer[Array, "B T"], mask: Bool[Array, "B T"], slots: int
) -> tuple[jax.Array, KVCache]:
    """Logits (B, V) after the prompts, and a cache of so many slots with them."""
    cache = model.init_cache(prompts.shape[0], slots)
    out = model(prompts, attention_mask=mask, cache=cache, logits_to_keep=1)
    return out.logits[:, -1], out.cache


def after(model: Any, last: Int[Array, " B"], cache: KVCache) -> tuple[jax.Array, KVCache]:
    """Logits (B, V) after the last tokens, and the cache with them."""
    out = model(last[:, None], cache=cache)
    return out.logits[:, -1], out.cache


def _begun(model, request, sizes):
    """Rows with their first tokens; the model reads a prompt once for all of its rows."""
    prompts, times = request.prompts, sizes.times
    slots = prompts.shape[1] + sizes.new - 1  # the last token is not read again
    logits, cache = of_prompts(model, prompts, request.mask, prompts.shape[1] if times > 1 else slots)
    if times > 1:
        logits, cache = jnp.repeat(logits, times, axis=0), lengthened(repeated(cache, times), slots)
    shape = len(logits), sizes.new
    state = Decoding(
        count=jnp.zeros((), jnp.int32),
        tokens=jnp.broadcast_to(request.ends[1], shape),
        log_probs=jnp.zeros(shape, jnp.float32) if sizes.return_log_probs else None,
        rows=None,
        ended=jnp.zeros(shape[0], bool),
        cache=cache,
    )
    return _with_token(state, logits, cache, request)


def _with_token(state, logits, cache, request):
    """Writes token number `count` of each row, and its log-probability."""
    rows = jnp.arange(len(logits), dtype=jnp.int32) if state.rows is None else state.rows
    token, ended = chosen(state.count, rows, logits, state.ended, request.choice, request.ends)
    place = (slice(None) if state.rows is None else state.rows), state.count
    log_probs = state.log_probs
    if log_probs is not None:
        temperature = None if request.choice is None else request.choice[1]
        chosen_log_probs = jnp.where(state.ended, 0.0, log_probs_of(token, logits, temperature))
        log_probs = log_probs.at[place].set(chosen_log_probs)
    return Decoding(
        count=state.count + 1,
        tokens=state.tokens.at[place].set(token),
        log_probs=log_probs,
        rows=state.rows,
        ended=ended,
        cache=cache,
    )


def _decoded(model, state, request, sizes, fewest):
    """Decodes until all tokens are there, or at most `fewest` rows have not ended; with 0, until all have."""
    slots, changes_at = state.cache.positions.shape[1], model.config.rope_changes_at

    def unfinished(state):
        least = jnp.where(sizes.new - state.count >= _FEWEST_TOKENS, fewest, 0)  # for the last few tokens none leaves
        return (state.count < sizes.new) & (_number_of(~state.ended) > least)

    def of_last(state):
        """Logits and cache after the last token."""
        last = jax.lax.dynamic_index_in_dim(state.tokens, state.count - 1, axis=1, keepdims=False)
        return after(model, last if state.rows is None else last[state.rows], state.cache)

    def of_all(state):
        """The same, with keys and values of all tokens recomputed."""
        prompts, mask = (jnp.repeat(x, sizes.times, axis=0) for x in (request.prompts, request.mask))
        (batch, length), written = prompts.shape, request.prompts.shape[1] + state.count
        new, places = slots - length, jnp.arange(slots - length, dtype=jnp.int32)
        ids = jnp.concatenate([prompts.astype(jnp.int32), state.tokens[:, :new]], axis=1)
        is_token = jnp.concatenate([mask, jnp.broadcast_to(places < state.count, (batch, new))], axis=1)
        out = model(
            ids, attention_mask=is_token, cache=model.init_cache(batch, slots), logits_to_keep=written[None] - 1
        )
        return out.logits[:, -1], dataclasses.replace(out.cache, length=written)

    def step(state):
        if changes_at is None or slots <= changes_at:
            logits, cache = of_last(state)
        else:  # from here on earlier tokens are rotated otherwise; no row was removed (`why_rows_stay`)
            is_full = jnp.max(state.cache.positions) == changes_at - 1
            logits, cache = jax.lax.cond(is_full, of_all, of_last, state)
        return _with_token(state, logits, cache, request)

    return jax.lax.while_loop(unfinished, step, state)


def _number_of(is_true):
    return jnp.sum(is_true, dtype=jnp.int32)


# --- the programs of `by_parts` ---------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(0, 3))
def _begin(graph, params, request, sizes):
    return _with_numbers(_begun(nnx.merge(graph, params), request, sizes))


@functools.partial(jax.jit, static_argnums=(0, 4), donate_argnums=2)
def _decode(graph, params, state, request, sizes, fewest):
    return _with_numbers(_decoded(nnx.merge(graph, params), state, request, sizes, fewest))


def _with_numbers(state):
    """The state, and what the host reads of it: how many tokens are there, and how many rows have not ended."""
    return state, jnp.stack([state.count, _number_of(~state.ended)])


@functools.partial(jax.jit, static_argnums=1)
def _without_ended(state, batch):
    """The state with only some of its rows, among them all that have not ended."""
    kept = jnp.sort(jnp.argsort(state.ended, stable=True)[:batch]).astype(jnp.int32)
    return dataclasses.replace(
        state,
        rows=kept if state.rows is None else state.rows[kept],
        ended=state.ended[kept],
        cache=of_rows(state.cache, kept),
    )
