"""Text generation: the prompt in one call, then token after token with the key-value cache, all in one program."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Integer

from liger_jax.models.core.arguments import as_key
from liger_jax.models.core.cache import lengthened
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
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    key: Any = None,
    return_log_probs: bool = False,
) -> Int[Array, "B T_and_new"] | tuple[Int[Array, "B T_and_new"], Float[Array, "B new"]]:
    """Continues each row of a batch with the likeliest tokens, or with random ones.

    p(token) = softmax(logits/temperature), over the fewest likeliest tokens whose probabilities reach top_p together.

    It compiles once for a model, a batch's shape, a number of new tokens, a number of tokens that end a row, a way
    to choose (the likeliest, drawn from all, or drawn with top_p below 1), and whether log-probabilities are returned.
    Another temperature, another top_p below 1 or other ids need no compilation.

    The cache grows with the tokens, so that a step reads little more of it than is filled: up to 128 tokens, or an
    eighth of `max_new_tokens` if that is more. While it grows there are two of its keys or of its values.

    Args:
        model: a `CausalLM`; `model.generate(input_ids, …)` is the same.
        input_ids: the prompts, ids in [0, V). Shorter rows are padded on either side, with any id.
        max_new_tokens: the most tokens that a row gets; prompt and new tokens must fit the model's longest sequence.
        attention_mask: 0 where a token is padding; `None` for no padding.
        temperature: 0 takes the likeliest token; below 1 the distribution is sharper than the model's, above 1 flatter.
        top_p: in (0, 1]; 1 draws from all tokens.
        eos_token_id: a row ends after this token, or after any of these. The work ends once all rows have ended. `None`
            takes the tokens that the model's checkpoint names in generation_config.json, else in config.json. With
            `()` no token ends a row.
        pad_token_id: the token in [0, V) that fills a row after its end; `None` for the first that ends a row.
        key: of `jax.random.key` or `jax.random.PRNGKey`; needed for random tokens.
        return_log_probs: whether to return the new tokens' log-probabilities, too.

    Returns:
        (B, T + max_new_tokens): the prompts unchanged, padding included, then the new tokens. From the first position
        whose logits are NaN, tokens are −1. The dtype is input_ids', or int32 if that is narrower.

        With `return_log_probs` a pair of these and (B, max_new_tokens) float32, the log-probability of each new token
        by softmax(logits/temperature) over the whole vocabulary, before top_p; for the likeliest tokens, by
        softmax(logits). It is 0 after a row's end. They are what the sampler gives to a policy loss.

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
    input_ids = as_labels(input_ids)
    if eos_token_id is None:  # a checkpoint may name tokens outside its model's vocabulary
        stops = tuple(stop for stop in model.kept.stops if 0 <= stop < model.config.vocab_size)
    else:
        stops = tuple(np.atleast_1d(eos_token_id).tolist())
    pad = (stops or (0,))[0] if pad_token_id is None else pad_token_id
    mask = jnp.ones(input_ids.shape, bool) if attention_mask is None else jnp.asarray(attention_mask, bool)
    _check_choice(max_new_tokens, temperature, top_p, key)
    _check_ends(model.config.vocab_size, stops, pad, pad_token_id)
    _check_prompts(model.config, input_ids, mask, max_new_tokens)
    graph, params = nnx.split(model)
    choice = None
    if temperature > 0:
        choice = as_key("generate", key), jnp.float32(temperature), None if top_p == 1 else jnp.float32(top_p)
    ends = jnp.asarray(stops, jnp.int32), jnp.asarray(pad, jnp.int32)
    out, log_probs = _generate(graph, params, input_ids, mask, choice, ends, max_new_tokens, return_log_probs)
    return out if log_probs is None else (out, log_probs)


@functools.partial(jax.jit, static_argnums=(0, 6, 7))
def _generate(graph, params, input_ids, mask, choice, ends, max_new_tokens, return_log_probs):
    """`choice` is None for the likeliest token, or (key, temperature, top_p or None); `ends` is (stops, pad)."""
    model, (stops, pad) = nnx.merge(graph, params), ends
    batch, length = input_ids.shape
    # Padding is moved to the left, so that the last position has every row's last token.
    order = jnp.argsort(mask, axis=1, stable=True)
    mask = jnp.take_along_axis(mask, order, axis=1)
    prompts = jnp.take_along_axis(input_ids, order, axis=1)
    first_slots, *more_slots = _numbers_of_slots(length, max_new_tokens)
    cache = model.init_cache(batch, first_slots)
    out = model(prompts, attention_mask=mask, cache=cache, logits_to_keep=1)

    def add(count, logits, tokens, log_probs, ended):
        """Writes token number `count` of each row, and its log-probability."""
        if choice is None:
            token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        else:
            key, temperature, top_p = choice
            token = draw(jax.random.fold_in(key, count), logits, temperature, top_p)
        token = jnp.where(jnp.isnan(logits[:, 0]), -1, token)  # all of a row's logits are NaN, or none
        if log_probs is not None:
            found = jnp.where(ended, 0.0, _log_probs(logits, token, None if choice is None else choice[1]))
            log_probs = log_probs.at[:, count].set(found)
        token = jnp.where(ended, pad, token)
        return tokens.at[:, count].set(token), log_probs, ended | jnp.any(token[:, None] == stops[None], axis=1)

    def unfinished(state):
        count, _, _, ended, cache = state
        has_room = cache.length < cache.positions.shape[1]
        return (count < max_new_tokens) & ~jnp.all(ended) & has_room

    def step(state):
        count, tokens, log_probs, ended, cache = state
        last = jax.lax.dynamic_index_in_dim(tokens, count - 1, axis=1)
        out = model(last, cache=cache)
        return count + 1, *add(count, out.logits[:, -1], tokens, log_probs, ended), out.cache

    tokens = jnp.broadcast_to(pad, (batch, max_new_tokens))
    log_probs = jnp.zeros((batch, max_new_tokens), jnp.float32) if return_log_probs else None
    first = add(0, out.logits[:, -1], tokens, log_probs, jnp.zeros(batch, bool))
    state = jax.lax.while_loop(unfinished, step, (jnp.asarray(1, jnp.int32), *first, out.cache))
    for slots in more_slots:
        state = jax.lax.while_loop(unfinished, step, (*state[:-1], lengthened(state[-1], slots)))
    _, tokens, log_probs, *_ = state
    return jnp.concatenate([input_ids, tokens.astype(input_ids.dtype)], axis=1), log_probs


def _numbers_of_slots(length: int, max_new_tokens: int) -> list[int]:
    """The lengths of the cache, one after the other: the last has room for all tokens but the last."""
    whole = length + max_new_tokens - 1
    room = max(_ROOM, -(-max_new_tokens // _MOST_LENGTHS))
    return [*range(length + room, whole, room), whole]


def _log_probs(logits, tokens, temperature):
    """The log-probabilities (B,) of tokens (B,) by logits (B, V); NaN where these are."""
    scaled = logits if temperature is None else logits / temperature
    target = jnp.take_along_axis(scaled, jnp.maximum(tokens, 0)[:, None], axis=-1)[:, 0]
    return target - jax.nn.logsumexp(scaled, axis=-1)


def draw(
    key: Any, logits: Float[Array, "B V"], temperature: Float[Array, ""], top_p: Float[Array, ""] | None
) -> Int[Array, " B"]:
    """Draws tokens from softmax(logits/temperature), or from the fewest likeliest whose probabilities reach top_p.

    Args:
        key: a key of `jax.random`.
        logits: float32.
        temperature: positive.
        top_p: in (0, 1); `None` for all tokens.

    Returns:
        int32 token ids.

    Example:
        >>> draw(jax.random.key(0), jnp.array([[0.0, 9.0, 1.0]]), jnp.float32(1), jnp.float32(0.5)).tolist()
        [1]
    """
    scaled = logits / temperature
    if top_p is None:
        return jax.random.categorical(key, scaled, axis=-1).astype(jnp.int32)
    ranked, tokens = jax.lax.top_k(scaled, scaled.shape[-1])
    probabilities = jax.nn.softmax(ranked, axis=-1)
    likelier = jnp.cumsum(probabilities, axis=-1) - probabilities  # the probability of all likelier tokens
    rank = jax.random.categorical(key, jnp.where(likelier < top_p, ranked, -jnp.inf), axis=-1)
    return jnp.take_along_axis(tokens, rank[:, None], axis=-1)[:, 0]


def _check_choice(max_new_tokens, temperature, top_p, key):
    if max_new_tokens < 1:
        raise ValueError(f"generate: max_new_tokens={max_new_tokens} must be at least 1.")
    if not 0 <= temperature < float("inf"):
        raise ValueError(
            f"generate: temperature={temperature} must be 0, for the likeliest token, or positive and finite, since "
            "logits are divided by it."
        )
    if not 0 < top_p <= 1:
        raise ValueError(f"generate: top_p={top_p} must lie in (0, 1]; pass 1.0 to draw from all tokens.")
    if temperature == 0 and (top_p != 1 or key is not None):
        raise ValueError(
            "generate: temperature=0 takes the likeliest token, and key and top_p would be ignored. "
            "Leave them out, or pass a positive temperature."
        )
    if temperature > 0 and key is None:
        raise ValueError(
            f"generate: temperature={temperature} draws random tokens, and key is None. "
            "Pass key=jax.random.key(0), or temperature=0 for the likeliest token."
        )


def _check_ends(vocab_size, stops, pad, pad_token_id):
    if pad_token_id is not None and not stops:
        raise ValueError(
            f"generate: pad_token_id={pad_token_id} is given without eos_token_id, nor does the model have one: "
            "no row ends early and nothing is padded. Padding in input_ids is what attention_mask says."
        )
    wrong = [token for token in (*stops, pad) if not 0 <= token < vocab_size]
    if wrong:
        raise ValueError(f"generate: eos_token_id or pad_token_id is {wrong[0]}, and must lie in [0, {vocab_size}).")


def _check_prompts(config, input_ids, mask, max_new_tokens):
    if mask.shape != input_ids.shape or 0 in mask.shape:
        raise ValueError(
            f"generate: input_ids has shape {input_ids.shape} and attention_mask {mask.shape}; both must be (batch, "
            "length), with at least one row and one token."
        )
    total = input_ids.shape[1] + max_new_tokens
    if total > config.longest_sequence:
        raise ValueError(
            f"generate: {input_ids.shape[1]} positions of input_ids and max_new_tokens={max_new_tokens} are more than "
            f"the {config.longest_sequence} that the model takes (max_position_embeddings and rope_scaling). Ask for "
            "fewer, or shorten the prompts."
        )
    if any(isinstance(x, Tracer) or not x.is_fully_addressable for x in (input_ids, mask)):
        return  # a wrong id then makes logits NaN, and tokens −1
    ids, mask = np.asarray(input_ids), np.asarray(mask)
    if not mask.any(axis=1).all():
        raise ValueError(f"generate: attention_mask leaves row {mask.any(axis=1).argmin()} no token. Give it one.")
    wrong = ids[mask & ((ids < 0) | (ids >= config.vocab_size))]
    if wrong.size:
        raise ValueError(
            f"generate: input_ids holds {wrong[0]}, which is no token in [0, {config.vocab_size}). "
            "Mask padding with attention_mask."
        )
