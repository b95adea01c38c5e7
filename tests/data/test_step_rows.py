"""The rows of a run's steps: no piece is lost, few places are empty, and sizes are few."""

import itertools
import time
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax.data import token_cache
from liger_jax.data.laid_rows import LaidRows
from liger_jax.data.pieces import Piece
from liger_jax.data.step_rows import Laying, StepRows
from liger_jax.data.stream import Stream
from liger_jax.data.stream_rows import StreamRows
from liger_jax.ops import DynamicRope, LongRope, rope_table
from liger_jax.training import pack, pad, row_sizes, rows


class Tokens(token_cache.Tokens):
    """Documents of tokens, `together` of which belong together, as files of tokens have them."""

    def __init__(self, sizes, together=1):
        self._sizes, self.meta = np.asarray(sizes), {"in_segments": together > 1, "together": together}
        self._ends = np.cumsum(self._sizes)

    def __len__(self):
        return len(self._sizes)

    def sizes(self):
        return self._sizes

    def arrays(self, i):
        tokens = np.arange(self._ends[i] - self._sizes[i], self._ends[i], dtype=np.int32) + 1
        return tokens, np.where(tokens % 3 > 0, tokens, -100).astype(np.int32)


def steps_of(tokens, length, steps, laying, packed=False, held_out=0):
    number = len(tokens) // tokens.together
    pieces = np.arange(len(tokens)).reshape(number, -1)
    laid = LaidRows(tokens, [pieces[held_out:].ravel()], length, packed)
    scored = LaidRows(tokens, [pieces[:held_out].ravel()], length, packed) if held_out else None
    chosen_of = rows.drawn(laid.num_rows, laying.batch, 0)
    return StepRows(laid, scored, chosen_of, steps, laying), laid, chosen_of


def documents(batch):
    """The documents of rows, each as its tokens and labels."""
    found = []
    for row, ids in enumerate(batch.get("segment_ids", batch.get("token_mask"))):
        for segment in range(1, ids.max() + 1):
            at = ids == segment
            if "positions" in batch:
                assert batch["positions"][row][at].tolist() == list(range(at.sum()))
            found.append((batch["input_ids"][row][at].tolist(), batch["labels"][row][at].tolist()))
    return found


@pytest.mark.parametrize(
    ["micro_batches", "shards", "together", "growth"], [(1, 1, 1, 0.0), (2, 1, 2, 0.0), (2, 2, 1, 0.0), (1, 1, 1, 1e-3)]
)
def test_each_step_has_its_documents_in_the_micro_batch_of_padded_rows(micro_batches, shards, together, growth, rng):
    tokens = Tokens(rng.integers(2, 60, 40), together)
    laying = Laying(batch=8, micro_batches=micro_batches, shards=shards, growth=growth, program=50.0)
    in_steps, laid, chosen_of = steps_of(tokens, 128, 9, laying, held_out=3)
    for step in range(9):
        batch, numbers, chosen = in_steps.rows_of(step), in_steps.numbers_of(step), chosen_of(step)
        size = in_steps.size_of(step)
        assert batch["input_ids"].shape == (size.num_rows, size.length) and size.rows % shards == 0
        for first in range(micro_batches):
            of_bundle = lambda bundle: laid.pieces[bundle * together : (bundle + 1) * together].tolist()
            of_share = [i for bundle in chosen[first::micro_batches] for i in of_bundle(bundle)]
            expected = [tuple(x.tolist() for x in tokens.arrays(i)) for i in of_share]
            assert sorted(documents({name: x[first::micro_batches] for name, x in batch.items()})) == sorted(expected)
        mask = batch.get("segment_ids", batch.get("token_mask")) > 0
        begins = np.cumsum(tokens.sizes()) - tokens.sizes()
        np.testing.assert_array_equal(begins[numbers[mask] % len(tokens)] < batch["input_ids"][mask], True)
        if together > 1:  # both of a bundle stand side by side, the first of them at an odd number
            assert (batch["segment_ids"].max(axis=1) % 2 == 0).all()
            assert batch["segment_ids"].max() <= in_steps.num_segments
    places = sum(in_steps.size_of(step).places for step in range(9))
    assert places == in_steps.places and places <= 9 * 8 * 128 * 0.75 and len(in_steps.sizes) <= 4
    scored = [documents(batch) for batch in in_steps.scored()]
    some = *in_steps.scored(), in_steps.some_of(0), in_steps.some_of(8)
    assert len({batch["input_ids"].shape for batch in some}) == 1
    assert sum(map(len, scored)) == 3 * together


def test_a_document_in_a_row_has_no_segments_and_padded_rows_are_those_of_pad(rng):
    tokens = Tokens(rng.integers(100, 129, 16))
    full, _, _ = steps_of(tokens, 128, 2, Laying(batch=4))
    assert full.sizes == [row_sizes.Size(128, 4)] and "segment_ids" not in full.rows_of(0)
    one, _, _ = steps_of(Tokens(rng.integers(2, 129, 16)), 128, 16, Laying(batch=4, micro_batches=4))
    assert "segment_ids" not in one.rows_of(0) and one.num_segments == 1
    tokens = Tokens(rng.integers(2, 20, 16))
    for laying in (Laying(batch=4, padded=True), Laying(batch=4, alone=True)):
        own, _, chosen_of = steps_of(tokens, 32, 4, laying)
        ours, labels = zip(*(tokens.arrays(i) for i in chosen_of(1)), strict=True)
        expected = pad(ours, own.sizes[0].length, labels=labels)
        assert own.rows_of(1).keys() == expected.keys()
        for name, values in own.rows_of(1).items():
            np.testing.assert_array_equal(values, expected[name])


def test_packed_rows_that_a_step_lacks_are_not_computed(rng):
    tokens = Tokens(rng.integers(2, 20, 12))
    few, laid, _ = steps_of(tokens, 256, 5, Laying(batch=8, micro_batches=4), packed=True)
    assert laid.num_rows == 1 and few.sizes == [row_sizes.Size(256, 1)] and few.scored_size.rows == 1
    expected = pack([tokens.arrays(i)[0] for i in range(12)], 256, labels=[tokens.arrays(i)[1] for i in range(12)])
    for name, values in few.rows_of(3).items():
        np.testing.assert_array_equal(values, expected[name])
    on_mesh, _, _ = steps_of(tokens, 256, 5, Laying(batch=8, micro_batches=2, shards=4), packed=True)
    assert (
        on_mesh.sizes == [row_sizes.Size(256, 4)]
        and on_mesh.rows_of(0)["labels"].max(axis=1).tolist()[1:] == [-100] * 3
    )
    many, _, chosen_of = steps_of(Tokens(np.full(22, 256)), 256, 6, Laying(batch=8, micro_batches=2), packed=True)
    nine, _, _ = steps_of(Tokens(np.full(22, 256)), 256, 6, Laying(batch=8), packed=True, held_out=9)
    assert nine.scored_size.rows == 5 and [len(documents(batch)) for batch in nine.scored()] == [5, 4]
    assert [len(chosen_of(step)) for step in range(3)] == [8, 8, 6] and many.sizes == [row_sizes.Size(256, 4, 2)]


def test_documents_that_a_step_lacks_are_not_laid_one_by_one():
    sizes = np.zeros((1, 2_000_000), np.int64)
    sizes[0, [7, 99]] = 3, 5
    start = time.process_time()
    row_of, tokens = row_sizes.balanced(sizes, 2)
    assert time.process_time() - start < 3  # 10 or more where each takes a look at all rows
    assert tokens.tolist() == [[5, 3]] and row_of[0, [7, 99]].tolist() == [1, 0]


def test_rows_that_a_last_step_or_a_scored_batch_lacks_are_not_computed(rng):
    tokens = Tokens(rng.integers(110, 129, 30))
    laying = Laying(batch=8, micro_batches=2, alone=True, program=0.0)
    alone, laid, chosen_of = steps_of(tokens, 128, 6, laying, held_out=9)  # 21 to train on, 5 of them in a last step
    assert alone.sizes == [row_sizes.Size(128, 4, 2), row_sizes.Size(128, 3, 2)]
    assert [alone.size_of(step).rows for step in range(6)] == [4, 4, 3] * 2
    last, few = alone.rows_of(2), alone.numbers_of(2)
    assert "segment_ids" not in last and last["input_ids"].shape == few.shape == (6, 128)
    for first in range(2):
        expected = [tokens.arrays(i)[0].tolist() for i in laid.pieces[chosen_of(2)[first::2]]]
        assert [tokens for tokens, _ in documents({name: x[first::2] for name, x in last.items()})] == expected
    assert alone.scored_size == row_sizes.Size(128, 3) and [len(documents(x)) for x in alone.scored()] == [3, 3, 3]
    assert len(documents(alone.some_of(0))) == 3 and "segment_ids" not in alone.some_of(2)
    rare, _, _ = steps_of(tokens, 128, 6, Laying(batch=8, micro_batches=2, alone=True), held_out=9)
    assert len(rare.sizes) == 1  # a program would cost more
    one, _, _ = steps_of(Tokens([128] * 3), 128, 2, Laying(batch=8, alone=True, program=0.0))  # all steps lack rows
    assert one.sizes == [row_sizes.Size(128, 3)] and not one.in_segments and one.num_segments == 1
    padded, _, _ = steps_of(tokens, 128, 6, Laying(batch=8, padded=True), held_out=9)
    assert padded.sizes == [row_sizes.Size(128, 8)] and [len(documents(x)) for x in padded.scored()] == [5, 4]
    whole, _, _ = steps_of(tokens, 128, 6, Laying(batch=8, alone=True, whole_batches=True), held_out=9)
    assert [len(documents(x)) for x in whole.scored()] == [8, 1]
    in_order = [(len(each.places), len(each.rows["labels"])) for each in alone.in_order(laid)]
    assert in_order == [(4, 4)] * 5 + [(1, 1)]
    on_mesh, _, _ = steps_of(tokens, 128, 4, Laying(batch=8, alone=True, shards=4, program=0.0), held_out=3)
    assert {size.rows for size in on_mesh.sizes} == {8, 4} and on_mesh.scored_size.rows == 4


def test_columns_stand_with_their_documents_and_processes_read_their_rows(rng):
    tokens = Tokens(rng.integers(2, 60, 24), together=2)
    in_steps, laid, chosen_of = steps_of(tokens, 128, 3, Laying(batch=8, micro_batches=2, shards=2, program=0.0))
    begins, sizes = np.cumsum(tokens.sizes()) - tokens.sizes(), tokens.sizes()
    laid.beside["of_pieces"] = laid.pieces.reshape(-1, 2).astype(np.float32)
    of_tokens = [np.arange(128) + begins[i] + 1 for i in laid.pieces[::2]]  # both of a pair are neighbours
    laid.beside["of_tokens"] = np.array(of_tokens)[..., None]
    for step in range(3):
        batch, seen = in_steps.rows_of(step), []
        for row, ids in enumerate(batch["segment_ids"]):
            np.testing.assert_array_equal(batch["of_tokens"][row, ids > 0, 0], batch["input_ids"][row, ids > 0])
            seen += batch["of_pieces"][row, : ids.max()].astype(int).tolist()
            assert [np.count_nonzero(ids == 1 + i) for i in range(ids.max())] == sizes[seen[-ids.max() :]].tolist()
        assert sorted(seen) == sorted(laid.pieces.reshape(-1, 2)[chosen_of(step)].ravel().tolist())
        own = np.arange(0, len(batch["input_ids"]), 2)
        for name, column in in_steps.rows_of(step, own).items():
            np.testing.assert_array_equal(column[own], batch[name][own])


def test_no_row_is_longer_than_the_model_takes(rng):
    tokens = Tokens(rng.integers(2, 60, 40))
    for longest, most in ((64, 64), (128, 128), (10**6, 64 * 8)):
        in_steps, _, _ = steps_of(tokens, 64, 5, Laying(batch=8, longest=longest, program=0.0))
        assert all(size.length <= most for size in in_steps.sizes) and in_steps.scored_size.length <= most
        assert longest == 64 or in_steps.sizes[-1].rows < 8


def test_no_step_of_many_has_longer_rows_than_the_model_takes():
    """The number of rows is chosen by some of the steps, and each of the others may need the most."""
    laid, often = LaidRows(Tokens([10, 10, 100, 100]), [np.arange(4)], 100, False), np.arange(2)
    for rare in (1, 2):
        chosen_of = lambda step, rare=rare: often + 2 if step == rare else often
        in_steps = StepRows(laid, None, chosen_of, 2**12 + 9, Laying(batch=2, longest=150))
        assert in_steps.rows_of(rare)["input_ids"].shape == (2, 100)


def test_sizes_are_the_cheapest_of_all_choices(rng):
    for _ in range(20):
        needs, program = rng.integers(1, 12, 9), float(rng.integers(0, 12))
        costs = np.arange(13.0) ** 1.5
        found = row_sizes.levels(needs, costs, program, most=3)
        choices = [c for n in (1, 2, 3) for c in itertools.combinations(range(1, 13), n) if c[-1] >= needs.max()]
        least = min(row_sizes.cost(needs, costs, program, choice) for choice in choices)
        assert row_sizes.cost(needs, costs, program, found) == pytest.approx(least)


def test_lengths_of_texts_leave_few_places_empty(rng):
    """1,000 steps of eight texts, of which two more would take a row of 2,048 for want of twenty places."""
    sizes = np.minimum(2048, rng.lognormal(np.log(172) - 0.18, 0.6, 8000)).astype(int) + 1
    in_steps, _, _ = steps_of(Tokens(sizes), 2048, 1000, Laying(batch=8, program=1e5))
    assert in_steps.tokens / in_steps.places > 0.8 and all(size.rows == 1 for size in in_steps.sizes)


@pytest.mark.parametrize(["growth", "micro_batches", "shards"], [(0.0, 1, 1), (1e-2, 2, 2)])
def test_a_stream_has_its_documents_in_few_places_however_long_they_become(growth, micro_batches, shards, rng):
    """Steps of what is held out are like the first ones; then come others, with three long documents beside short."""
    held_out = LaidRows(Tokens(rng.integers(2, 30, 21)), [np.arange(21)], 256, False)
    sizes = [
        *rng.integers(2, 30, (4, 8)),
        [256, 256, 256, 2, 3, 4, 5, 6],
        [256, 170, 170, 170, 170, 2, 2, 2],
        [256] * 8,
    ]
    tokens = Tokens(np.concatenate(sizes))
    piece = lambda i: mock.Mock(Piece, **dict(zip(("tokens", "labels"), tokens.arrays(i), strict=True)))
    stream = mock.Mock(Stream, packed=False, pieces_of=lambda step: [piece(8 * step + i) for i in range(8)])
    laying = Laying(batch=8, micro_batches=micro_batches, shards=shards, growth=growth, program=100.0)
    in_steps = StreamRows(stream, held_out, 1000, laying)
    assert 2 <= len(in_steps.sizes) <= 4 and in_steps.sizes[-1].places == 8 * 256
    for step in range(7):
        batch, numbers, size = in_steps.rows_of(step), in_steps.numbers_of(step), in_steps.size_of(step)
        assert batch["input_ids"].shape == (size.num_rows, size.length) and size in in_steps.sizes
        assert size.rows % shards == 0 and (step >= 4 or size.places <= 8 * 64)
        for first in range(micro_batches):
            expected = [tuple(x.tolist() for x in tokens.arrays(8 * step + i)) for i in range(first, 8, micro_batches)]
            assert sorted(documents({name: x[first::micro_batches] for name, x in batch.items()})) == sorted(expected)
        mask, begins = batch.get("segment_ids", batch.get("token_mask")) > 0, np.cumsum(tokens.sizes()) - tokens.sizes()
        assert (begins[8 * step + numbers[mask]] < batch["input_ids"][mask]).all()
    scored, of_held = [*in_steps.scored()], [tuple(x.tolist() for x in held_out.tokens.arrays(i)) for i in range(21)]
    assert sorted(each for batch in scored for each in documents(batch)) == sorted(of_held)
    some = [in_steps.some_of(step) for step in range(7)]
    assert {batch["labels"].shape for batch in (*scored, *some)} == {scored[0]["labels"].shape}
    first = [tuple(x.tolist() for x in tokens.arrays(i)) for i in range(8)]
    fitting = documents(some[0])  # two of random lengths may not
    assert all(each in first for each in fitting) and 4 <= micro_batches * len(fitting) <= 8
    assert all(map(documents, some))


@pytest.mark.parametrize("longest", [60, 100])
def test_longrope_takes_the_longest_document_of_a_step_for_its_length(longest, rng):
    """As transformers, which asks whether the largest position of a call is beyond the length in training, 64."""
    tokens, length = Tokens([longest, *rng.integers(2, 60, 7)]), 128
    in_steps, _, _ = steps_of(tokens, length, 1, Laying(batch=8, in_segments=True))
    factors = short, long = (1.0, 2.0), (3.0, 5.0)
    positions = in_steps.rows_of(0)["positions"]
    cos, _ = rope_table(jnp.asarray(positions), 4, theta=100.0, scaling=LongRope(*factors, 2.0, 64, 1.0))
    angles = positions[..., None] * 100.0 ** -np.array([0.0, 0.5]) / np.array(long if longest > 64 else short)
    np.testing.assert_allclose(cos[..., :2], np.cos(angles), atol=1e-5)


@pytest.mark.parametrize("longest", [60, 100])
def test_a_dynamic_base_follows_from_the_longest_document_of_a_step(longest, rng):
    """Not from the length of rows that documents share: as transformers, for the largest position of a call."""
    tokens = Tokens([longest, *rng.integers(2, 60, 7)])
    in_steps, _, _ = steps_of(tokens, 128, 1, Laying(batch=8, in_segments=True))
    positions = in_steps.rows_of(0)["positions"]
    assert positions.shape[1] > 128  # a row of several documents
    cos, _ = rope_table(jnp.asarray(positions), 4, theta=100.0, scaling=DynamicRope(2.0, 64))
    theta = 100.0 * (2 * max(longest, 64) / 64 - 1) ** (4 / (4 - 2))
    angles = positions[..., None] * theta ** -np.array([0.0, 0.5])
    np.testing.assert_allclose(cos[..., :2], np.cos(angles), atol=1e-5)
