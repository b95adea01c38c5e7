"""A head that FSDP splits: the loss is that of the whole head, and no device ever holds the whole head."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from liger_jax import ops
from liger_jax.pallas_kernels.cross_entropy import formulas
from tests.ops._oracle import TOLERANCE, largest_error, packed, sent

N, D, V = 24, 16, 72  # on 4 devices, 18 entries each: with slices of 4 of them, the last slice is shorter
SLICE = 16
TOKENS = P(("data", "fsdp"))
OPTIONS = dict(
    ignore_index=-100, label_smoothing=0.1, z_loss=0.01, logit_scale=0.7, logit_softcap=5.0, chunk_size=SLICE
)
# By name: how the head (V, D) is sharded over a mesh with that many devices along "data".
HEADS = {
    "vocabulary over all": (P("fsdp"), 1),
    "vocabulary over one axis of two": (P("fsdp"), 2),
    "vocabulary over both axes": (P(("data", "fsdp")), 2),
    "width": (P(None, "fsdp"), 1),
    "vocabulary and width": (P("data", "fsdp"), 2),
}


@pytest.fixture
def fsdp(devices):
    """Makes a mesh with that many of the devices along "data"; the others are along "fsdp"."""
    names, types = ("data", "fsdp"), (AxisType.Explicit,) * 2
    return lambda data=1: jax.make_mesh((data, len(devices) // data), names, axis_types=types, devices=devices)


def placed(mesh, *arrays_and_specs):
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in arrays_and_specs]


def draw(rng, v=V, dtype=jnp.float32):
    """hidden, weight, bias and token weights; labels, of which some are ignored; class weights."""
    hidden, weight, bias = (jnp.asarray(rng.standard_normal(s), dtype) for s in ((N, D), (v, D), (v,)))
    labels = jnp.where(jnp.asarray(rng.random(N) < 0.3), -100, jnp.asarray(rng.integers(0, v, N)))
    token_weights, class_weights = (jnp.asarray(rng.uniform(0.5, 1.5, s), jnp.float32) for s in (N, v))
    return (hidden, weight, bias, token_weights), labels, class_weights


def assert_close(found, expected):
    for x, truth in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert largest_error(np.asarray(x), truth) <= TOLERANCE


CASES = [
    pytest.param(head, mode, kernel, layout, marks=[] if (head, mode, kernel, layout) in (
        ("vocabulary over all", "lean", "xla", "vd"), ("width", "lean", "xla", "dv")
    ) else pytest.mark.full)
    for head in HEADS
    for mode, kernel, layout in (
        ("lean", "xla", "vd"), ("lean", "xla", "dv"), ("fast", "xla", "vd"), ("lean", "triton:interpret", "vd")
    )
]  # fmt: skip


@pytest.mark.parametrize("head, mode, kernel, layout", CASES)
def test_loss_metrics_and_gradients_are_those_of_the_whole_head(head, mode, kernel, layout, fsdp, rng):
    arrays, labels, class_weights = draw(rng)
    spec, data = HEADS[head]

    def op(hidden, weight, bias, token_weights, labels, class_weights):
        options = OPTIONS | dict(mode=mode, implementation=kernel, weight_layout=layout, return_metrics=True)
        weight = weight if layout == "vd" else weight.T
        return ops.fused_linear_cross_entropy(
            hidden, weight, labels, bias=bias, token_weights=token_weights, class_weights=class_weights, **options
        )

    run = jax.jit(jax.value_and_grad(op, argnums=(0, 1, 2, 3), has_aux=True))
    expected = run(*arrays, labels, class_weights)
    mesh = fsdp(data)
    with jax.set_mesh(mesh):
        specs = TOKENS, spec, P(), TOKENS, TOKENS, P()
        found = run(*placed(mesh, *zip((*arrays, labels, class_weights), specs, strict=True)))
    assert_close(found, expected)


def test_log_probs_and_entropies_of_a_split_head_are_those_of_the_whole_one(fsdp, rng):
    """One slice, of four entries of each device's 18, is forbidden by a bias of −inf."""
    (hidden, weight, bias, _), labels, _ = draw(rng)
    is_forbidden = lambda entry: (entry % 18 >= 4) & (entry % 18 < 8)
    bias = jnp.where(is_forbidden(jnp.arange(V)), -jnp.inf, bias)
    labels = jnp.where(is_forbidden(labels), labels - 4, labels)
    mesh = fsdp()

    def op(hidden, weight, bias, labels):
        found = ops.fused_linear_log_probs(
            hidden, weight, labels, selected_token_ids=jnp.array([V - 1, 2, 0]), bias=bias, entropy=True,
            chunk_size=SLICE,
        )  # fmt: skip
        of_selected = jnp.sum(jnp.sin(found.selected_log_probs))
        return jnp.sum(found.log_probs * jnp.cos(found.entropy)) + of_selected, found

    run = jax.jit(jax.value_and_grad(op, argnums=(0, 1, 2), has_aux=True))
    expected = run(hidden, weight, bias, labels)
    with jax.set_mesh(mesh):
        arrays = placed(mesh, (hidden, TOKENS), (weight, P("fsdp")), (bias, P()), (labels, TOKENS))
        assert_close(run(*arrays), expected)


@pytest.mark.full
@pytest.mark.parametrize("mode", ["lean", "fast"])
def test_token_loss_of_a_split_head_is_that_of_the_whole_one(mode, fsdp, rng):
    (hidden, weight, _, advantages), labels, _ = draw(rng)
    mesh = fsdp()

    def op(hidden, weight, advantages, labels):
        return ops.fused_linear_token_loss(
            lambda log_prob, advantage: -advantage * jnp.exp(log_prob), hidden, weight, labels, (advantages,),
            denominator=N, mode=mode, chunk_size=SLICE,
        )[0]  # fmt: skip

    run = jax.jit(jax.value_and_grad(op, argnums=(0, 1, 2)))
    expected = run(hidden, weight, advantages, labels)
    with jax.set_mesh(mesh):
        arrays = placed(mesh, (hidden, TOKENS), (weight, P("fsdp")), (advantages, TOKENS), (labels, TOKENS))
        assert_close(run(*arrays), expected)


def test_of_equal_logits_the_vocabularys_first_is_predicted_though_slices_hold_its_entries_out_of_order(fsdp, rng):
    (hidden, weight, *_), labels, _ = draw(rng)
    longest = 10.0 * weight[17]  # so that no other entry of the vocabulary has its logit
    weight = weight.at[jnp.array([17, 20, 40])].set(longest)  # 17 is in the last slice, 20 and 40 in the first
    hidden = jnp.broadcast_to(longest, hidden.shape)
    mesh = fsdp()
    with jax.set_mesh(mesh):
        arrays = placed(mesh, (hidden, TOKENS), (weight, P("fsdp")), (jnp.abs(labels) % V, TOKENS))
        _, metrics = jax.jit(
            lambda *arrays: ops.fused_linear_cross_entropy(*arrays, mode="lean", chunk_size=SLICE, return_metrics=True)
        )(*arrays)
    np.testing.assert_array_equal(metrics.predicted_tokens, 17)


def test_labels_outside_the_vocabulary_poison_their_own_row(fsdp, rng):
    (hidden, weight, *_), labels, _ = draw(rng)
    labels = jnp.abs(labels) % V
    wrong = labels.at[3].set(V).at[5].set(-1)
    mesh = fsdp()
    with jax.set_mesh(mesh):
        arrays = placed(mesh, (hidden, TOKENS), (weight, P("fsdp")), (wrong, TOKENS))
        run = functools.partial(ops.fused_linear_cross_entropy, reduction="none", chunk_size=SLICE)
        losses = np.asarray(jax.jit(run)(*arrays))
    assert [int(i) for i in np.flatnonzero(np.isnan(losses))] == [3, 5]


def test_lean_sends_slices_and_a_few_numbers_and_no_array_of_a_device_is_as_large_as_the_head(devices, rng):
    v, count = 264, len(devices)
    (hidden, weight, *_), labels, _ = draw(rng, v)
    mesh = jax.sharding.Mesh(devices, ("fsdp",), axis_types=(AxisType.Explicit,))
    tokens = P("fsdp")

    def loss(hidden, weight, labels):
        return ops.fused_linear_cross_entropy(hidden, weight, labels, mode="lean", chunk_size=88)

    with jax.set_mesh(mesh):
        arrays = placed(mesh, (hidden, tokens), (weight, P("fsdp")), (labels, tokens))
        text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*arrays).compile().as_text() or ""
    sizes = {
        math.prod(map(int, dims.split(","))) for dims in re.findall(r"\bf32\[([\d,]+)\]", text)
    }  # no library's workspace
    assert v * D not in sizes and max(sizes) <= max(v * D // count, 88 * D)
    assert {size for _, size in sent(text)} <= packed({1, 88 * D, 88 * D // count}, devices)
    assert {kind for kind, size in sent(text) if size > 3} == {"all-gather", "reduce-scatter"}


def test_a_bfloat16_step_sums_the_heads_gradient_no_worse_than_twice_one_devices_rounding(fsdp, rng):
    """Every device's shard is rounded once; a sum over devices in bfloat16 costs as much again."""
    (hidden, weight, *_), labels, _ = draw(rng)
    grad = jax.jit(
        jax.grad(
            lambda h, w, y: ops.fused_linear_cross_entropy(h, w, y, mode="lean", chunk_size=SLICE, logit_scale=0.3),
            argnums=(0, 1),
        )
    )
    truth, half = grad(hidden, weight, labels), hidden.astype(jnp.bfloat16)
    rms = lambda found, truth: np.sqrt(np.mean(np.square(np.asarray(found, np.float64) - truth)))
    single = [rms(x, y) for x, y in zip(grad(half, weight, labels), truth, strict=True)]
    mesh = fsdp()
    with jax.set_mesh(mesh):
        found = grad(*placed(mesh, (half, TOKENS), (weight, P("fsdp")), (labels, TOKENS)))
    assert found[1].dtype == jnp.float32
    for x, y, own in zip(found, truth, single, strict=True):
        assert rms(x, y) <= 2 * own


def test_the_first_token_of_the_largest_maximum_is_found_whatever_the_order_of_parts(rng):
    maxima = rng.integers(0, 3, (4, 50)).astype(np.float32)  # most are equal
    maxima[:, 0], maxima[2, 1] = -np.inf, np.nan
    tokens = rng.permutation(200).reshape(4, 50).astype(np.int32)
    largest, first = formulas.first_of_largest(jnp.asarray(maxima), jnp.asarray(tokens))
    np.testing.assert_array_equal(largest, maxima.max(axis=0))
    assert first[1] == tokens[2, 1]
    expected = np.where(maxima == maxima.max(axis=0), tokens, 999).min(axis=0)
    np.testing.assert_array_equal(np.delete(first, 1), np.delete(expected, 1))
