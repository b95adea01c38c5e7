"""Rows that have ended leave the batch, and nothing else changes: tokens, their log-probabilities, the rows' order."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from liger_jax.models import generate
from liger_jax.models.generation import decoding
from liger_jax.ops import DynamicRope
from tests.models._llama import CONFIG, make_model, random_tokens
from tests.ops._oracle import first

NEW, LENGTH = 8, 5
SMALL = dataclasses.replace(CONFIG, num_hidden_layers=1)
MASK = jnp.asarray([[1] * 5, [0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1] * 5, [0, 1, 1, 1, 1], [1] * 5])
CHOICES = {"random": dict(temperature=0.8, top_p=0.9, key=jax.random.key(3)), "likeliest": {}}


def spied(monkeypatch):
    """The rows of each program that will decode, as they come; batches are halved down to one row."""
    found, decode = [], decoding._decode

    def spy(graph, params, state, *others):
        found.append(state.cache.positions.shape[0])
        return decode(graph, params, state, *others)

    for name, value in dict(_decode=spy, _FEWEST_ROWS=1, _FEWEST_TOKENS=2).items():
        monkeypatch.setattr(decoding, name, value)
    return found


@pytest.mark.parametrize("choice", first(1, list(CHOICES)))
@pytest.mark.parametrize("times", first(1, [1, 2]))
def test_without_the_rows_that_have_ended_the_others_get_the_same_tokens(choice, times, monkeypatch, rng):
    model, prompts = make_model(SMALL, scan_layers=False), random_tokens(rng, batch=6, length=LENGTH)
    options = dict(attention_mask=MASK, max_new_tokens=NEW, return_log_probs=True, num_return_sequences=times)
    options |= CHOICES[choice]
    free, log_probs = (np.array(x) for x in generate(model, prompts, eos_token_id=(), **options))
    new = free[:, LENGTH:]
    stops = sorted({int(row[place]) for row, place in zip(new, [1, 3, 0, 5, 2], strict=False)})
    is_after = np.cumsum(np.isin(new, stops), axis=1) - np.isin(new, stops) > 0
    new[is_after], log_probs[is_after] = 60, 0
    batches = spied(monkeypatch)
    found = generate(model, prompts, eos_token_id=stops, pad_token_id=60, compact=True, **options)
    np.testing.assert_array_equal(found[0], free)
    np.testing.assert_allclose(found[1], log_probs, rtol=1e-5, atol=1e-6)
    assert batches[0] <= 6 * times and batches == sorted(batches, reverse=True) and batches[-1] < 6 * times, batches
    assert len(set(batches)) == len(batches), "a program that is entered twice has come to nothing"


@pytest.mark.full
def test_a_batch_in_which_no_row_ends_has_one_program(monkeypatch, rng):
    model, prompts = make_model(), random_tokens(rng, batch=4, length=LENGTH)
    options = dict(max_new_tokens=NEW, eos_token_id=())
    expected, batches = generate(model, prompts, **options), spied(monkeypatch)
    np.testing.assert_array_equal(generate(model, prompts, compact=True, **options), expected)
    assert batches == [4]


def test_rows_that_end_among_the_last_tokens_stay(monkeypatch, rng):
    """A program that stopped there, at the third token from the end, would be entered again with the same rows."""
    model, prompts = make_model(SMALL, scan_layers=False), random_tokens(rng, batch=2, length=LENGTH)
    options = dict(max_new_tokens=NEW, temperature=3.0, compact=True)
    batches = spied(monkeypatch)
    monkeypatch.setattr(decoding, "_FEWEST_TOKENS", 4)
    drawn = lambda key: np.asarray(generate(model, prompts, eos_token_id=(), key=key, **options)[:, LENGTH:])
    found = ((key, drawn(key)) for key in jax.random.split(jax.random.key(0), 9))
    key, new = next((key, new) for key, new in found if np.sum(new == new[0, -3]) == 1)
    batches.clear()
    found = generate(model, prompts, eos_token_id=int(new[0, -3]), key=key, **options)
    np.testing.assert_array_equal(
        found[:, LENGTH:], np.where(np.outer([1, 0], np.arange(NEW) > NEW - 3), new[0, -3], new)
    )
    assert batches == [2]


@pytest.mark.parametrize(
    ["rows", "left", "living", "then"],
    [(64, 500, 32, 32), (64, 500, 9, 16), (64, 500, 1, 8), (60, 500, 20, 30), (30, 500, 15, 15), (64, 500, 33, None)]
    + [(64, 15, 1, None), (15, 500, 1, None), (16, 500, 8, 8)],
)
def test_batches_are_halved_down_to_eight_rows_where_tokens_are_left(rows, left, living, then):
    leaves = living <= decoding._half(rows, left)
    assert leaves == (then is not None)
    if leaves:
        assert decoding._rows_for(living, rows) == then


@pytest.mark.full
def test_a_row_s_random_tokens_do_not_depend_on_other_rows(rng):
    model, prompts = make_model(), random_tokens(rng, batch=4, length=LENGTH)
    options = dict(max_new_tokens=4, temperature=1.0, key=jax.random.key(1))
    whole = generate(model, prompts, **options)
    np.testing.assert_array_equal(generate(model, prompts[:2], **options), whole[:2])
    assert len({tuple(row) for row in np.asarray(generate(model, prompts[:1].repeat(4, axis=0), **options))}) > 1


@pytest.mark.parametrize("times", [1, 2])
def test_the_program_has_one_loop_over_tokens_whose_cache_has_all_slots(times):
    model = make_model(SMALL, scan_layers=False)
    run = lambda ids: generate(model, ids, max_new_tokens=50, eos_token_id=(), num_return_sequences=times)
    program = jax.make_jaxpr(run)(jnp.zeros((3, LENGTH), jnp.int32))
    (loop,) = [eqn for eqn in flat(program.jaxpr) if eqn.primitive.name == "while" and is_over_tokens(eqn)]
    config = model.config
    cache = (1, 3 * times, LENGTH + 50 - 1, config.num_key_value_heads, config.head_dim)
    assert [x.aval.shape for x in loop.outvars].count(cache) == 2


def flat(jaxpr):
    """The equations of a program and of the calls in it, but of no loop's body."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("jit", "pjit"):
            yield from flat(eqn.params["jaxpr"].jaxpr)
        else:
            yield eqn


def is_over_tokens(loop):
    return any(x.aval.shape[-1:] == (50,) for x in loop.outvars)


def test_where_rows_cannot_leave_it_is_refused(rng):
    model, prompts = make_model(), random_tokens(rng, length=LENGTH)
    options = dict(max_new_tokens=2, compact=True)
    with pytest.raises(ValueError, match=r"compact=True, but generate is called inside a jitted .*Leave compact out"):
        jax.jit(lambda ids: generate(model, ids, **options))(prompts)
    scaling = DynamicRope(factor=2.0, original_max_position_embeddings=LENGTH + 1)
    longer = make_model(dataclasses.replace(CONFIG, rope_scaling=scaling))
    with pytest.raises(ValueError, match="up to 7 positions, more than original_max_position_embeddings=6, rope_scal"):
        generate(longer, prompts, **options)
    generate(longer, prompts, **options | {"max_new_tokens": 1})
    if jax.device_count() > 1:
        mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
        spread = jax.device_put(prompts, NamedSharding(mesh, PartitionSpec("data")))
        with pytest.raises(
            ValueError, match="compact=True, but the model or input_ids are sharded over several devices"
        ):
            generate(model, spread, **options)
