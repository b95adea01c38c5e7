"""Text generation: the prompt in one call, then token after token with the key-value cache.

`generate` is one program. `stream` is a program for the prompt and one for each further token, which it hands on.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Integer

from liger_jax.models.core.arguments import as_key
from liger_jax.models.core.cache import lengthened, repeated
from liger_jax.models.core.generation_checks import check_choice, check_ends, check_prompts
from liger_jax.ops.labels import as_labels

_ROOM = 128  # slots of the cache that are free after it grew
_MOST_LENGTHS = 8  # of the cache: each has a loop of its own in the program


def generate(
    model: Any,
    input_ids: Integer[Array, "B T"],
    *,
    max_new_tokens: int,
    attention_mask: Bool[Array, "B T"] | Int[Array, "B T"] | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    key: Any = None,
    num_return_sequences: int = 1,
    return_log_probs: bool = False,
) -> Any:
    """Continues each row of a batch with the likeliest tokens, or with random ones.

    p(token) = softmax(logits/temperature), over the top_k likeliest tokens, and of those over the fewest likeliest
    whose probabilities reach top_p together.

    It compiles once for a model, a batch's shape, numbers of new tokens, of sequences and of tokens that end a row, a
    way to choose (the likeliest, drawn from all, with top_p below 1, with top_k, or both), and whether
    log-probabilities are returned. Another temperature, another top_p below 1, another top_k or other ids need no
    compilation.

    The cache grows with the tokens, so that a step reads little more of it than is filled: up to 128 tokens, or an
    eighth of `max_new_tokens` if that is more. While it grows there are two of its keys or of its values. With
    `scan_layers=False` a step reads each weight once; out of a stack of layers it copies some of them first.

    Args:
        model: a `CausalLM`; `model.generate(input_ids, …)` is the same.
        input_ids: the prompts, ids in [0, V). Shorter rows are padded on either side, with any id.
        max_new_tokens: the most tokens that a row gets; prompt and new tokens must fit the model's longest sequence.
        attention_mask: 0 where a token is padding; `None` for no padding.
        temperature: 0 takes the likeliest token; below 1 the distribution is sharper than the model's, above 1 flatter.
        top_p: in (0, 1]; 1 draws from all tokens.
        top_k: how many of the likeliest tokens are drawn from, at least 1; `None` for all.
        eos_token_id: a row ends after this token, or after any of these. The work ends once all rows have ended. `None`
            takes the tokens that the model's checkpoint names in generation_config.json, else in config.json. With
            `()` no token ends a row.
        pad_token_id: the token in [0, V) that fills a row after its end; `None` for the first that ends a row.
        key: of `jax.random.key` or `jax.random.PRNGKey`; needed for random tokens.
        num_return_sequences: how many sequences each prompt gets, at least 1. The model reads the prompt once for all.
        return_log_probs: whether to return the new tokens' log-probabilities, too.

    Returns:
        (B·num_return_sequences, T + max_new_tokens): the prompts unchanged, padding included, then the new tokens. The
        sequences of a prompt follow one another. From the first position whose logits are NaN, tokens are −1. The dtype
        is input_ids', or int32 if that is narrower.

        With `return_log_probs` a pair of these and float32 in the new tokens' shape, the log-probability of each new
        token by softmax(logits/temperature) over the whole vocabulary, before top_p and top_k; for the likeliest
        tokens, by softmax(logits). It is 0 after a row's end. They are what the sampler gives to a policy loss.

    Raises:
        ValueError: an argument is out of its range, missing, or would be ignored.
        TypeError: `key` is no key.

    Example:
        >>> from liger_jax.models import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        ...                      num_attention_heads=2)
        >>> model = LlamaForCausalLM(config, rngs=nnx.Rngs(0))
        >>> prompts, mask = jnp.array([[3, 1, 4], [0, 2, 7]]), jnp.array([[1, 1, 1], [0, 1, 1]])
        >>> generate(model, prompts, attention_mask=mask, max_new_tokens=5).shape
        (2, 8)
        >>> sampled = model.generate(prompts, max_new_tokens=5, temperature=0.7, top_p=0.9, key=jax.random.key(0))
    """
    input_ids, *asked = _asked(
        model, input_ids, attention_mask, max_new_tokens, temperature, top_p, top_k, eos_token_id, pad_token_id, key
    )
    if num_return_sequences < 1:
        raise ValueError(f"generate: num_return_sequences={num_return_sequences} must be at least 1.")
    static = max_new_tokens, num_return_sequences, return_log_probs
    out, log_probs = _generate(*nnx.split(model), input_ids, *asked, *static)
    return out if log_probs is None else (out, log_probs)


def stream(
    model: Any,
    input_ids: Integer[Array, "B T"],
    *,
    max_new_tokens: int,
    attention_mask: Bool[Array, "B T"] | Int[Array, "B T"] | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    key: Any = None,
) -> Iterator[Int[np.ndarray, " B"]]:
    """Yields the tokens that `generate` returns, one of each row at a time, as soon as they are there.

    The device works at the next token while the caller has this one. Beside what `generate` compiles for, the prompt's
    program depends on the sum of the prompt's length and `max_new_tokens`, and the other one on nothing but that sum.

    Args:
        model: a `CausalLM`.
        input_ids: as in `generate`.
        max_new_tokens: as in `generate`.
        attention_mask: as in `generate`.
        temperature: as in `generate`.
        top_p: as in `generate`.
        top_k: as in `generate`.
        eos_token_id: as in `generate`.
        pad_token_id: as in `generate`.
        key: as in `generate`.

    Yields:
        int32 (B,); a row that has ended gets padding. The last ones are yielded when all rows have ended.

    Raises:
        ValueError: an argument is out of its range, missing, or would be ignored.
        TypeError: `key` is no key.

    Example:
        >>> from liger_jax.models import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        ...                      num_attention_heads=2)
        >>> model, prompt = LlamaForCausalLM(config, rngs=nnx.Rngs(0)), jnp.array([[3, 1, 4]])
        >>> tokens = [int(token[0]) for token in stream(model, prompt, max_new_tokens=5)]
        >>> tokens == model.generate(prompt, max_new_tokens=5)[0, 3:].tolist()
        True
    """
    input_ids, mask, choice, ends = _asked(
        model, input_ids, attention_mask, max_new_tokens, temperature, top_p, top_k, eos_token_id, pad_token_id, key
    )
    changes_at = model.config.rope_changes_at
    return _streamed(*nnx.split(model), input_ids, mask, choice, ends, max_new_tokens, changes_at)


def _streamed(graph, params, input_ids, mask, choice, ends, max_new_tokens, changes_at):
    """A generator apart from the checks, which are made at once."""
    longest, slots = int(jnp.max(jnp.sum(mask, axis=1))), input_ids.shape[1] + max_new_tokens - 1
    ended = jnp.zeros(input_ids.shape[0], bool)
    token, ended, cache = _first(graph, params, jnp.int32(0), input_ids, mask, ended, choice, ends, slots)
    tokens = [input_ids]
    for count in range(1, max_new_tokens + 1):
        shown, all_ended = token, jnp.all(ended)
        if changes_at is not None:
            tokens.append(token[:, None].astype(input_ids.dtype))
        if count < max_new_tokens:  # is under way while the caller has the token before it
            if longest + count - 1 == changes_at:  # this token turns all earlier ones otherwise
                ids, is_token = (
                    jnp.concatenate(tokens, axis=1),
                    jnp.pad(mask, ((0, 0), (0, count)), constant_values=True),
                )
                begun = _first(graph, params, jnp.int32(count), ids, is_token, ended, choice, ends, slots)
                token, ended, cache = begun
            else:
                token, ended, cache = _next(graph, params, jnp.int32(count), token, ended, cache, choice, ends)
        yield np.asarray(shown)
        if all_ended:
            return


def _asked(
    model, input_ids, attention_mask, max_new_tokens, temperature, top_p, top_k, eos_token_id, pad_token_id, key
):
    """The prompts, their mask, `choice` and `ends`, all checked.

    `choice` is None for the likeliest token, or (key, temperature, top_p or None, top_k or None); `ends` is
    (stops, pad).
    """
    input_ids = as_labels(input_ids)
    if eos_token_id is None:  # a checkpoint may name tokens outside its model's vocabulary
        stops = tuple(stop for stop in model.kept.stops if 0 <= stop < model.config.vocab_size)
    else:
        stops = tuple(np.atleast_1d(eos_token_id).tolist())
    pad = (stops or (0,))[0] if pad_token_id is None else pad_token_id
    mask = jnp.ones(input_ids.shape, bool) if attention_mask is None else jnp.asarray(attention_mask, bool)
    check_choice(max_new_tokens, temperature, top_p, top_k, key)
    check_ends(model.config.vocab_size, stops, pad, pad_token_id)
    check_prompts(model.config, input_ids, mask, max_new_tokens)
    choice = None
    if temperature > 0:
        top_p, top_k = None if top_p == 1 else jnp.float32(top_p), None if top_k is None else jnp.int32(top_k)
        choice = as_key("generate", key), jnp.float32(temperature), top_p, top_k
    return input_ids, mask, choice, (jnp.asarray(stops, jnp.int32), jnp.asarray(pad, jnp.int32))


@functools.partial(jax.jit, static_argnums=(0, 6, 7, 8))
def _generate(graph, params, input_ids, mask, choice, ends, max_new_tokens, times, return_log_probs):
    """All tokens, `times` rows for each prompt, and their log-probabilities or None."""
    model, length = nnx.merge(graph, params), input_ids.shape[1]
    prompts, mask = _padded_left(input_ids, mask)
    first_slots, *more_slots = _numbers_of_slots(length, max_new_tokens)
    changes_at, temperature = model.config.rope_changes_at, None if choice is None else choice[1]

    def add(count, logits, tokens, log_probs, ended):
        """Writes token number `count` of each row, and its log-probability."""
        token, all_ended = _chosen(count, logits, ended, choice, ends)
        if log_probs is not None:
            found = jnp.where(ended, 0.0, _log_probs(logits, token, temperature))
            log_probs = log_probs.at[:, count].set(found)
        return tokens.at[:, count].set(token), log_probs, all_ended

    def unfinished(state):
        count, _, _, ended, cache = state
        has_room = cache.length < cache.positions.shape[1]
        return (count < max_new_tokens) & ~jnp.all(ended) & has_room

    def of_last(count, tokens, cache):
        """Logits and cache after the last token."""
        return _after(model, jax.lax.dynamic_index_in_dim(tokens, count - 1, axis=1, keepdims=False), cache)

    def of_all(count, tokens, cache):
        """The same, with keys and values of all tokens made anew."""
        slots, written = cache.positions.shape[1], length + count
        new, places = slots - length, jnp.arange(slots - length, dtype=jnp.int32)
        ids = jnp.concatenate([prompts.astype(jnp.int32), tokens[:, :new]], axis=1)
        is_token = jnp.concatenate([mask, jnp.broadcast_to(places < count, (batch, new))], axis=1)
        out = model(
            ids, attention_mask=is_token, cache=model.init_cache(batch, slots), logits_to_keep=written[None] - 1
        )
        return out.logits[:, -1], dataclasses.replace(out.cache, length=written)

    def step(state):
        count, tokens, log_probs, ended, cache = state
        if changes_at is None or cache.positions.shape[1] <= changes_at:
            logits, cache = of_last(count, tokens, cache)
        else:  # the token after the last that fits turns all earlier ones otherwise
            is_full = jnp.max(cache.positions) == changes_at - 1
            logits, cache = jax.lax.cond(is_full, of_all, of_last, count, tokens, cache)
        return count + 1, *add(count, logits, tokens, log_probs, ended), cache

    logits, cache = _of_prompts(model, prompts, mask, length if times > 1 else first_slots)
    if times > 1:
        input_ids, prompts, mask, logits = (jnp.repeat(x, times, axis=0) for x in (input_ids, prompts, mask, logits))
        cache = lengthened(repeated(cache, times), first_slots)
    batch = len(prompts)
    tokens = jnp.broadcast_to(ends[1], (batch, max_new_tokens))
    log_probs = jnp.zeros((batch, max_new_tokens), jnp.float32) if return_log_probs else None
    first = add(0, logits, tokens, log_probs, jnp.zeros(batch, bool))
    state = jax.lax.while_loop(unfinished, step, (jnp.asarray(1, jnp.int32), *first, cache))
    for slots in more_slots:
        state = jax.lax.while_loop(unfinished, step, (*state[:-1], lengthened(state[-1], slots)))
    _, tokens, log_probs, *_ = state
    return jnp.concatenate([input_ids, tokens.astype(input_ids.dtype)], axis=1), log_probs


def _numbers_of_slots(length: int, max_new_tokens: int) -> list[int]:
    """The lengths of the cache, one after the other: the last has room for all tokens but the last."""
    whole = length + max_new_tokens - 1
    room = max(_ROOM, -(-max_new_tokens // _MOST_LENGTHS))
    return [*range(length + room, whole, room), whole]


@functools.partial(jax.jit, static_argnums=(0, 8))
def _first(graph, params, count, input_ids, mask, ended, choice, ends, slots):
    logits, cache = _of_prompts(nnx.merge(graph, params), *_padded_left(input_ids, mask), slots)
    return *_chosen(count, logits, ended, choice, ends), cache


@functools.partial(jax.jit, static_argnums=0, donate_argnames="cache")
def _next(graph, params, count, last, ended, cache, choice, ends):
    logits, cache = _after(nnx.merge(graph, params), last, cache)
    return *_chosen(count, logits, ended, choice, ends), cache


def _padded_left(input_ids, mask):
    """Prompts and mask with their padding in front, so that the last position has every row's last token."""
    order = jnp.argsort(mask, axis=1, stable=True)
    return jnp.take_along_axis(input_ids, order, axis=1), jnp.take_along_axis(mask, order, axis=1)


def _of_prompts(model, prompts, mask, slots):
    """Logits (B, V) after the prompts, and a cache of so many slots with them."""
    cache = model.init_cache(prompts.shape[0], slots)
    out = model(prompts, attention_mask=mask, cache=cache, logits_to_keep=1)
    return out.logits[:, -1], out.cache


def _after(model, last, cache):
    """Logits (B, V) after the last tokens (B,), and the cache with them."""
    out = model(last[:, None], cache=cache)
    return out.logits[:, -1], out.cache


def _chosen(count, logits, ended, choice, ends):
    """Token number `count` of each row, and whether the row has ended."""
    stops, pad = ends
    if choice is None:
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    else:
        key, temperature, top_p, top_k = choice
        token = draw(jax.random.fold_in(key, count), logits, temperature, top_p, top_k)
    token = jnp.where(jnp.isnan(logits[:, 0]), -1, token)  # all of a row's logits are NaN, or none
    token = jnp.where(ended, pad, token)
    return token, ended | jnp.any(token[:, None] == stops[None], axis=1)


def _log_probs(logits, tokens, temperature):
    """The log-probabilities (B,) of tokens (B,) by logits (B, V); NaN where these are."""
    scaled = logits if temperature is None else logits / temperature
    target = jnp.take_along_axis(scaled, jnp.maximum(tokens, 0)[:, None], axis=-1)[:, 0]
    return target - jax.nn.logsumexp(scaled, axis=-1)


def draw(
    key: Any,
    logits: Float[Array, "B V"],
    temperature: Float[Array, ""],
    top_p: Float[Array, ""] | None,
    top_k: Int[Array, ""] | None = None,
) -> Int[Array, " B"]:
    """Draws tokens from softmax(logits/temperature), or from the likeliest of them.

    Tokens that are exactly as likely as the last of the likeliest are drawn from, too. Nothing is sorted: the least
    probability that is drawn from is found in 15 passes over the probabilities, two of its 30 bits in each.

    Args:
        key: a key of `jax.random`.
        logits: float32.
        temperature: positive.
        top_p: in (0, 1): the fewest likeliest whose probabilities, among those of top_k, reach it; `None` for all.
        top_k: how many of the likeliest; `None` for all.

    Returns:
        int32 token ids.

    Example:
        >>> draw(jax.random.key(0), jnp.array([[0.0, 9.0, 1.0]]), jnp.float32(1), jnp.float32(0.5)).tolist()
        [1]
    """
    scaled = logits / temperature
    if top_p is not None or top_k is not None:
        p = jnp.exp(scaled - jnp.max(scaled, axis=-1, keepdims=True))  # in [0, 1], the likeliest has 1
        if top_k is not None:
            p = jnp.where(p >= _least(p, jnp.ones_like(p), jnp.minimum(top_k, p.shape[-1])), p, 0.0)
        if top_p is not None:
            p = jnp.where(p >= _least(p, p, top_p * jnp.sum(p, axis=-1)), p, 0.0)
        scaled = jnp.where(p > 0, scaled, -jnp.inf)
    return jax.random.categorical(key, scaled, axis=-1).astype(jnp.int32)


def _least(p, weights, target):
    """The largest number (B, 1) of which Σ weights[p ≥ number] ≥ target, in p (B, V) of numbers in [0, 1]."""
    bits = jax.lax.bitcast_convert_type(p, jnp.int32)  # in the order of the numbers; 1.0 is below 2³⁰

    def narrowed(step, least):
        unit = jnp.left_shift(jnp.int32(1), 28 - 2 * step)
        reached = [
            jnp.sum(jnp.where(bits >= (least + n * unit)[:, None], weights, 0.0), axis=-1) >= target for n in (1, 2, 3)
        ]
        return least + unit * sum(more.astype(jnp.int32) for more in reached)

    least = jax.lax.fori_loop(0, 15, narrowed, jnp.zeros(p.shape[0], jnp.int32))
    return jax.lax.bitcast_convert_type(least, jnp.float32)[:, None]
