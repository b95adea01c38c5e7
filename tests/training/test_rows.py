"""The rows of a run: each as often as there are epochs, in an order that depends on the seed and the step alone."""

import math

import numpy as np
import pytest

from liger_jax.training import pack, pad, rows


@pytest.mark.parametrize("number", [1, 3, 8, 9, 16])
@pytest.mark.parametrize("epochs", [0.01, 0.5, 1.0, 2.75])
def test_each_row_is_trained_on_as_often_as_there_are_epochs(number, epochs):
    data = {"input_ids": np.arange(number)[:, None], "labels": np.arange(number)[:, None]}
    steps, rows_of = rows.num_steps(number, 8, epochs), rows.batches(data, 8, 0, epochs)
    seen = np.concatenate([rows_of(step)["labels"][:, 0] for step in range(steps)])
    assert all(1 <= rows.num_rows(rows_of(step)) <= 8 for step in range(steps)) and not rows.num_rows(rows_of(steps))
    assert len(seen) == max(1, round(epochs * number))
    # An epoch has each row once, in its own order, and a fraction of one is that order's beginning.
    endless = rows.batches(data, 8, 0)
    for epoch, begin in enumerate(range(0, len(seen), number)):
        each = math.ceil(number / 8)
        whole = np.concatenate([endless(epoch * each + i)["labels"][:, 0] for i in range(each)])
        assert sorted(whole) == list(range(number))
        np.testing.assert_array_equal(seen[begin : begin + number], whole[: len(seen) - begin])


def test_rows_that_differ_in_a_token_or_a_label_have_other_fingerprints():
    data = {"input_ids": np.arange(6).reshape(2, 3), "labels": np.arange(6).reshape(2, 3)}
    found = {
        rows.fingerprint(data),
        rows.fingerprint(data, data),
        rows.fingerprint(data | {"positions": data["labels"]}),
    }
    for name in data:
        changed = data | {name: data[name] + (np.arange(6).reshape(2, 3) == 4)}
        found |= {rows.fingerprint(changed), rows.fingerprint(data, changed)}
    assert len(found) == 7 and rows.fingerprint(dict(data)) in found


def test_no_step_depends_on_those_before():
    data = {"input_ids": np.arange(7)[:, None], "labels": np.arange(7)[:, None]}
    batch_of = rows.batches(data, 3, seed=1)
    seen = np.concatenate([batch_of(step)["input_ids"] for step in range(9)])  # three epochs
    assert sorted(seen[:, 0]) == sorted([*range(7)] * 3)
    np.testing.assert_array_equal(batch_of(5)["labels"], rows.batches(data, 3, seed=1)(5)["labels"])
    assert any((batch_of(i)["labels"] != rows.batches(data, 3, seed=2)(i)["labels"]).any() for i in range(2))


def test_what_is_held_out_is_drawn_once_and_trained_on_never():
    train, held_out = rows.hold_out(range(20), 0.1, seed=3)
    assert sorted([*train, *held_out]) == list(range(20)) and len(held_out) == 2
    assert rows.hold_out(range(20), 0.1, seed=3) == (train, held_out)
    assert rows.hold_out(range(20), 0.0, seed=3) == (list(range(20)), [])
    assert [len(part) for part in rows.hold_out(range(2), 0.99, seed=0)] == [1, 1]
    with pytest.raises(ValueError, match="share=0.5 of 1 items leaves no item to train on. Pass share=0."):
        rows.hold_out(["one"], 0.5, seed=0)


def test_tokens_are_counted_without_padding():
    documents = [np.arange(1, 6), np.arange(1, 3)]
    labels = [np.where(each > 1, each, -100) for each in documents]  # answers after a prompt
    assert rows.num_tokens(pack(documents, 8, labels=labels)) == rows.num_tokens(pad(documents, 8, labels=labels)) == 7
    assert rows.num_tokens(np.ones((2, 8), np.int32)) == 16
    labels[0][-2:] = -100  # as a question at the end, which is not scored
    assert rows.num_tokens(pack(documents, 8, labels=labels)) == rows.num_tokens(pad(documents, 8, labels=labels)) == 7
    empty = {"input_ids": np.ones((1, 8), np.int32), "labels": np.full((1, 8), -100)}
    assert rows.num_tokens(empty) == 0


def test_rows_that_fill_up_a_part_are_padding():
    padded, packed = pad([[1, 2], [3]], 2), pack([[1, 2], [3]], 2)
    plain = {name: padded[name] for name in ("input_ids", "labels")}
    for data, name in ((padded, "token_mask"), (packed, "segment_ids")):
        (part,) = rows.batched(data, len(data["labels"]) + 2)
        assert part[name].tolist() == [*data[name].tolist(), [0, 0], [0, 0]] and set(part) == set(data)
        assert part["labels"].tolist() == [*data["labels"].tolist(), [-100, -100], [-100, -100]]
    for size in (2, 4):  # what tells padding is there in every part, so that a program fits them all
        assert [part["token_mask"].sum() for part in rows.batched(plain, size)] == [4]


@pytest.mark.parametrize("mixture", [None, [(5, 2.0), (6, 0.5)]], ids=["each once", "mixed"])
def test_processes_read_the_rows_of_a_step_between_them_and_no_other_rows(mixture):
    class Seen(np.ndarray):
        read: list

        def __getitem__(self, chosen):
            self.read += np.atleast_1d(chosen).tolist()
            return np.asarray(self)[chosen]

    values = np.arange(1, 23).reshape(11, 2).astype(np.int32).view(Seen)
    values.read = []
    options = dict(batch=4, seed=3, epochs=2.0, mixture=mixture)
    whole = rows.batches({"input_ids": np.asarray(values)}, **options)
    parts = [rows.batches({"input_ids": values}, own=np.array(own), **options) for own in ((0, 3), (1, 2))]
    for step in range(6):
        values.read.clear()
        one, other = (part(step)["input_ids"] for part in parts)
        expected = whole(step)["input_ids"]
        np.testing.assert_array_equal(one + other, expected)  # zeros where the other one has read
        assert len(values.read) == len(expected) and one.shape == expected.shape


def test_each_epoch_has_its_own_order():
    chosen_of = rows.drawn(20, batch=20, seed=0, epochs=3.0)
    assert len({tuple(chosen_of(epoch).tolist()) for epoch in range(3)}) == 3
