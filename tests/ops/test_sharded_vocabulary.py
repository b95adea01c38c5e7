"""A vocabulary that devices split inside `jax.shard_map`: the loss is that of the whole one, and no logits travel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax import cross_entropy, fused_linear_cross_entropy, ops
from tests.ops._losses import FUSED, arrays, make_case, relative_error, value_and_grad
from tests.ops._oracle import sent


@pytest.fixture
def mesh(devices):
    return jax.sharding.Mesh(devices, ("shard",))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("reduction, mode", [("mean", "lean"), ("mean", "auto"), ("none", "lean")])
def test_sharded_vocabulary_equals_the_whole_one(check_vma, reduction, mode, mesh, rng):
    case = make_case(rng, n=24, v=64)
    inputs, labels = arrays(FUSED.inputs(case)), jnp.asarray(case.labels)
    t, c = arrays([case.token_weights, case.class_weights])
    # All of one sign: a sum that cancels would have no relative error to speak of.
    cotangent = jnp.asarray(rng.uniform(0.5, 2.0, 24 if reduction == "none" else ()), jnp.float32)
    options = dict(
        reduction=reduction, return_metrics=True, label_smoothing=0.1, z_loss=1e-2, logit_softcap=5.0,
        token_scaling=reduction == "mean",
    )  # fmt: skip
    split, same = jax.P("shard"), jax.P()

    def whole(inputs, t):
        loss, metrics = FUSED(inputs, labels, token_weights=t, class_weights=c, mode="lean", **options)
        return jnp.sum(loss * cotangent), metrics

    def sharded(inputs, t):
        local = lambda hidden, weight, bias, labels, t, c: FUSED(
            [hidden, weight, bias], labels, token_weights=t, class_weights=c, vocab_axis="shard", mode=mode, **options
        )
        specs = (same, split, split, same, same, split)
        mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=same, check_vma=check_vma)
        hidden, weight, bias = inputs
        loss, metrics = mapped(hidden, weight, bias, labels, t, c)
        return jnp.sum(loss * cotangent), metrics

    (expected, expected_metrics), expected_grads = value_and_grad(whole, (0, 1), has_aux=True)(inputs, t)
    (found, metrics), grads = value_and_grad(sharded, (0, 1), has_aux=True)(inputs, t)
    assert relative_error(found, expected) < 1e-5
    expected_leaves = jax.tree.leaves((expected_grads, expected_metrics))
    for a, b in zip(jax.tree.leaves((grads, metrics)), expected_leaves, strict=True):
        assert relative_error(a, b) < 2e-5


@pytest.mark.parametrize("layout", ["vd", "dv"])
def test_shards_of_any_size_equal_the_whole_vocabulary(layout, mesh, rng):
    shard = 2 * int(rng.integers(3, 40)) + 1
    case = make_case(rng, n=24, v=mesh.size * shard)
    hidden, weight, _ = arrays(FUSED.inputs(case))
    labels, weight = jnp.asarray(case.labels), weight if layout == "vd" else weight.T
    split = jax.P("shard") if layout == "vd" else jax.P(None, "shard")
    fused = functools.partial(fused_linear_cross_entropy, weight_layout=layout, mode="lean", implementation="xla")
    sharded = jax.shard_map(
        functools.partial(fused, vocab_axis="shard"), mesh=mesh, in_specs=(jax.P(), split, jax.P()), out_specs=jax.P()
    )
    expected, expected_grads = value_and_grad(fused, (0, 1))(hidden, weight, labels)
    found, grads = value_and_grad(sharded, (0, 1))(hidden, weight, labels)
    assert relative_error(found, expected) < 1e-5, shard
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert relative_error(grad, expected_grad) < 2e-5, shard


def test_sharded_vocabulary_gathers_no_tokens_and_no_logits(mesh):
    """What crosses the mesh is a few numbers a token, and the hidden states' gradient."""
    n, d, v = 32, 8, 128
    local = lambda h, w, y: fused_linear_cross_entropy(h, w, y, vocab_axis="shard")
    loss = jax.shard_map(local, mesh=mesh, in_specs=(jax.P(), jax.P("shard"), jax.P()), out_specs=jax.P())
    arguments = jnp.zeros((n, d)), jnp.zeros((v, d)), jnp.zeros(n, jnp.int32)
    text = jax.jit(jax.grad(loss, (0, 1))).lower(*arguments).compile().as_text() or ""
    assert {kind for kind, _ in sent(text)} == {"all-reduce"}
    assert max(size for _, size in sent(text)) <= n * d


def test_impossible_label_on_a_sharded_vocabulary_is_nan(mesh):
    local = lambda h, w, y: fused_linear_cross_entropy(h, w, y, vocab_axis="shard", reduction="none")
    loss = jax.shard_map(local, mesh=mesh, in_specs=(jax.P(), jax.P("shard"), jax.P()), out_specs=jax.P())
    rows = jax.jit(loss)(jnp.ones((3, 8)), jnp.ones((16, 8)), jnp.array([15, 16, -1]))
    assert np.isfinite(rows[0]) and np.all(np.isnan(rows[1:]))


@pytest.mark.parametrize("kernel", ["xla", "mosaic_tpu:interpret"])
def test_gradients_made_in_the_forward_are_those_of_the_whole_vocabulary(kernel, mesh, rng):
    case = make_case(rng, n=40, v=16 * mesh.size)
    hidden, weight, _ = arrays(FUSED.inputs(case))
    labels = jnp.asarray(case.labels)
    fused = functools.partial(fused_linear_cross_entropy, mode="fast", chunk_size=16, implementation=kernel)
    sharded = jax.shard_map(
        functools.partial(fused, vocab_axis="shard"),
        mesh=mesh,
        in_specs=(jax.P(), jax.P("shard"), jax.P()),
        out_specs=jax.P(),
        check_vma=False,
    )
    expected, expected_grads = value_and_grad(fused, (0, 1))(hidden, weight, labels)
    found, grads = value_and_grad(sharded, (0, 1))(hidden, weight, labels)
    assert relative_error(found, expected) < 1e-5
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert relative_error(grad, expected_grad) < 2e-5


@pytest.mark.parametrize(
    "mode, kernel, stand_in",
    [
        ("fast", "xla", -jnp.inf),
        ("fast", "mosaic_tpu:interpret", -1e30),
        ("lean", "xla", -1e30),
        pytest.param("fast", "xla", -1e30, marks=pytest.mark.full),
        pytest.param("fast", "mosaic_tpu:interpret", -jnp.inf, marks=pytest.mark.full),
        pytest.param("lean", "xla", -jnp.inf, marks=pytest.mark.full),
        pytest.param("lean", "mosaic_tpu:interpret", -1e30, marks=pytest.mark.full),
        pytest.param("lean", "triton:interpret", -1e30, marks=pytest.mark.full),
    ],
)
def test_a_shard_of_padding_alone_changes_nothing(mode, kernel, stand_in, mesh, rng):
    """Though its logits are scaled: a fused multiply-add keeps what the maximum of a finite stand-in has rounded."""
    case = make_case(rng, n=24, v=16 * mesh.size)
    (hidden, weight, _), labels = arrays(FUSED.inputs(case)), jnp.asarray(case.labels % 16)
    bias = jnp.zeros(16 * mesh.size).at[-16:].set(stand_in)
    fused = functools.partial(fused_linear_cross_entropy, mode=mode, implementation=kernel, logit_scale=0.6)
    sharded = jax.shard_map(
        lambda h, w, b: fused(h, w, labels, bias=b, vocab_axis="shard"),
        mesh=mesh,
        in_specs=(jax.P(), jax.P("shard"), jax.P("shard")),
        out_specs=jax.P(),
        check_vma=False,
    )
    expected, expected_grads = value_and_grad(lambda h, w: fused(h, w, labels, bias=bias), (0, 1))(hidden, weight)
    found, grads = value_and_grad(sharded, (0, 1))(hidden, weight, bias)
    assert relative_error(found, expected) < 1e-5
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert relative_error(grad, expected_grad) < 2e-5


def test_forward_mode_on_shards_is_that_of_the_whole_vocabulary(mesh, rng):
    case = make_case(rng, n=24, v=16 * mesh.size)
    hidden, weight, _ = arrays(FUSED.inputs(case))
    tangents = [jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in (hidden, weight)]
    fused = functools.partial(fused_linear_cross_entropy, mode="fast", implementation="xla")
    local = functools.partial(fused, vocab_axis="shard")
    sharded = jax.shard_map(local, mesh=mesh, in_specs=(jax.P(), jax.P("shard"), jax.P()), out_specs=jax.P())
    of = lambda loss: jax.jvp(lambda h, w: loss(h, w, jnp.asarray(case.labels)), (hidden, weight), tuple(tangents))[1]
    assert relative_error(of(jax.jit(sharded)), of(fused)) < 2e-5


H, W, Y = jnp.ones((8, 4)), jnp.ones((16, 4)), jnp.zeros(8, jnp.int32)
SPLIT_OVER_V = {  # (call, arrays, the names of those that are shards)
    "fused_linear_cross_entropy": (fused_linear_cross_entropy, dict(hidden=H, weight=W, labels=Y), ["weight"]),
    "fused_linear_log_probs": (
        lambda **kw: ops.fused_linear_log_probs(**kw).log_probs.sum(),
        dict(hidden=H, weight=W, labels=Y),
        ["weight"],
    ),
    "fused_linear_token_loss": (
        lambda **kw: ops.fused_linear_token_loss(lambda p: -p, per_token=(), denominator=8, **kw)[0],
        dict(hidden=H, weight=W, labels=Y),
        ["weight"],
    ),
    "fused_linear_distillation": (
        ops.fused_linear_distillation,
        dict(student_hidden=H, student_weight=W, teacher_hidden=H, teacher_weight=W),
        ["student_weight", "teacher_weight"],
    ),
    "fused_linear_topk_distillation": (
        functools.partial(ops.fused_linear_topk_distillation, tail="bucket"),
        dict(hidden=H, weight=W, token_ids=jnp.zeros((8, 1), jnp.int32), log_probs=-jnp.ones((8, 1))),
        ["weight"],
    ),
    "cross_entropy": (cross_entropy, dict(logits=jnp.ones((8, 16)), labels=Y), ["logits"]),
}


@pytest.mark.parametrize("op", SPLIT_OVER_V)
def test_what_is_not_split_as_vocab_axis_says_is_refused(op, mesh):
    """A whole head would be counted once for each device, and tokens of other devices taken for one's own."""
    loss, arrays, shards = SPLIT_OVER_V[op]
    on_v = jax.P(None, "shard") if op == "cross_entropy" else jax.P("shard")
    right = {name: on_v if name in shards else jax.P() for name in arrays}

    def trace(specs, axis="shard", check_vma=True):
        local = lambda *parts: loss(**dict(zip(arrays, parts, strict=True)), vocab_axis=axis)
        mapped = jax.shard_map(local, mesh=mesh, in_specs=tuple(specs.values()), out_specs=jax.P(), check_vma=check_vma)
        return jax.eval_shape(mapped, *arrays.values())

    assert trace(right).shape == () and trace(dict.fromkeys(right, jax.P()), check_vma=False).shape == ()
    rule = f"{op}: {shards[0]} is the same on all devices of vocab_axis='shard'.*in_spec"
    with pytest.raises(ValueError, match=rule):
        trace(dict.fromkeys(right, jax.P()))
    tokens = dict.fromkeys(set(arrays) - {"logits"} - set(shards), jax.P("shard"))
    if op != "cross_entropy":  # whose logits' rows would be cut by the same axis as their classes
        with pytest.raises(ValueError, match=f"{op}: .* varies over vocab_axis='shard'.*in_spec"):
            trace(right | tokens)
    with pytest.raises(ValueError, match=f"{op}: vocab_axis='tp' must .*axes here are .'shard',.*inside jax.shard_map"):
        trace(right, axis="tp")
    with pytest.raises(ValueError, match=f"{op}: vocab_axis='shard' must .*here is none.*inside jax.shard_map"):
        loss(**arrays, vocab_axis="shard")


def test_tokens_that_were_gathered_as_the_same_on_all_are_right(mesh, rng):
    hidden, weight = (jnp.asarray(rng.standard_normal((8, 4)), jnp.float32) for _ in range(2))
    gather = functools.partial(jax.lax.all_gather, axis_name="shard", tiled=True, to="invarying")
    local = lambda h, w: fused_linear_cross_entropy(gather(h), w, Y, vocab_axis="shard")
    split = jax.shard_map(local, mesh=mesh, in_specs=jax.P("shard"), out_specs=jax.P())
    expected = value_and_grad(lambda h, w: fused_linear_cross_entropy(h, w, Y), (0, 1))(hidden, weight)
    for a, b in zip(
        jax.tree.leaves(value_and_grad(split, (0, 1))(hidden, weight)), jax.tree.leaves(expected), strict=True
    ):
        assert relative_error(a, b) < 2e-5
