"""fused_linear_token_loss: any loss of a token's log-probability, with three products and no logits in memory."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from liger_jax import fused_linear_cross_entropy, fused_linear_log_probs, fused_linear_token_loss, losses
from liger_jax.ops.linear.fused_linear_token_loss import _TokenLoss
from liger_jax.ops.linear.plan import choose_mode
from liger_jax.ops.linear.problem import problem_of
from liger_jax.ops.place import Place
from liger_jax.pallas_kernels.cross_entropy.config import LogitOptions
from liger_jax.pallas_kernels.fused_linear_cross_entropy.config import LinearOptions
from tests.ops._oracle import check_float32, check_half, largest_error
from tests.ops.references import linear_cross_entropy as reference

N, D, V = 21, 19, 53
BETA, BONUS, EPSILON = 0.1, 0.05, 0.2
OPTIONS = {
    "plain": {},
    "every option": dict(logit_softcap=4.0, logit_scale=0.7, temperature=1.3, weight_layout="dv"),
}
all_modes = pytest.mark.parametrize("mode", ["fast", "lean"])
all_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def heads(rng, n=N, d=D, v=V, dtype=jnp.float32):
    shapes = (n, d), (v, d), (v,)
    return [jnp.asarray(factor * rng.standard_normal(s), dtype) for s, factor in zip(shapes, (1, 0.7, 1), strict=True)]


def labels_of(rng, n=N, v=V):
    return jnp.asarray(rng.integers(0, v, n))


def tokens_of(rng, head, labels, **options):
    """Old and reference log-probabilities, near the policy's, and advantages."""
    hidden, weight, bias = head
    weight = weight.T if options.get("weight_layout") == "dv" else weight
    log_probs = fused_linear_log_probs(hidden, weight, labels, bias=bias, **options).log_probs
    near = lambda: jnp.asarray(log_probs + 0.3 * rng.standard_normal(labels.shape), jnp.float32)
    # Of both signs, and of a sum that is far from 0, by which errors are divided.
    return near(), near(), jnp.asarray(rng.uniform(-0.5, 1.5, labels.shape), jnp.float32)


def dapo(log_prob, old, ref, advantage):
    return losses.policy_token_loss(log_prob, old, advantage, ref, beta=BETA, epsilon_low=EPSILON)


def dapo_by_hand(log_prob, old, ref, advantage):
    """The paper's formula, with TRL's unbiased penalty."""
    ratio = jnp.exp(log_prob - old)
    surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - EPSILON, 1 + EPSILON) * advantage)
    return -surrogate + BETA * ratio * (jnp.exp(ref - log_prob) - (ref - log_prob) - 1)


def op_and_truth(labels, entropy, scale_by_c=True, **options):
    """The loss of hidden, weight, bias, old, reference, advantages and a value c that the loss closes over."""

    def op(hidden, weight, bias, old, ref, advantage, c):
        def loss_fn(log_prob, *rest):
            entropy_part = -BONUS * rest[0] if entropy else jnp.zeros(())
            return c * dapo_by_hand(log_prob, *rest[-3:]) + entropy_part

        weight = weight.T if options.get("weight_layout") == "dv" else weight
        per_token = old, ref, advantage
        return fused_linear_token_loss(
            loss_fn, hidden, weight, labels, per_token, denominator=7.0, entropy=entropy, bias=bias, **options
        )[0]

    def truth(hidden, weight, bias, old, ref, advantage, c):
        scale = options.get("logit_scale", 1.0) / options.get("temperature", 1.0)
        log_probs, entropies, _ = reference.linear_log_probs(
            hidden, weight, labels, bias, scale, options.get("logit_softcap")
        )
        bonus = BONUS * jnp.sum(entropies) if entropy else 0.0
        return (c * jnp.sum(dapo_by_hand(log_probs, old, ref, advantage)) - bonus) / 7.0

    return op, truth


# --- values and gradients ---------------------------------------------------------------------------------------------


@all_modes
@all_options
@pytest.mark.parametrize("entropy", [False, True], ids=["", "entropy"])
def test_a_policy_loss_has_exact_gradients_by_all_that_it_reads(options, entropy, mode, rng):
    labels, head = labels_of(rng), heads(rng)
    tokens = tokens_of(rng, head, labels, **options)
    op, truth = op_and_truth(labels, entropy, mode=mode, chunk_size=8 if mode == "fast" else 16, **options)
    check_float32(op, truth, [*head, *tokens, jnp.float32(1.7)], rng)


def test_kernels_make_it_too(implementation, rng):
    labels, head = labels_of(rng), heads(rng)
    tokens = tokens_of(rng, head, labels)
    op, truth = op_and_truth(labels, True, implementation=implementation)
    check_float32(op, truth, [*head, *tokens, jnp.float32(1.7)], rng)


@all_modes
def test_half_precision_is_as_exact_as_plain_jax(mode, rng):
    labels, head = labels_of(rng), heads(rng, dtype=jnp.bfloat16)
    old, ref, advantage = tokens_of(rng, head, labels)

    def op(hidden, weight, bias):
        per_token = old, ref, advantage
        return fused_linear_token_loss(
            dapo, hidden, weight, labels, per_token, denominator=7.0, bias=bias, mode=mode, chunk_size=16
        )[0]

    def plain(hidden, weight, bias):
        log_p = jax.nn.log_softmax((hidden @ weight.T + bias[None, :]).astype(jnp.float32), axis=1)
        return jnp.sum(dapo_by_hand(log_p[jnp.arange(N), labels], old, ref, advantage)) / 7.0

    def truth(hidden, weight, bias):
        log_probs = reference.linear_log_probs(hidden, weight, labels, bias, 1.0, None)[0]
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (old, ref, advantage)]
        return jnp.sum(dapo_by_hand(log_probs, *wide)) / 7.0

    check_half(op, plain, truth, head, rng)


@all_modes
def test_the_cross_entropy_is_the_case_of_minus_log_prob(mode, rng):
    labels, (hidden, weight, _) = labels_of(rng).at[4].set(-100), heads(rng)
    run = lambda f: jax.jit(jax.value_and_grad(f, (0, 1)))(hidden, weight)
    found = run(lambda h, w: fused_linear_token_loss(jnp.negative, h, w, labels, denominator=N - 1, mode=mode)[0])
    expected = run(lambda h, w: fused_linear_cross_entropy(h, w, labels, mode=mode))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), found, expected)


@all_modes
def test_a_loss_may_be_a_constant(mode, rng):
    loss = lambda hidden: fused_linear_token_loss(
        lambda log_prob: 2.0, hidden, heads(rng)[1], labels_of(rng), denominator=1, mode=mode
    )[0]
    value, gradient = jax.value_and_grad(loss)(heads(rng)[0])
    assert value > 0 and not gradient.any()


@all_modes
def test_integers_are_read_and_closed_over(mode, rng):
    labels, (hidden, weight, _) = labels_of(rng), heads(rng)
    kind = jnp.asarray(rng.integers(0, 2, N))

    def total(hidden, step, kind):
        def loss_fn(log_prob, kind):
            return jnp.where(kind == 1, -log_prob, jnp.zeros(())) * step.astype(jnp.float32)

        return fused_linear_token_loss(loss_fn, hidden, weight, labels, (kind,), denominator=1, mode=mode)[0]

    expected = jax.grad(lambda h: -3.0 * jnp.sum(fused_linear_log_probs(h, weight, labels, where=kind == 1).log_probs))

    def body(carry, step):
        return carry + jax.grad(total)(hidden, step, kind), None

    found = jax.lax.scan(body, jnp.zeros_like(hidden), jnp.array([1, 2]))[0]
    assert largest_error(found, expected(hidden)) < 1e-5


@all_modes
def test_the_parts_of_the_loss_are_there_without_gradient(mode, rng):
    labels, head = labels_of(rng).at[2].set(-100), heads(rng)
    tokens = tokens_of(rng, head, labels)
    hidden, weight, bias = head
    with_bonus = lambda log_prob, entropy, *rest: dapo(log_prob, *rest) - BONUS * entropy
    op = functools.partial(fused_linear_token_loss, with_bonus, denominator=4, entropy=True, bias=bias, mode=mode)
    loss, of_tokens = op(hidden, weight, labels, tokens)
    found = fused_linear_log_probs(hidden, weight, labels, bias=bias, entropy=True)
    assert of_tokens.entropy is not None and found.entropy is not None
    for x, y in ((of_tokens.log_probs, found.log_probs), (of_tokens.entropy, found.entropy)):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jnp.sum(of_tokens.losses) / 4, loss, rtol=1e-5)
    expected = dapo_by_hand(found.log_probs, *tokens) - BONUS * found.entropy
    np.testing.assert_allclose(of_tokens.losses, expected.at[2].set(0.0), rtol=1e-4, atol=1e-5)
    parts = jax.grad(lambda h: sum(jnp.sum(x) for x in jax.tree.leaves(op(h, weight, labels, tokens)[1])))
    assert not np.any(parts(hidden))


# --- tokens -----------------------------------------------------------------------------------------------------------


@all_modes
def test_tokens_that_do_not_count_have_no_effect_whatever_they_hold(mode, rng):
    labels, where = labels_of(rng).at[3].set(-100), jnp.ones(N, bool).at[5].set(False)
    hidden, weight, _ = heads(rng)
    hidden, odd = hidden.at[3].set(jnp.inf).at[5].set(jnp.nan), jnp.array([3, 5])
    values = jnp.asarray(rng.uniform(0.5, 1, N), jnp.float32)

    def total(hidden, weight, values, c):
        loss_fn = lambda log_prob, x: -c * jnp.log(x) * log_prob  # at 0 its derivative is infinite
        return fused_linear_token_loss(
            loss_fn, hidden, weight, labels, (values,), denominator=1, where=where, mode=mode, chunk_size=8
        )

    run = jax.jit(jax.value_and_grad(total, (0, 1, 2, 3), has_aux=True))
    expected = run(jnp.where(jnp.isfinite(hidden), hidden, 0.0), weight, values, 2.0)
    for at_odd in (0.0, jnp.nan):
        (loss, of_tokens), gradients = run(hidden, weight, values.at[odd].set(at_odd), 2.0)
        assert not any(np.any(x[odd]) for x in (gradients[0], gradients[2], of_tokens.losses, of_tokens.log_probs))
        jax.tree.map(np.testing.assert_array_equal, (loss, gradients), (expected[0][0], expected[1]))
        assert all(np.all(np.isfinite(x)) for x in gradients)


@all_modes
def test_no_tokens_are_a_loss_of_zero(mode, rng):
    hidden, weight, _ = heads(rng, n=0)

    def total(hidden, weight, factor):
        loss_fn = lambda log_prob, advantage: factor * advantage * log_prob
        advantage, options = jnp.ones(0), dict(denominator=1, mode=mode)
        return fused_linear_token_loss(loss_fn, hidden, weight, labels_of(rng, 0), (advantage,), **options)[0]

    loss, gradients = jax.jit(jax.value_and_grad(total, (0, 1, 2)))(hidden, weight, jnp.ones(()))
    assert loss == 0 and all(jnp.all(g == 0) for g in gradients)


@all_modes
def test_label_outside_the_vocabulary_is_nan_under_jit_and_an_error_before(mode, rng):
    hidden, weight, _ = heads(rng)
    labels = labels_of(rng).at[2].set(V)
    total = lambda h, y: fused_linear_token_loss(jnp.negative, h, weight, y, denominator=1, mode=mode)[0]
    loss, gradient = jax.jit(jax.value_and_grad(total))(hidden, labels)
    assert np.isnan(loss) and np.all(np.isnan(gradient[2])) and np.all(np.isfinite(np.delete(gradient, 2, axis=0)))
    with pytest.raises(ValueError, match=r"labels hold 53, but must be in \[0, 53\)"):
        total(hidden, labels)


def test_nothing_that_a_loss_closes_over_outlives_its_call(rng, monkeypatch):
    """Neither a traced value nor an array. (Mode lean hands no function to a kernel.)"""
    hidden, weight, _ = heads(rng)
    made, make = [], _TokenLoss.__init__

    def init(self, *arguments, **options):
        made.append(weakref.ref(self))
        make(self, *arguments, **options)

    monkeypatch.setattr(_TokenLoss, "__init__", init)

    def run(factor):
        def total(hidden, shift):
            return fused_linear_token_loss(
                lambda log_prob: factor[0] * log_prob + shift, hidden, weight, jnp.arange(N), denominator=1, mode="fast"
            )[0]

        jax.jit(jax.grad(total))(hidden, 1.0)
        return weakref.ref(factor)

    gc.freeze()  # what other tests have left is not searched: only what is made here
    try:
        with jax.checking_leaks():
            factor = run(jnp.full(1000, 2.0))
        gc.collect()
    finally:
        gc.unfreeze()
    assert made and not any(loss() for loss in made)
    assert factor() is None


@all_modes
def test_numbers_of_sequences_are_those_of_their_tokens(mode, rng):
    hidden, weight, _ = heads(rng)
    labels, advantage = labels_of(rng).reshape(3, 7), jnp.asarray(rng.standard_normal((3, 1)), jnp.float32)

    def total(hidden, advantage):
        weighted = lambda log_prob, advantage: -advantage * log_prob
        return fused_linear_token_loss(weighted, hidden, weight, labels, (advantage,), denominator=2, mode=mode)[0]

    run = jax.jit(jax.value_and_grad(total, (0, 1)))
    loss, (by_hidden, by_advantage) = run(hidden.reshape(3, 7, D), advantage)
    expected, (_, by_tokens) = run(hidden.reshape(3, 7, D), jnp.broadcast_to(advantage, (3, 7)))
    assert by_advantage.shape == (3, 1)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(by_advantage, jnp.sum(by_tokens, axis=1, keepdims=True), rtol=1e-5)


# --- cost -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("mode, products", [("fast", [1, 2, 2, 3]), ("lean", [1, 3, 3, 4])])
def test_fast_takes_three_products_and_lean_four(mode, products, entropy, rng):
    labels, (hidden, weight, _) = labels_of(rng), heads(rng)
    loss_fn = (lambda log_prob, entropy: -log_prob - entropy) if entropy else jnp.negative

    def total(hidden, weight):
        return fused_linear_token_loss(
            loss_fn, hidden, weight, labels, denominator=1, entropy=entropy, mode=mode, chunk_size=V
        )[0]

    count = lambda f: jax.jit(f).lower(hidden, weight).as_text().count("stablehlo.dot_general")
    assert [count(f) for f in (total, *(jax.grad(total, by) for by in (0, 1, (0, 1))))] == products


def test_auto_is_fast_but_with_entropies_on_hopper(rng):
    """Its kernels keep no logits, so entropies cannot be computed from them."""
    hidden, weight = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1024, 128), (512, 128)))
    h100 = Place(jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", 132, platform="gpu"))

    def mode_of(entropy, implementation=None, mode="auto"):
        linear = LinearOptions(LogitOptions(entropy=entropy), "vd", None, mode, 0)
        problem = problem_of(
            "op", hidden, weight, options=linear, not_fast_because=None, place=h100, implementation=implementation
        )
        return problem.kernels, choose_mode(problem)

    assert mode_of(False) == ("mosaic_gpu", "fast") and mode_of(True) == ("mosaic_gpu", "lean")
    assert mode_of(True, mode="fast") == ("xla", "fast")
    with pytest.raises(ValueError, match="its mode='fast' keeps no logits to make entropies of; use mode='lean'"):
        mode_of(True, "mosaic_gpu", "fast")


# --- meshes -----------------------------------------------------------------------------------------------------------


def test_sharded_vocabulary_equals_the_whole_one(devices, rng):
    mesh = jax.sharding.Mesh(devices, ("shard",))
    head = heads(rng, v=64)
    labels = labels_of(rng, v=64).at[1].set(-100)
    tokens = tokens_of(rng, head, labels)

    def total(hidden, weight, bias, advantage, sharded):
        def local(hidden, weight, bias, advantage):
            with_bonus = lambda log_prob, entropy, *rest: dapo(log_prob, *rest) - BONUS * entropy
            axis = "shard" if sharded else None
            per_token = *tokens[:2], advantage
            return fused_linear_token_loss(
                with_bonus, hidden, weight, labels, per_token, denominator=2, entropy=True, bias=bias, vocab_axis=axis
            )[0]

        specs = (P(), P("shard"), P("shard"), P())
        mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())
        return (mapped if sharded else local)(hidden, weight, bias, advantage)

    run = lambda sharded: jax.jit(jax.value_and_grad(functools.partial(total, sharded=sharded), (0, 1, 2, 3)))
    errors = jax.tree.map(largest_error, *(run(sharded)(*head, tokens[2]) for sharded in (True, False)))
    assert max(jax.tree.leaves(errors)) < 2e-5, errors


def clipped(log_prob, old, ref, advantage, c):
    return c * losses.policy_token_loss(log_prob, old, advantage, ref, beta=BETA, epsilon_low=EPSILON, delta=3.0)


def chosen(log_prob, old, ref, advantage, c):
    """With constants in a choice, in a loop and in a function that has its own derivative."""
    looped = jax.lax.fori_loop(0, 2, lambda _, x: 0.5 * x + log_prob, ref)
    return jnp.where(log_prob > old, jax.nn.relu(looped + 6.0), c) * advantage


@pytest.mark.parametrize(
    "loss_fn, mode, axis, c_varies",
    [
        (clipped, "fast", None, False),
        (clipped, "lean", "vocabulary", False),
        pytest.param(clipped, "fast", None, True, marks=pytest.mark.full),
        pytest.param(chosen, "fast", None, False, marks=pytest.mark.full),
        pytest.param(chosen, "lean", None, True, marks=pytest.mark.full),
        pytest.param(chosen, "lean", "vocabulary", False, marks=pytest.mark.full),
    ],
)
def test_constants_of_a_loss_vary_as_its_arguments_do(loss_fn, mode, axis, c_varies, devices, rng):
    """Inside shard_map with check_vma, forward and gradients; `c` is what the function closes over."""
    if len(devices) < 4:
        pytest.skip("a mesh of two axes takes four devices")
    mesh = jax.sharding.Mesh(np.reshape(devices[:4], (2, 2)), ("data", "vocabulary"))
    head, labels = heads(rng, n=8, v=64), labels_of(rng, n=8, v=64).at[1].set(-100)
    tokens, denominator, c = tokens_of(rng, head, labels), jnp.float32(7.0), jnp.full((2,), 0.7)

    def total(hidden, weight, bias, tokens, c, denominator, sharded):
        def local(hidden, weight, bias, labels, tokens, c, denominator):
            of_token = lambda *numbers: loss_fn(*numbers, c[0])
            options = dict(bias=bias, denominator=denominator, mode=mode, vocab_axis=axis if sharded else None)
            loss = fused_linear_token_loss(of_token, hidden, weight, labels, tokens, **options)[0]
            return jax.lax.psum(loss, "data") if sharded else loss

        rows = P("data")
        specs = rows, P(axis), P(axis), rows, (rows,) * 3, rows if c_varies else P(), P()
        mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())
        return (mapped if sharded else local)(hidden, weight, bias, labels, tokens, c, denominator)

    run = lambda sharded: jax.jit(jax.value_and_grad(functools.partial(total, sharded=sharded), range(6)))
    found, expected = (run(sharded)(*head, tokens, c, denominator) for sharded in (True, False))
    found, expected = ((loss, (*grads[:4], jnp.sum(grads[4]), grads[5])) for loss, grads in (found, expected))
    errors = jax.tree.map(largest_error, found, expected)
    assert max(jax.tree.leaves(errors)) < 2e-5, errors


@pytest.mark.parametrize("name", ["denominator", "value 0 that loss_fn closes over"])
def test_what_a_loss_reads_is_the_same_on_all_shards_of_a_vocabulary(name, devices, rng):
    mesh = jax.sharding.Mesh(devices[:2], ("shard",))
    hidden, weight, _ = heads(rng, v=64)

    def local(weight):
        own = weight[0, 0]
        denominator, c = (own, 1.0) if name == "denominator" else (1, own)
        loss_fn = lambda log_prob: c * log_prob
        return fused_linear_token_loss(
            loss_fn, hidden, weight, labels_of(rng, v=64), denominator=denominator, vocab_axis="shard"
        )[0]

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("shard"), out_specs=P())
    with pytest.raises(ValueError, match=f"^fused_linear_token_loss: {name} varies over vocab_axis='shard'"):
        mapped(weight)


@all_modes
def test_tokens_on_an_explicit_mesh_stay_where_they_are(mode, devices, rng):
    mesh = jax.sharding.Mesh(devices[:2], ("data",), axis_types=(AxisType.Explicit,))
    hidden, weight, bias = heads(rng, n=8, d=16, v=64)
    labels = labels_of(rng, n=8, v=64)
    tokens = tokens_of(rng, [hidden, weight, bias], labels)

    def total(hidden, weight, c, labels, per_token):
        loss_fn = lambda log_prob, *rest: c * dapo(log_prob, *rest)
        return fused_linear_token_loss(loss_fn, hidden, weight, labels, per_token, denominator=5, mode=mode)

    run = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))
    expected = run(hidden, weight, jnp.float32(1.5), labels, tokens)
    over = lambda x: jax.device_put(x, NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        arguments = over(hidden), over(weight), jnp.float32(1.5), over(labels), jax.tree.map(over, tokens)
        (loss, of_tokens), gradients = run(*arguments)
    assert of_tokens.losses.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 1)
    errors = jax.tree.map(
        largest_error, ((loss, vars(of_tokens)), gradients), ((expected[0][0], vars(expected[0][1])), expected[1])
    )
    assert max(jax.tree.leaves(errors)) < 2e-5, errors


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong, error, message",
    [
        (dict(per_token=jnp.ones(N)), TypeError, r"per_token is a \w+, but must be a tuple of arrays: \(x,\)"),
        (
            dict(per_token=(jnp.ones(3),)),
            ValueError,
            r"per_token\[0\] has shape \(3,\), but must broadcast to .*\(21,\)",
        ),
        (dict(loss_fn=lambda x: x > 0), ValueError, r"loss_fn returns \[\(\(\), 'bool'\)\] .*one float of shape \(\)"),
        (dict(loss_fn=lambda x: x + jnp.ones(N)), ValueError, r"loss_fn returns .*\(21,\).* as per_token"),
        (dict(denominator=jnp.ones(2)), ValueError, r"denominator has shape \(2,\), but must have shape \(\)"),
        (dict(temperature=0.0), ValueError, "temperature=0.0 must be finite and > 0"),
        (dict(mode="slow"), ValueError, "mode='slow' is unknown"),
        (dict(vocab_axis="x"), ValueError, "vocab_axis='x' must be an axis of the mesh of a jax.shard_map"),
    ],
)
def test_wrong_arguments_are_refused(wrong, error, message, unchecked_types, rng):
    hidden, weight, _ = heads(rng)
    given = dict(loss_fn=jnp.negative, hidden=hidden, weight=weight, labels=labels_of(rng), denominator=1) | wrong
    with pytest.raises(error, match=f"^fused_linear_token_loss: {message}"), jax.numpy_rank_promotion("allow"):
        fused_linear_token_loss(**given)
