"""Dropout of adapters: a mask belongs to a token, whatever its row, micro-batch, remat and device are."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from liger_jax.models import KernelOptions, Layout
from liger_jax.models.core.dropout import dropped, token_words
from liger_jax.models.lora import add_lora, trainable, with_adapters, with_dropout
from tests.models._llama import CONFIG, make_model

TARGETS = ("q_proj", "o_proj", "gate_proj", "down_proj", "lm_head")
LENGTHS = (7, 5, 9, 3)  # of four pieces
SIZES = dataclasses.replace(CONFIG, vocab_size=64)
RATE = 0.4


def adapted(config=SIZES, targets=TARGETS, **options):
    """A model with adapters whose B is not zero."""
    model = add_lora(make_model(config, **options), 3, alpha=6, targets=targets, dropout=RATE, rngs=nnx.Rngs(1))
    graph, adapters, base = trainable(model)
    noise = lambda x: 0.2 * np.random.default_rng(x.size).standard_normal(x.shape)
    return graph, jax.tree.map(lambda x: x + noise(x).astype(x.dtype), adapters), base


def laid(rows, pieces, length):
    """A model's arguments, and the number of each token's piece: rows are lists of pieces."""
    shape = len(rows), length
    batch = {name: np.zeros(shape, np.int32) for name in ("input_ids", "segment_ids", "positions", "pieces")}
    batch["labels"] = np.full(shape, -100, np.int32)
    for row, numbers in enumerate(rows):
        begin = 0
        for segment, number in enumerate(numbers, 1):
            own = row, slice(begin, begin + len(pieces[number]))
            batch["input_ids"][own] = batch["labels"][own] = pieces[number]
            batch["segment_ids"][own], batch["pieces"][own] = segment, 10 + number
            batch["positions"][own] = np.arange(len(pieces[number]))
            begin += len(pieces[number])
    return batch


def loss_of(model, batch):
    arguments = dict(batch)
    model = with_dropout(model, jax.random.key(3), arguments.pop("pieces"))
    return model(**arguments, loss_normalizer=1.0).loss


def value_of(model, batch):
    return float(_value(*model, batch))


@functools.partial(jax.jit, static_argnums=0)
def _value(graph, adapters, base, batch):
    return loss_of(nnx.merge(graph, adapters, base), batch)


def value_and_gradients(model, batch):
    graph, adapters, base = model
    run = jax.jit(jax.value_and_grad(lambda adapters, batch: loss_of(nnx.merge(graph, adapters, base), batch)))
    return run(adapters, batch)


def assert_same(found, truth, bound=1e-5):
    for (path, x), y in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(truth), strict=True):
        assert np.abs(np.asarray(x) - y).max() <= bound * np.abs(y).max(), jax.tree_util.keystr(path)


def test_packed_and_padded_rows_and_micro_batches_drop_the_same(rng):
    pieces = [rng.integers(0, SIZES.vocab_size, length) for length in LENGTHS]
    padded, packed = laid([[0], [1], [2], [3]], pieces, 12), laid([[2, 3], [1, 0]], pieces, 12)
    model = adapted(scan_layers=True)
    truth = value_of(model, packed)
    without_ids = {name: x for name, x in padded.items() if name not in ("segment_ids", "positions")}
    halves = ({name: x[i::2] for name, x in without_ids.items()} for i in (0, 1))
    np.testing.assert_allclose(sum(value_of(model, half) for half in halves), truth, rtol=1e-5)
    assert abs(value_of(model, packed | {"pieces": packed["pieces"] + 1}) - truth) > 1e-3 * truth


def test_without_pieces_rows_and_segments_number_them_and_rows_may_bring_their_numbers(rng):
    pieces = [rng.integers(0, SIZES.vocab_size, length) for length in LENGTHS]
    graph, adapters, base = adapted()
    batch = laid([[2, 3], [1, 0]], pieces, 12)
    del batch["pieces"]
    run = jax.jit(
        lambda batch, *numbers: (
            with_dropout(nnx.merge(graph, adapters, base), jax.random.key(3), *numbers)(
                **batch, loss_normalizer=1.0
            ).loss
        )
    )
    truth = run(batch)
    row = lambda i: {name: x[i : i + 1] for name, x in batch.items()}
    by_rows = [run(row(i), jnp.array([i])) for i in (0, 1)]
    np.testing.assert_allclose(sum(by_rows), truth, rtol=1e-5)
    same = {name: np.concatenate([x[:1], x[:1]]) for name, x in batch.items()}
    assert abs(run(same) - 2 * by_rows[0]) > 1e-3  # another row, another mask
    with pytest.raises(ValueError, match=r"pieces has shape \(3, 1\), and .* input_ids of shape \(2, 12\)"):
        run(batch, jnp.arange(3))


def test_a_mask_has_its_rate_and_features_tokens_rows_and_keys_are_independent():
    """Shares within 5 standard deviations, and so for the product of any two masks."""
    words, seed = token_words((4, 96)), jax.random.key(np.random.default_rng().integers(2**31))
    keys = jax.vmap(lambda i: jax.random.fold_in(seed, i))(jnp.arange(3))
    run = jax.jit(jax.vmap(lambda key: dropped(jnp.ones((4, 96, 160)), RATE, key, words), (0,)))
    values = np.asarray(run(keys), np.float64)
    np.testing.assert_allclose(np.unique(values), [0, 1 / (1 - RATE)], rtol=1e-6)
    mask = ((values == 0) - RATE) / np.sqrt(RATE * (1 - RATE))  # mean 0, variance 1
    bound = lambda x: abs(x.mean()) * np.sqrt(x.size)
    assert bound(mask) < 5
    for axis in range(mask.ndim):
        for distance in (1, 2, 16, 64):
            if distance < mask.shape[axis]:
                one = np.split(mask, [mask.shape[axis] - distance], axis)[0]
                other = np.split(mask, [distance], axis)[1]
                assert bound(one * other) < 5, (axis, distance)
    for shares in (mask.mean((0, 1, 2)), mask.mean((0, 1, 3)), mask.mean(3)):  # by feature, by position, by token
        size = mask.size / shares.size
        assert abs((size * shares**2).mean() - 1) < 5 * np.sqrt(2 / shares.size)


def test_a_device_of_features_drops_its_part_of_the_same_mask(rng):
    x, words, key = jnp.asarray(rng.normal(size=(2, 5, 24)), jnp.float32), token_words((2, 5)), jax.random.key(0)
    with jax.numpy_rank_promotion("raise"):
        whole = dropped(x, RATE, key, words)
    np.testing.assert_array_equal(dropped(x[..., 8:], RATE, key, words, jnp.int32(8)), whole[..., 8:])


def test_inside_shard_map_rows_need_numbers(rng, devices):
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    graph, adapters, base = adapted(dataclasses.replace(SIZES, num_hidden_layers=1), ("q_proj",))
    tokens = jnp.asarray(rng.integers(0, 64, (len(devices), 6)), jnp.int32)

    def local(tokens, *numbers):
        model = with_dropout(nnx.merge(graph, adapters, base), jax.random.key(3), *numbers)
        return model.log_probs(tokens, labels=tokens).log_probs

    by_rows: Any = dict(mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    split = lambda *arrays: jax.shard_map(local, **by_rows)(*arrays)
    with pytest.raises(ValueError, match=r"inside jax.shard_map over \{'data': \d\}, where all devices would number"):
        jax.eval_shape(split, tokens)
    found = jax.jit(split)(tokens, jnp.arange(len(tokens)))
    np.testing.assert_allclose(found, jax.jit(local)(tokens), rtol=1e-4, atol=1e-5)

    def reference(tokens):
        model = with_adapters(with_dropout(nnx.merge(graph, adapters, base), jax.random.key(3)), False)
        return model.log_probs(tokens, labels=tokens).log_probs

    jax.eval_shape(jax.shard_map(reference, **by_rows), tokens)  # drops nothing, and needs no numbers
    parts = Layout(batch=(), fsdp=(), sequence="data").sequence_shards({"data": len(devices)})
    of_split_rows = lambda tokens: token_words(tokens.shape, pieces=tokens, sequence=parts)
    with pytest.raises(ValueError, match="where a device cannot know which positions of a row it has"):
        jax.eval_shape(jax.shard_map(of_split_rows, **by_rows), tokens)


MESHES = {
    "fsdp": (Layout(batch=("fsdp",), fsdp="fsdp"), {"fsdp": 4}),
    "tensor": (Layout(batch=("fsdp",), fsdp="fsdp", tensor="tensor"), {"fsdp": 2, "tensor": 2}),
    "sequence": (Layout(batch=("fsdp",), fsdp="fsdp", sequence="sequence"), {"fsdp": 2, "sequence": 2}),
    "tensor and sequence": (
        Layout(batch=(), fsdp=(), tensor="tensor", sequence="sequence"), {"sequence": 2, "tensor": 2},
    ),
}  # fmt: skip


@pytest.mark.full  # by default a device's part of a mask above, and adapters on a mesh in test_lora.py
def test_a_mesh_computes_the_loss_of_one_device(devices, rng):
    check_mesh("tensor and sequence", devices, rng, value_of, dataclasses.replace(SIZES, num_hidden_layers=1))


@pytest.mark.full
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_drops_what_one_device_drops(name, remat, devices, rng):
    check_mesh(name, devices, rng, value_and_gradients, remat=remat)


def check_mesh(name, devices, rng, found_of, config=SIZES, **options):
    """Compares what `found_of` returns of a model and a batch on a mesh of four devices and on one device."""
    layout, sizes = MESHES[name]
    if len(devices) < 4:
        pytest.skip("a mesh of four devices")
    pieces = [rng.integers(0, config.vocab_size, length) for length in LENGTHS]
    batch = laid([[2, 3], [1, 0], [0], [1, 3]], pieces, 13)
    truth = found_of(adapted(config, **options), batch)
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes), devices=devices[:4])
    graph, adapters, base = adapted(config, **options, kernels=KernelOptions(layout=layout))
    with jax.set_mesh(mesh):
        adapters, base = (jax.device_put(tree, layout.shardings(tree, mesh)) for tree in (adapters, base))
        found = found_of((graph, adapters, base), layout.place(batch))
    assert_same(found, truth, 3e-5)
