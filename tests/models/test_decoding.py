"""Rows that have ended leave the batch, and nothing else changes: tokens, their log-probabilities, the rows' order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from liger_jax.models import AutoModelForCausalLM, generate, stream
from liger_jax.models.core import decoding
from tests.models import _hugging_face as hugging_face
from tests.models._llama import make_model, random_tokens
from tests.ops._oracle import first

NEW, LENGTH = 11, 5
MASK = jnp.asarray([[1] * 5, [0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1] * 5, [0, 1, 1, 1, 1], [1] * 5])
CHOICES = {"random": dict(temperature=0.8, top_p=0.9, key=jax.random.key(3)), "likeliest": {}}


@pytest.fixture
def batches(monkeypatch):
    """The rows and the slots of each program that decodes, as they come; batches are halved down to one row."""
    found, decode = [], decoding._decode

    def spied(graph, params, state, *others):
        found.append(state.cache.positions.shape)
        return decode(graph, params, state, *others)

    for name, value in dict(_decode=spied, _FEWEST_ROWS=1, _FEWEST_TOKENS=2, _ROOM=4).items():
        monkeypatch.setattr(decoding, name, value)
    return found


def stops_of(tokens, places):
    """Tokens that end row i of these (B, new) at the latest at place i, but the last row perhaps never."""
    return sorted({int(row[place]) for row, place in zip(tokens, places, strict=False)})


@pytest.mark.parametrize("choice", first(1, list(CHOICES)))
@pytest.mark.parametrize("times", first(1, [1, 2]))
def test_without_the_rows_that_have_ended_the_others_get_the_same_tokens(choice, times, batches, rng):
    model, prompts = make_model(), random_tokens(rng, batch=6, length=LENGTH)
    options = dict(attention_mask=MASK, max_new_tokens=NEW, return_log_probs=True, num_return_sequences=times)
    options |= CHOICES[choice]
    free = np.asarray(generate(model, prompts, eos_token_id=(), **options)[0])[:, LENGTH:]
    stops = stops_of(free, [1, 3, 0, 5, 2])
    ends = [next((i for i, token in enumerate(row) if token in stops), NEW) for row in free]
    assert len(set(ends)) > 2
    expected = generate(model, prompts, eos_token_id=stops, **options)
    found = generate(model, prompts, eos_token_id=stops, compact=True, **options)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-6)
    rows = [shape[0] for shape in batches]
    assert rows[0] <= 6 * times and rows == sorted(rows, reverse=True) and rows[-1] < rows[0], batches
    assert len(set(batches)) == len(batches), "a program that is entered twice has come to nothing"
    shown = stream(model, jnp.repeat(prompts, times, axis=0), **{
        **{name: x for name, x in options.items() if name not in ("return_log_probs", "num_return_sequences")},
        "attention_mask": jnp.repeat(MASK, times, axis=0), "eos_token_id": stops,
    })  # fmt: skip
    shown = np.stack([*shown], axis=1)
    np.testing.assert_array_equal(shown, found[0][:, LENGTH : LENGTH + shown.shape[1]])


def test_a_batch_in_which_no_row_ends_stays_whole_and_has_each_length_once(batches, rng):
    model, prompts = make_model(), random_tokens(rng, batch=4, length=LENGTH)
    found = generate(model, prompts, max_new_tokens=NEW, eos_token_id=(), compact=True)
    np.testing.assert_array_equal(found, generate(model, prompts, max_new_tokens=NEW, eos_token_id=()))
    assert batches == [(4, 9), (4, 13), (4, 15)]


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


def test_a_row_s_random_tokens_do_not_depend_on_other_rows(rng):
    model, prompts = make_model(), random_tokens(rng, batch=4, length=LENGTH)
    options = dict(max_new_tokens=4, temperature=1.0, key=jax.random.key(1))
    whole = generate(model, prompts, **options)
    np.testing.assert_array_equal(generate(model, prompts[:2], **options), whole[:2])
    assert len({tuple(row) for row in np.asarray(generate(model, prompts[:1].repeat(4, axis=0), **options))}) > 1


def test_the_program_has_the_model_once_for_the_prompt_and_once_for_each_length(monkeypatch):
    monkeypatch.setattr(decoding, "_ROOM", 4)
    model = make_model(scan_layers=False)
    run = lambda ids: generate(model, ids, max_new_tokens=NEW + 1, eos_token_id=())
    program = str(jax.make_jaxpr(run)(jnp.zeros((3, LENGTH), jnp.int32)))
    assert decoding.numbers_of_slots(LENGTH, NEW + 1) == [9, 13, 16] and program.count(" while[") == 3


def test_where_rows_cannot_leave_it_is_refused(rng):
    model, prompts = make_model(), random_tokens(rng, length=LENGTH)
    options = dict(max_new_tokens=2, compact=True)
    with pytest.raises(ValueError, match=r"compact=True, but generate is called inside a jitted .*Leave compact out"):
        jax.jit(lambda ids: generate(model, ids, **options))(prompts)
    phi = AutoModelForCausalLM.from_pretrained(hugging_face.GOLDEN / "phi3")
    many = dict(max_new_tokens=phi.config.rope_changes_at, compact=True)
    with pytest.raises(ValueError, match=r"positions, more than original_max_position_embeddings=\d+, rope_scaling"):
        generate(phi, jnp.ones((2, 3), jnp.int32), **many)
    if jax.device_count() > 1:
        mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
        spread = jax.device_put(prompts, NamedSharding(mesh, PartitionSpec("data")))
        with pytest.raises(ValueError, match="compact=True, but the model or input_ids lie on several devices"):
            generate(model, spread, **options)
