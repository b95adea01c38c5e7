"""fused_linear_log_probs: log-probabilities of labels and entropies, with no logits in memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from liger_jax import fused_linear_cross_entropy, fused_linear_log_probs
from tests.ops._oracle import check_float32, check_half, check_vmap, largest_error, value_and_gradients
from tests.ops.references import linear_cross_entropy as reference

N, D, V = 21, 19, 53
OPTIONS = {
    "plain": {},
    "every option": dict(logit_softcap=4.0, logit_scale=0.7, temperature=1.3, weight_layout="dv"),
}
all_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def arrays(rng, n=N, d=D, v=V, dtype=jnp.float32):
    shapes = (n, d), (v, d), (v,)
    return [jnp.asarray(factor * rng.standard_normal(s), dtype) for s, factor in zip(shapes, (1, 0.7, 1), strict=True)]


def labels_of(rng, n=N, v=V):
    return jnp.asarray(rng.integers(0, v, n))


def entropy_of(found):
    """The entropies that a call with entropy=True found."""
    assert found.entropy is not None
    return found.entropy


def differentiable(labels, **options):
    """log_probs and entropy as a function of hidden (N, D), weight (V, D) and bias (V,)."""

    def run(hidden, weight, bias):
        weight = weight.T if options.get("weight_layout") == "dv" else weight
        found = fused_linear_log_probs(hidden, weight, labels, bias=bias, entropy=True, **options)
        return found.log_probs, entropy_of(found)

    return run


def truth(labels, **options):
    scale = options.get("logit_scale", 1.0) / options.get("temperature", 1.0)

    def run(hidden, weight, bias):
        return reference.linear_log_probs(hidden, weight, labels, bias, scale, options.get("logit_softcap"))

    return run


# --- values and gradients ---------------------------------------------------------------------------------------------


@all_options
def test_log_probs_entropies_and_their_gradients_are_exact(options, implementation, rng):
    labels = labels_of(rng)
    op = differentiable(labels, implementation=implementation, chunk_size=16, **options)
    check_float32(op, lambda *xs: truth(labels, **options)(*xs)[:2], arrays(rng), rng)


def test_log_sum_of_squares_is_exact(implementation, rng):
    labels, (hidden, weight, bias) = labels_of(rng), arrays(rng)
    found = fused_linear_log_probs(
        hidden, weight, labels, bias=bias, entropy=True, temperature=0.5, implementation=implementation
    )
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (hidden, weight, bias)]
        expected = truth(labels, temperature=0.5)(*wide)[2]
    assert largest_error(found.log_sum_of_squares, expected) < 2e-5


def test_half_precision_is_as_exact_as_plain_jax(implementation, rng):
    labels = labels_of(rng)

    def plain(hidden, weight, bias):
        logits = (hidden @ weight.T + bias[None, :]).astype(jnp.float32)
        log_p = jax.nn.log_softmax(logits, axis=1)
        return log_p[jnp.arange(N), labels], -jnp.sum(jnp.exp(log_p) * log_p, axis=1)

    op = differentiable(labels, implementation=implementation)
    check_half(op, plain, lambda *xs: truth(labels)(*xs)[:2], arrays(rng, dtype=jnp.bfloat16), rng)


def test_large_logits_take_nothing_from_a_small_entropy(implementation):
    """H = lse − Σ p·z would be lost in the rounding of both, which is 3e-5 here."""
    z = np.full(40, 500.0)
    z[[7, 9]] = 520.0, 512.0
    hidden, weight = jnp.eye(16)[:1], jnp.zeros((40, 16)).at[:, 0].set(jnp.asarray(z, jnp.float32))
    found = fused_linear_log_probs(hidden, weight, jnp.array([9]), entropy=True, implementation=implementation)
    p = np.exp(z) / np.sum(np.exp(z))
    np.testing.assert_allclose(entropy_of(found), [-np.sum(p * np.log(p))], rtol=0, atol=2e-7)
    squares = np.asarray(found.log_sum_of_squares, float)
    np.testing.assert_allclose(squares, [np.log(np.sum(p * p))], rtol=0, atol=2e-7)


@pytest.mark.parametrize("forbidden, stand_in", [(slice(40, V), -jnp.inf), (slice(0, 20), -1e30)], ids=str)
def test_entries_that_a_bias_forbids_are_as_if_they_were_not_there(forbidden, stand_in, implementation, rng):
    """A slice may have no other ones. Scaled, −1e30 is rounded by more than exp takes."""
    (hidden, weight, bias), kept = arrays(rng), np.delete(np.arange(V), forbidden)
    labels = jnp.asarray(rng.integers(0, len(kept), N))
    op = lambda labels: differentiable(labels, implementation=implementation, chunk_size=16, temperature=0.6)
    cotangents = [jnp.asarray(rng.standard_normal(N), jnp.float32) for _ in range(2)]
    run = lambda labels, *inputs: value_and_gradients(op(labels), list(inputs), tuple(cotangents), wrt=(0, 1))
    found = run(jnp.asarray(kept)[labels], hidden, weight, bias.at[forbidden].set(stand_in))
    expected = run(labels, hidden, weight[kept], bias[kept])
    assert not np.any(found[3][forbidden])
    for x, y in zip([*found[:3], found[3][kept]], expected, strict=True):
        assert largest_error(x, y) < 1e-5


def test_log_probs_are_what_the_loss_is_made_of(implementation, rng):
    labels, (hidden, weight, bias) = labels_of(rng), arrays(rng)
    loss, metrics = fused_linear_cross_entropy(
        hidden, weight, labels, bias=bias, reduction="none", return_metrics=True, mode="lean",
        implementation=implementation,
    )  # fmt: skip
    found = fused_linear_log_probs(hidden, weight, labels, bias=bias, implementation=implementation)
    np.testing.assert_array_equal(found.log_probs, -loss)
    for name in ("log_normalizer", "max_logit", "predicted_tokens"):
        np.testing.assert_array_equal(getattr(found, name), getattr(metrics, name))
    assert found.entropy is None and found.log_sum_of_squares is None
    few = fused_linear_log_probs(hidden, weight, labels, bias=bias, metrics=False, implementation=implementation)
    assert few.max_logit is None and few.predicted_tokens is None


def test_what_has_no_gradient_passes_none(rng):
    labels, (hidden, weight, _) = labels_of(rng), arrays(rng)

    def others(hidden):
        found = fused_linear_log_probs(hidden, weight, labels, entropy=True)
        return sum(jnp.sum(x) for x in (found.log_normalizer, found.max_logit, found.log_sum_of_squares))

    assert not np.any(jax.grad(others)(hidden))


# --- selected tokens --------------------------------------------------------------------------------------------------

SELECTED = jnp.array([7, 0, 52, 7])


@all_options
def test_log_probs_of_selected_tokens_and_their_gradients_are_exact(options, rng):
    """With labels beside them, tokens that do not count and hold NaN, and a token that is selected twice."""
    labels, arrays_, dead = labels_of(rng).at[3].set(-100), arrays(rng), np.arange(N) == 3

    def op(hidden, weight, bias):
        weight = weight.T if options.get("weight_layout") == "dv" else weight
        hidden = jnp.where(dead[:, None], jnp.nan, hidden)
        found = fused_linear_log_probs(
            hidden, weight, labels, selected_token_ids=SELECTED, bias=bias, chunk_size=16, **options
        )
        return found.log_probs, found.selected_log_probs

    def truth_of_selected(hidden, weight, bias):
        of = lambda labels: truth(jnp.full(N, labels), **options)(hidden, weight, bias)[0]
        own = truth(jnp.where(dead, 0, labels), **options)(hidden, weight, bias)[0]
        return jnp.where(dead, 0, own), jnp.where(dead[:, None], 0, jnp.stack([of(k) for k in SELECTED], axis=1))

    check_float32(op, truth_of_selected, arrays_, rng)


def test_gradients_of_a_token_selected_twice_may_cancel_in_half_precision(rng):
    """Each is thousands of times their sum. Rounded to float16 first, they would leave an error of their own size."""
    hidden, weight, bias = arrays(rng, dtype=jnp.float16)
    large = 4096.0 * (1 + rng.random(N))
    cotangents = np.zeros((N, 4), np.float32)
    cotangents[:, 0], cotangents[:, 3] = large, -large + rng.random(N)

    def total(hidden, weight, bias, ids, cotangents):
        found = fused_linear_log_probs(hidden, weight, jnp.zeros(N, jnp.int32), selected_token_ids=ids, bias=bias)
        return jnp.sum(found.selected_log_probs * cotangents)

    once = cotangents[:, :3] + [0, 0, 0]
    once[:, 0] += cotangents[:, 3]
    gradients = jax.grad(total, argnums=(1, 2))
    twice, alone = (
        gradients(hidden, weight, bias, SELECTED, cotangents),
        gradients(hidden, weight, bias, SELECTED[:3], once),
    )
    for found, expected in zip(twice, alone, strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-2, atol=2e-2)


def test_selected_tokens_add_no_array_of_the_weight_s_size(rng):
    """Their rows' gradient is added to the weight's in place."""
    hidden, weight, labels = jnp.zeros((8, 16)), jnp.zeros((4096, 16)), jnp.zeros(8, jnp.int32)

    def temporary_bytes(**options):
        def total(weight):
            found = fused_linear_log_probs(hidden, weight, labels, chunk_size=64, **options)
            return sum(jnp.sum(x) for x in (found.log_probs, found.selected_log_probs) if x is not None)

        return jax.jit(jax.grad(total)).lower(weight).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(selected_token_ids=SELECTED) < temporary_bytes() + weight.nbytes / 8


def test_selected_token_outside_the_vocabulary_is_nan_under_jit_and_an_error_before(unchecked_types, rng):
    hidden, weight, _ = arrays(rng)
    labels = labels_of(rng).at[2].set(-100)
    op = lambda ids: fused_linear_log_probs(hidden, weight, labels, selected_token_ids=ids).selected_log_probs
    found = jax.jit(op)(jnp.array([5, V, -1]))
    assert not np.any(found[2]) and np.all(np.isfinite(found[:, 0]))
    assert np.all(np.isnan(np.delete(found[:, 1:], 2, axis=0)))
    with pytest.raises(ValueError, match=r"selected_token_ids hold 53, but must be in \[0, 53\)"):
        op(jnp.array([5, V]))
    with pytest.raises(ValueError, match=r"selected_token_ids have shape \(21, 1\), but must be \(K,\)"):
        op(labels[:, None])
    with pytest.raises(TypeError, match="selected_token_ids have dtype float32, but must be integers"):
        op(jnp.ones(2))


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_tokens_that_do_not_count_are_zero_whatever_they_hold(implementation, rng):
    hidden, weight, bias = arrays(rng)
    labels, where = labels_of(rng).at[3].set(-100), jnp.ones(N, bool).at[5].set(False)
    hidden = hidden.at[3].set(jnp.inf).at[5].set(jnp.nan)

    def run(hidden, weight, bias):
        found = fused_linear_log_probs(
            hidden, weight, labels, selected_token_ids=SELECTED, bias=bias, where=where, entropy=True,
            implementation=implementation,
        )  # fmt: skip
        of_selected = jnp.sum(jnp.cos(found.selected_log_probs))
        return jnp.sum(found.log_probs) + jnp.sum(entropy_of(found)) + of_selected, found

    (_, found), gradients = jax.jit(jax.value_and_grad(run, (0, 1, 2), has_aux=True))(hidden, weight, bias)
    for name, x in vars(found).items():
        np.testing.assert_array_equal(x[jnp.array([3, 5])], -1 if name == "predicted_tokens" else 0, name)
    assert not np.any(gradients[0][jnp.array([3, 5])])
    assert all(np.all(np.isfinite(x)) for x in gradients)


def test_label_outside_the_vocabulary_is_nan_under_jit_and_an_error_before(rng):
    hidden, weight, _ = arrays(rng)
    labels = labels_of(rng).at[2].set(V).at[4].set(-1)
    op = lambda hidden, labels: fused_linear_log_probs(hidden, weight, labels).log_probs
    rows, gradient = jax.jit(lambda h, y: (op(h, y), jax.grad(lambda h: jnp.sum(op(h, y)))(h)))(hidden, labels)
    for x in (rows, gradient):
        assert np.all(np.isnan(x[jnp.array([2, 4])])) and np.all(np.isfinite(np.delete(x, [2, 4], axis=0)))
    with pytest.raises(ValueError, match=r"labels hold 53, but must be in \[0, 53\)"):
        op(hidden, labels)


def test_leading_axes_are_tokens(rng):
    hidden, weight, _ = arrays(rng)
    labels = labels_of(rng)
    flat = fused_linear_log_probs(hidden, weight, labels, entropy=True)
    shaped = fused_linear_log_probs(hidden.reshape(3, 7, D), weight, labels.reshape(3, 7), entropy=True)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y.reshape(N)), flat, shaped)


# --- cost -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entropy", [False, True])
def test_it_takes_four_products_and_only_those_that_are_asked_for(entropy, rng):
    hidden, weight, _ = arrays(rng)
    labels = labels_of(rng)

    def total(hidden, weight):
        found = fused_linear_log_probs(hidden, weight, labels, entropy=entropy)
        return jnp.sum(found.log_probs) + (jnp.sum(entropy_of(found)) if entropy else 0.0)

    count = lambda f: jax.jit(f).lower(hidden, weight).as_text().count("stablehlo.dot_general")
    assert [count(f) for f in (total, *(jax.grad(total, by) for by in (0, 1, (0, 1))))] == [1, 3, 3, 4]


@pytest.mark.parametrize("entropy", [False, True])
def test_no_array_of_tokens_by_vocabulary_is_compiled(entropy):
    n, d, v = 1024, 16, 4096

    def total(hidden, weight, labels):
        found = fused_linear_log_probs(hidden, weight, labels, entropy=entropy, chunk_size=512)
        return jnp.sum(found.log_probs) + (jnp.sum(entropy_of(found)) if entropy else 0.0)

    arguments = jnp.zeros((n, d)), jnp.zeros((v, d)), jnp.zeros(n, jnp.int32)
    text = jax.jit(jax.grad(total, (0, 1))).lower(*arguments).compile().as_text() or ""
    assert "[1024,512]" in text
    assert "[1024,4096]" not in text


def test_an_entropy_that_is_only_looked_at_costs_no_gradient_work(rng):
    labels, (hidden, weight, _) = labels_of(rng), arrays(rng)

    def backward(entropy, is_differentiated=False):
        """The operations of the gradient by hidden, once the values are there."""

        def values(hidden):
            found = fused_linear_log_probs(hidden, weight, labels, entropy=entropy)
            return found.log_probs + (entropy_of(found) if is_differentiated else 0.0)

        pullback = jax.vjp(values, hidden)[1]
        text = jax.jit(pullback).lower(jnp.ones(N)).as_text()
        return text.count("stablehlo.")

    assert backward(entropy=True) == backward(entropy=False) < backward(entropy=True, is_differentiated=True)


# --- transformations and meshes ---------------------------------------------------------------------------------------


def test_vmap_over_heads_equals_each_by_itself(implementation, rng):
    check_vmap(differentiable(labels_of(rng), implementation=implementation), arrays(rng), rng)


def test_float16_gradients_survive_a_loss_scale(rng):
    hidden, weight, bias = arrays(rng, dtype=jnp.float16)
    labels = labels_of(rng)
    total = lambda xs, scale: scale * sum(jnp.sum(x) for x in differentiable(labels)(*xs)) / 2.0**20
    gradients = jax.jit(jax.grad(total))([hidden, weight, bias], 2.0**20)
    assert all(x.dtype == jnp.float16 and np.any(x) and np.all(np.isfinite(x)) for x in gradients)


@pytest.mark.parametrize("check_vma", [True, False])
def test_sharded_vocabulary_equals_the_whole_one(check_vma, devices, rng):
    """The last of four shards is forbidden by a bias of −inf."""
    mesh = jax.sharding.Mesh(devices, ("shard",))
    hidden, weight, bias = arrays(rng, v=64)
    bias = bias.at[48:].set(-jnp.inf)
    labels = labels_of(rng, v=48).at[1].set(-100)
    split, same = PartitionSpec("shard"), PartitionSpec()
    factors = [jnp.asarray(rng.standard_normal(N), jnp.float32) for _ in range(2)]

    def total(hidden, weight, bias, sharded):
        def local(hidden, weight, bias):
            axis = "shard" if sharded else None
            return fused_linear_log_probs(
                hidden, weight, labels, selected_token_ids=SELECTED, bias=bias, entropy=True, vocab_axis=axis
            )

        specs = (same, split, split)
        mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=same, check_vma=check_vma)
        found = (mapped if sharded else local)(hidden, weight, bias)
        of_selected = jnp.sum(jnp.cos(found.selected_log_probs[:, jnp.array([0, 1, 3])]))  # 52 is forbidden
        found = dataclasses.replace(found, selected_log_probs=found.selected_log_probs.at[:, 2].set(0))
        pairs = zip(factors, (found.log_probs, entropy_of(found)), strict=True)
        return sum(jnp.sum(f * x) for f, x in pairs) + of_selected, found

    run = lambda sharded: jax.jit(
        jax.value_and_grad(functools.partial(total, sharded=sharded), (0, 1, 2), has_aux=True)
    )
    (_, expected), expected_gradients = run(False)(hidden, weight, bias)
    (_, found), gradients = run(True)(hidden, weight, bias)
    errors = jax.tree.map(largest_error, (vars(found), gradients), (vars(expected), expected_gradients))
    assert max(jax.tree.leaves(errors)) < 2e-5, errors


@pytest.mark.parametrize("head", [PartitionSpec(None, "data"), PartitionSpec("model", None)], ids=str)
def test_tokens_on_an_explicit_mesh_stay_where_they_are(head, devices, rng):
    axis_types = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, len(devices) // 2), ("data", "model"), axis_types=axis_types, devices=devices)
    hidden, weight, bias = arrays(rng, n=8, d=16, v=64)
    labels = labels_of(rng, n=8, v=64)
    tokens = NamedSharding(mesh, PartitionSpec("data"))

    def total(hidden, weight, bias, labels):
        found = fused_linear_log_probs(hidden, weight, labels, selected_token_ids=SELECTED, bias=bias, entropy=True)
        of_selected = jnp.sum(jnp.cos(found.selected_log_probs))
        return jnp.sum(found.log_probs) + jnp.sum(entropy_of(found)) + of_selected, found

    run = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))
    (_, expected), expected_gradients = run(hidden, weight, bias, labels)
    placed = (
        jax.device_put(hidden, NamedSharding(mesh, PartitionSpec("data", None))),
        jax.device_put(weight, NamedSharding(mesh, head)),
        jax.device_put(bias, NamedSharding(mesh, PartitionSpec(head[0]))),
        jax.device_put(labels, tokens),
    )
    with jax.set_mesh(mesh):
        (_, found), gradients = run(*placed)
    assert found.log_probs.sharding.is_equivalent_to(tokens, 1)
    errors = jax.tree.map(largest_error, (vars(found), gradients), (vars(expected), expected_gradients))
    assert max(jax.tree.leaves(errors)) < 2e-5, errors


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong, error, message",
    [
        (dict(temperature=0.0), ValueError, "temperature=0.0 must be finite and > 0; 1.0 leaves the logits"),
        (dict(temperature=jnp.ones(())), TypeError, "temperature is a .*must be a Python number"),
        (dict(logit_softcap=-1.0), ValueError, "logit_softcap=-1.0 must be finite and > 0"),
        (dict(weight_layout="dd"), ValueError, "weight_layout='dd' is unknown"),
        (dict(labels=jnp.zeros(3, jnp.int32)), ValueError, r"labels has shape \(3,\), but must have shape \(21,\)"),
        (dict(implementation="magic"), ValueError, "implementation='magic' is unknown"),
        (dict(chunk_size=0), ValueError, "chunk_size=0 must be a Python int of at least 1"),
    ],
)
def test_wrong_arguments_are_refused(wrong, error, message, unchecked_types, rng):
    hidden, weight, _ = arrays(rng)
    given = dict(hidden=hidden, weight=weight, labels=labels_of(rng)) | wrong
    with pytest.raises(error, match=f"^fused_linear_log_probs: {message}"):
        fused_linear_log_probs(**given)
