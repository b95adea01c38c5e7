"""Packing loses no token, mixes no documents, and leaves few places empty."""

import jax
import numpy as np
import pytest
from flax import nnx

from liger_jax.losses import shifted_labels
from liger_jax.training import pack, pack_completions, pack_pairs, share_of_padding
from tests.models._convergence import FAMILIES
from tests.ops._oracle import first


def random_documents(rng, count, longest):
    return [rng.integers(1, 90, size) for size in rng.integers(0, longest + 1, count)]


def segments_of(batch, name="input_ids"):
    """The segments of all rows, as tuples."""
    for row, ids in zip(batch[name], batch["segment_ids"], strict=True):
        for segment in range(1, ids.max() + 1):
            yield tuple(row[ids == segment].tolist())


@pytest.mark.parametrize("length, longest", [(1, 3), (16, 16), (16, 50), (64, 5)])
def test_every_token_of_every_document_is_packed_once(rng, length, longest):
    documents = random_documents(rng, 200, longest)
    wanted = [tuple(d[i : i + length].tolist()) for d in documents for i in range(0, len(d), length)]
    assert sorted(segments_of(pack(documents, length))) == sorted(wanted)


def test_positions_restart_and_segments_are_whole(rng):
    batch = pack(random_documents(rng, 100, 40), 64)
    for positions in segments_of(batch, "positions"):
        assert positions == tuple(range(len(positions)))
    for ids in batch["segment_ids"]:
        used = ids[ids > 0]
        assert np.all(np.diff(used) >= 0), "a segment's places are side by side"
        assert np.all(ids[len(used) :] == 0), "empty places stand at the end"


def test_each_document_takes_the_first_row_with_room():
    batch = pack([[1] * 5, [2] * 6, [3] * 3, [4] * 2, [5] * 8], 8)
    assert batch["input_ids"].tolist() == [[1] * 5 + [3] * 3, [2] * 6 + [4] * 2, [5] * 8]


def test_real_lengths_leave_little_padding(rng):
    lengths = rng.lognormal(5.5, 1.0, 3000).astype(int).clip(1, 2048)
    documents = [np.ones(n, np.int32) for n in lengths]
    batch = pack(documents, 2048)
    np.testing.assert_allclose(share_of_padding(batch), 1 - sum(lengths) / batch["input_ids"].size)
    assert share_of_padding(batch) < 0.03


@pytest.mark.parametrize("family", first(1, ["mistral", *(name for name in FAMILIES if name != "mistral")]))
def test_a_packed_batch_has_loss_and_gradients_of_its_documents_one_to_a_row(family, rng):
    """In every family; windows are shorter than documents."""
    model_type, fields = FAMILIES[family]
    graph, params = nnx.split(model_type(model_type.config_type(**fields), rngs=nnx.Rngs(0)))
    documents = random_documents(rng, 9, 12)
    packed, rows = pack(documents, 16, pad_id=95), [pack([document], 16) for document in documents if len(document)]
    alone = {name: np.concatenate([row[name] for row in rows]) for name in ("input_ids", "labels")}
    loss = lambda params, batch: nnx.merge(graph, params)(**batch, loss_normalizer=1.0).loss
    with jax.default_matmul_precision("highest"):
        expected, truth = jax.jit(jax.value_and_grad(loss))(params, alone)
        value, gradients = jax.jit(jax.value_and_grad(loss))(params, packed)
        in_evaluation = jax.jit(loss)(params, packed)
    np.testing.assert_allclose([value, in_evaluation], expected, rtol=2e-5)
    for found, gradient in zip(jax.tree.leaves(gradients), jax.tree.leaves(truth), strict=True):
        assert np.abs(found - gradient).max() <= 2e-5 * np.abs(gradient).max()


def test_labels_go_where_their_tokens_go_and_empty_places_are_not_scored(rng):
    documents = random_documents(rng, 50, 30)
    labels = [np.where(d % 2 == 0, d, -100) for d in documents]
    batch = pack(documents, 20, labels=labels)
    even = (batch["segment_ids"] > 0) & (batch["input_ids"] % 2 == 0)
    assert np.array_equal(batch["labels"], np.where(even, batch["input_ids"], -100))
    scored = np.asarray(shifted_labels(batch["labels"], batch["segment_ids"]))
    assert np.all(scored[batch["segment_ids"] == 0] == -100)


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        (dict(documents=[[1]], length=0), ValueError, "length=0 must be a Python int of at least 1"),
        (dict(documents=[], length=4), ValueError, "0 documents have no token"),
        (dict(documents=[[], []], length=4), ValueError, "2 documents have no token"),
        (dict(documents=[[[1]]], length=4), ValueError, r"documents\[0\] has shape \(1, 1\)"),
        (dict(documents=[[1], [0.5]], length=4), TypeError, r"documents\[1\] holds float64; token ids are integers"),
        (dict(documents=[[1], [2**32 + 1]], length=4), ValueError, r"documents\[1\] holds a number beyond int32"),
        (
            dict(documents=[[1]], length=4, labels=[[2**40]]),
            ValueError,
            r"labels\[0\] holds a number beyond int32",
        ),
        (dict(documents=[[1]], length=4, labels=[]), ValueError, "0 labels and 1 documents"),
        (dict(documents=[[1]], length=4, labels=[[1, 2]]), ValueError, r"labels\[0\] has length 2 and documents"),
    ],
)
def test_what_cannot_be_packed_is_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        pack(**arguments)


def at(batch, place, name="input_ids"):
    """The segment at a place: row and segment, from 0."""
    row, segment = place
    return batch[name][row][batch["segment_ids"][row] == segment + 1].tolist()


def test_a_pair_shares_a_row_and_is_found_at_its_places(rng):
    chosen, rejected = ([rng.integers(1, 90, n) for n in rng.integers(1, 11, 40)] for _ in range(2))
    labels = [np.where(np.arange(len(x)) < 1, -100, x) for x in chosen]
    batch, of_chosen, of_rejected = pack_pairs(chosen, rejected, 25, chosen_labels=labels, pad_id=95)
    for i in range(40):
        assert at(batch, of_chosen[i]) == chosen[i].tolist() and at(batch, of_rejected[i]) == rejected[i].tolist()
        assert at(batch, of_chosen[i], "labels") == labels[i].tolist()
        assert at(batch, of_chosen[i], "positions") == list(range(len(chosen[i])))
        assert at(batch, of_rejected[i], "labels") == rejected[i].tolist()
    assert np.array_equal(of_chosen + [0, 1], of_rejected), "side by side in one row"
    assert np.all(of_chosen[:, 1] % 2 == 0)
    assert np.sum(batch["segment_ids"] > 0) == sum(map(len, chosen + rejected))
    assert np.all(batch["input_ids"][batch["segment_ids"] == 0] == 95)


def test_a_group_shares_a_row_and_is_found_at_its_places(rng):
    groups = [[rng.integers(1, 90, n) for n in rng.integers(1, 9, size)] for size in rng.integers(1, 5, 20)]
    labels = [[-x for x in group] for group in groups]
    batch, places = pack_completions(groups, 40, labels=labels)
    first = 0
    for group in groups:
        own, first = places[first : first + len(group)], first + len(group)
        assert [at(batch, place) for place in own] == [x.tolist() for x in group]
        assert [at(batch, place, "labels") for place in own] == [(-x).tolist() for x in group]
        assert len({*own[:, 0].tolist()}) == 1 and np.all(np.diff(own[:, 1]) == 1)
    assert first == len(places)


@pytest.mark.parametrize(
    "call, error, text",
    [
        (
            lambda: pack_pairs([[1, 2]], [[1, 3, 4]], 4),
            ValueError,
            "pack_pairs: pair 0 has 5 tokens, but a row",
        ),
        (lambda: pack_pairs([[1]], [[]], 4), ValueError, "pack_pairs: sequence 1 of pair 0 has no token"),
        (lambda: pack_pairs([], [], 4), ValueError, "pack_pairs: there is no pair to pack"),
        (lambda: pack_pairs([[1]], [], 4), ValueError, "pack_pairs: there are 1 chosen and 0 rejected responses"),
        (lambda: pack_pairs([[0.5]], [[1]], 4), TypeError, r"pack_pairs: chosen\[0\] holds float64; token ids are"),
        (
            lambda: pack_pairs([[1]], [[1]], 4, rejected_labels=[[1, 2]]),
            ValueError,
            r"pack_pairs: rejected_labels\[0\] has length 2 and rejected\[0\] length 1;",
        ),
        (lambda: pack_pairs([[1]], [[1]], 0), ValueError, "pack_pairs: length=0 must be a Python int of at least 1"),
        (
            lambda: pack_completions([[[1], [2] * 4]], 4),
            ValueError,
            "pack_completions: group 0 has 5 tokens, but",
        ),
        (lambda: pack_completions([[]], 4), ValueError, "pack_completions: there is no group to pack"),
        (lambda: pack_completions([[[1], []]], 4), ValueError, "pack_completions: sequence 1 of group 0 has no token"),
        (
            lambda: pack_completions([[[1]]], 4, labels=[[[1], [1]]]),
            ValueError,
            r"pack_completions: there are 2 labels\[0\] and 1 groups\[0\]; pass one for each",
        ),
        (lambda: pack_completions([[[1]]], 4, labels=[]), ValueError, "there are labels of 0 groups and 1 groups"),
    ],
)
def test_bundles_that_cannot_be_packed_are_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()
