"""Text generation: the prompt in one call, then token after token with the key-value cache, all in one program."""

import dataclasses
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
from liger_jax.ops.labels import as_labels


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
) -> Int[Array, "B T_and_new"]:
    """Continues each row of a batch with the likeliest tokens, or with random ones.

    p(token) = softmax(logits/temperature), over the fewest likeliest tokens whose probabilities reach top_p together.

    It compiles once for a model, a batch's shape, a number of new tokens, a number of tokens that end a row, and a way
    to choose: the likeliest, drawn from all, or drawn with top_p below 1. Another temperature, another top_p below 1 or
    other ids need no compilation.

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

    Returns:
        (B, T + max_new_tokens): the prompts unchanged, padding included, then the new tokens. From the first position
        whose logits are NaN, tokens are −1. The dtype is input_ids', or int32 if that is narrower.

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
    return _generate(graph, params, input_ids, mask, choice, ends, max_new_tokens)


@functools.partial(jax.jit, static_argnums=(0, 6))
def _generate(graph, params, input_ids, mask, choice, ends, max_new_tokens):
    """`choice` is None for the likeliest token, or (key, temperature, top_p or None); `ends` is (stops, pad)."""
    model, (stops, pad) = nnx.merge(graph, params), ends
    batch, length = input_ids.shape
    # Padding is moved to the left, so that the last position has every row's last token.
    order = jnp.argsort(mask, axis=1, stable=True)
    mask = jnp.take_along_axis(mask, order, axis=1)
    prompts = jnp.take_along_axis(input_ids, order, axis=1)
    cache = model.init_cache(batch, length + max_new_tokens - 1)  # nothing follows the last token
    out = model(prompts, attention_mask=mask, cache=cache, logits_to_keep=1)

    def add(count, logits, tokens, ended):
        """Writes token number `count` of each row."""
        if choice is None:
            token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        else:
            key, temperature, top_p = choice
            token = draw(jax.random.fold_in(key, count), logits, temperature, top_p)
        token = jnp.where(jnp.isnan(logits[:, 0]), -1, token)  # all of a row's logits are NaN, or none
        token = jnp.where(ended, pad, token)
        return tokens.at[:, count].set(token), ended | jnp.any(token[:, None] == stops[None], axis=1)

    def unfinished(state):
        count, _, ended, _ = state
        return (count < max_new_tokens) & ~jnp.all(ended)

    def of_last(count, tokens, cache):
        """Logits and cache after the last token."""
        out = model(jax.lax.dynamic_index_in_dim(tokens, count - 1, axis=1), cache=cache)
        return out.logits, out.cache

    def of_all(count, tokens, cache):
        """The same, with keys and values of all tokens made anew."""
        written, places = length + count, jnp.arange(max_new_tokens - 1, dtype=jnp.int32)
        ids = jnp.concatenate([prompts.astype(jnp.int32), tokens[:, :-1]], axis=1)
        is_token = jnp.concatenate([mask, jnp.broadcast_to(places < count, (batch, max_new_tokens - 1))], axis=1)
        empty = model.init_cache(*ids.shape)
        out = model(ids, attention_mask=is_token, cache=empty, logits_to_keep=written[None] - 1)
        return out.logits, dataclasses.replace(out.cache, length=written)

    changes_at = model.config.rope_changes_at

    def step(state):
        count, tokens, ended, cache = state
        if changes_at is None or cache.positions.shape[1] <= changes_at:
            logits, cache = of_last(count, tokens, cache)
        else:  # the token after the last that fits turns all earlier ones otherwise
            is_full = jnp.max(cache.positions) == changes_at - 1
            logits, cache = jax.lax.cond(is_full, of_all, of_last, count, tokens, cache)
        return count + 1, *add(count, logits[:, -1], tokens, ended), cache

    tokens = jnp.broadcast_to(pad, (batch, max_new_tokens))
    first = add(0, out.logits[:, -1], tokens, jnp.zeros(batch, bool))
    _, tokens, _, _ = jax.lax.while_loop(unfinished, step, (jnp.asarray(1, jnp.int32), *first, out.cache))
    return jnp.concatenate([input_ids, tokens.astype(input_ids.dtype)], axis=1)


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
