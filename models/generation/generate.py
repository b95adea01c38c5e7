"""Text generation: the prompt in one call, then token after token with the key-value cache.

`generate` is one program, unless rows that have ended leave the batch. `stream` is a program for the prompt and one for
each further token, which it hands on.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Int, Integer

from liger_jax.models.core.arguments import as_key
from liger_jax.models.core.parallel.mesh_axes import open_axes
from liger_jax.models.generation import decoding
from liger_jax.models.generation.checks import check_choice, check_ends, check_prompts, why_rows_stay
from liger_jax.models.generation.sampling import chosen
from liger_jax.ops.labels import as_labels
from liger_jax.ops.layout import devices_along


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
    compact: bool = False,
) -> Any:
    """Continues each row of a batch with the most likely tokens, or with sampled ones.

    p(token) = softmax(logits/temperature), restricted to the top_k most likely tokens, and then to the fewest most
    likely tokens whose probabilities add up to at least top_p.

    It compiles once for each model, shape of the batch, `max_new_tokens`, `num_return_sequences`, number of tokens that
    end a row, way of choosing tokens (greedy, or sampled, with or without top_p < 1 and top_k), and `return_log_probs`.
    Other values of temperature, top_p below 1, top_k and ids do not recompile.

    The program contains the model twice, for the prompt and for a loop over the new tokens. The cache is allocated for
    all tokens at the start, and a step reads its filled slots, rounded up to a block. With `scan_layers=False` a step
    reads each weight once; with stacked layers it copies some of them first.

    With `compact`, rows that have ended are removed: whenever at most half of the rows remain, they become a batch of
    half the size, as long as that has at least eight rows. The tokens are the same, except for differences in rounding
    between products of different shapes. The prompt and each number of rows then have separate programs, which are
    compiled when they are first needed: for 64 prompts at most four, in addition to the prompt's. Use it if `generate`
    is called many times.

    Args:
        model: a `CausalLM`; `model.generate(input_ids, …)` is the same.
        input_ids: the prompts, ids in [0, V). Shorter rows are padded on either side, with any id. On a mesh there may
            be any number of them.
        max_new_tokens: the largest number of new tokens in a row; prompt and new tokens together must not be longer
            than the model's longest sequence.
        attention_mask: 0 where a token is padding; `None` for no padding.
        temperature: 0 for the most likely token; below 1 the distribution is sharper than the model's, above 1 flatter.
        top_p: in (0, 1]; 1 to sample from all tokens.
        top_k: the number of most likely tokens to sample from, at least 1; `None` for all.
        eos_token_id: a row ends after this token, or after any of several. Generation stops when all rows have ended.
            `None` for the tokens in the checkpoint's generation_config.json, or else in its config.json. With `()` no
            token ends a row.
        pad_token_id: the token in [0, V) that fills a row after its end; `None` for the first one of `eos_token_id`.
        key: a key of `jax.random.key` or `jax.random.PRNGKey`; required for sampling. A row's random numbers are
            determined by the key and the row's index in the result.
        num_return_sequences: the number of sequences for each prompt, at least 1. The prompt is processed once for all.
        return_log_probs: whether to return the new tokens' log-probabilities, too.
        compact: whether rows that have ended are removed from the batch. It needs one device, a call outside of jit,
            and a model whose rows do not depend on the longest row, as they do with `DynamicRope` and `LongRope` beyond
            the length in training.

    Returns:
        (B·num_return_sequences, T + max_new_tokens): the prompts unchanged, padding included, then the new tokens. The
        sequences of a prompt are consecutive. From the first position at which a logit is NaN or inf, tokens are −1.
        The dtype is that of input_ids, or int32 if that is narrower.

        With `return_log_probs`, a pair of these and a float32 array of the new tokens' shape: the log-probability of
        each new token under softmax(logits/temperature) over the whole vocabulary, before top_p and top_k; with
        temperature 0, under softmax(logits). It is 0 after a row's end. These are the sampler's log-probabilities for a
        policy loss.

    Raises:
        ValueError: an argument is out of its range, missing, or would be ignored.
        TypeError: `key` is not a key.

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
    asked = attention_mask, max_new_tokens, temperature, top_p, top_k, eos_token_id, pad_token_id, key
    input_ids, request = _requested(model, input_ids, asked, num_return_sequences, compact)
    sizes = decoding.Sizes(max_new_tokens, num_return_sequences, return_log_probs)
    decode = decoding.by_parts if compact else decoding.all_at_once
    decoded = decode(*nnx.split(model), request, sizes)
    new, log_probs = decoded.tokens, decoded.log_probs
    if len(new) > (number := len(input_ids) * num_return_sequences):
        new, log_probs = new[:number], None if log_probs is None else log_probs[:number]
    tokens = _joined(input_ids, new, num_return_sequences)
    return (tokens, log_probs) if return_log_probs else tokens


def lowered(
    model: Any,
    input_ids: Any,
    *,
    max_new_tokens: int,
    attention_mask: Any,
    temperature: float,
    top_p: float,
    top_k: int | None,
    eos_token_id: Sequence[int],
    key: Any,
    num_return_sequences: int,
    return_log_probs: bool,
    compact: bool,
) -> list[Any]:
    """The programs with which `generate` begins, lowered for a model that may have types in the place of arrays.

    As long as they are kept once they are compiled, `generate` compiles them no more.
    """
    asked = attention_mask, max_new_tokens, temperature, top_p, top_k, eos_token_id, None, key
    _, request = _requested(model, input_ids, asked, num_return_sequences, compact)
    sizes = decoding.Sizes(max_new_tokens, num_return_sequences, return_log_probs)
    return decoding.lowered(*nnx.split(model), request, sizes, compact)


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
    """Yields the tokens that `generate` returns, one of each row at a time, as soon as they are sampled.

    The device computes the next token while the caller handles this one. Programs are compiled as for `generate`,
    except that the prompt's program also depends on the sum of the prompt's length and `max_new_tokens`, and that of
    the new tokens depends only on this sum. Arguments and errors are those of `generate`.

    Yields:
        int32 (B,); `pad_token_id` for rows that have ended. It stops when all rows have ended.

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
    asked, (input_ids, mask) = len(input_ids), _spread(model, input_ids, mask)
    changes_at = model.config.rope_changes_at
    return _streamed(*nnx.split(model), input_ids, mask, choice, ends, max_new_tokens, changes_at, asked)


def _streamed(graph, params, input_ids, mask, choice, ends, max_new_tokens, changes_at, asked):
    """A generator apart from the checks, which are made at once."""
    longest, slots = int(jnp.max(jnp.sum(mask, axis=1))), input_ids.shape[1] + max_new_tokens - 1
    ended = jnp.zeros(input_ids.shape[0], bool)
    token, ended, cache = _first(graph, params, jnp.int32(0), input_ids, mask, ended, choice, ends, slots)
    tokens = [input_ids]
    for count in range(1, max_new_tokens + 1):
        shown, all_ended = token, jnp.all(ended)
        if changes_at is not None:
            tokens.append(token[:, None].astype(input_ids.dtype))
        if count < max_new_tokens:  # is computed while the caller handles the previous token
            if longest + count - 1 == changes_at:  # this token changes the rotation of all earlier ones
                ids, is_token = (
                    jnp.concatenate(tokens, axis=1),
                    jnp.pad(mask, ((0, 0), (0, count)), constant_values=True),
                )
                begun = _first(graph, params, jnp.int32(count), ids, is_token, ended, choice, ends, slots)
                token, ended, cache = begun
            else:
                token, ended, cache = _next(graph, params, jnp.int32(count), token, ended, cache, choice, ends)
        yield np.asarray(shown)[:asked]
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
        top_p, top_k = None if top_p == 1 else np.float32(top_p), None if top_k is None else np.int32(top_k)
        choice = as_key("generate", key), np.float32(temperature), top_p, top_k
    return input_ids, mask, choice, (np.asarray(stops, np.int32), np.asarray(pad, np.int32))


def _requested(model, input_ids, asked, times, compact):
    """The prompts, and the request of `times` rows for each; `asked` are the last arguments of `_asked`."""
    input_ids, mask, choice, ends = _asked(model, input_ids, *asked)
    if times < 1:
        raise ValueError(f"generate: num_return_sequences={times} must be at least 1.")
    if compact and (reason := why_rows_stay(model, input_ids, asked[1])) is not None:
        raise ValueError(f"generate: compact=True, but {reason} Leave compact out.")
    prompts, mask = _padded_left(*_spread(model, input_ids, mask))
    return input_ids, decoding.Request(prompts, mask, choice, ends)


def _spread(model, input_ids, mask):
    """Prompts and mask with the last row repeated, so that the devices over which the model splits rows divide them."""
    layout = model.kernels.mesh_layout
    devices = devices_along(layout.batch, open_axes(layout))
    if not (more := -len(input_ids) % devices) or jax.sharding.get_abstract_mesh().explicit_axes:
        return input_ids, mask
    return tuple(jnp.concatenate([x, jnp.repeat(x[-1:], more, axis=0)]) for x in (input_ids, mask))


@functools.partial(jax.jit, static_argnums=2)
def _joined(input_ids, tokens, times):
    return jnp.concatenate([jnp.repeat(input_ids, times, axis=0), tokens.astype(input_ids.dtype)], axis=1)


@functools.partial(jax.jit, static_argnums=(0, 8))
def _first(graph, params, count, input_ids, mask, ended, choice, ends, slots):
    prompts, mask = _padded_left(input_ids, mask)
    logits, cache = decoding.of_prompts(nnx.merge(graph, params), prompts, mask, slots)
    return *_chosen(count, logits, ended, choice, ends), cache


@functools.partial(jax.jit, static_argnums=0, donate_argnames="cache")
def _next(graph, params, count, last, ended, cache, choice, ends):
    logits, cache = decoding.after(nnx.merge(graph, params), last, cache)
    return *_chosen(count, logits, ended, choice, ends), cache


def _chosen(count, logits, ended, choice, ends):
    return chosen(count, jnp.arange(len(ended), dtype=jnp.int32), logits, ended, choice, ends)


@jax.jit
def _padded_left(input_ids, mask):
    """Prompts and mask with their padding in front, so that the last position has every row's last token."""
    order = jnp.argsort(mask, axis=1, stable=True)
    return jnp.take_along_axis(input_ids, order, axis=1), jnp.take_along_axis(mask, order, axis=1)
