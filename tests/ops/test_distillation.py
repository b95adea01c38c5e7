"""The fused distillation losses: exact in every mode, without a buffer of all logits, for every head."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax import fused_linear_distillation, fused_linear_topk_distillation
from tests._devices import temporary_bytes
from tests.ops._oracle import TOLERANCE, check_float32, check_half, first, largest_error, normal, rms_error
from tests.ops.references import distillation as reference

N, D, E, V, K = 37, 24, 40, 101, 7
OF_DISTRIBUTIONS = ("forward_kl", "reverse_kl", "jsd", "tvd")
DIVERGENCES = (*OF_DISTRIBUTIONS, "cosine")
MODES = ("fast", "lean")
LEAN_IN_FULL = ["fast", pytest.param("lean", marks=pytest.mark.full)]
TEMPERATURE, BETA = 1.7, 0.3


def heads(rng, n=N, v=V, dtype=jnp.float32, size=1.0):
    """Hidden states, weight and bias of the student, then of the teacher; random normal."""
    student = normal(rng, (n, D), (v, D), (v,), dtype=dtype)
    teacher = normal(rng, (n, E), (v, E), (v,), dtype=dtype)
    return [size * x for x in student], [size * x for x in teacher]


def scored(rng, n=N, v=V):
    labels = rng.integers(0, v, n).astype(np.int32)
    labels[[3, n // 2]] = -100
    where = rng.random(n) > 0.2
    return labels, where, where & (labels != -100)


def reduced(losses, counts, reduction):
    losses = jnp.where(counts, losses, 0.0)
    if reduction == "none":
        return losses
    return jnp.sum(losses) / (float(np.sum(counts)) if reduction == "mean" else 1.0)


def distillation_cases(rng, kind, hard_weight, reduction, mode, dtype=jnp.float32):
    """The op, its oracle, and what both are differentiated by."""
    student, teacher = heads(rng, dtype=dtype)
    labels, where, counts = scored(rng)
    temperature = 1.0 if kind == "cosine" else TEMPERATURE
    beta = dict(beta=BETA) if kind == "jsd" else {}

    def op(hidden, weight, bias):
        return fused_linear_distillation(
            hidden, weight, teacher[0], teacher[1].T,
            divergence=kind, **beta, temperature=temperature, labels=labels, where=where, hard_weight=hard_weight,
            student_bias=bias, student_logit_softcap=5.0, student_logit_scale=1.3,
            teacher_bias=teacher[2], teacher_weight_layout="dv", teacher_logit_scale=0.5,
            reduction=reduction, mode=mode, chunk_size=10,
        )  # fmt: skip

    def oracle(hidden, weight, bias):
        cast = lambda x: jnp.asarray(x).astype(hidden.dtype)
        raw = functools.partial(reference.logits, hidden, weight, bias, scale=1.3, softcap=5.0)
        theirs = reference.logits(*map(cast, teacher), scale=0.5, temperature=temperature)
        losses = (1 - hard_weight) * reference.divergence(raw(temperature=temperature), theirs, kind=kind, beta=BETA)
        losses += hard_weight * reference.cross_entropy(raw(), jnp.maximum(labels, 0))
        return reduced(losses, counts, reduction)

    return op, oracle, student


def stored(rng, n=N, v=V, k=K):
    """The K largest of a random teacher's log-probabilities; one place is not used."""
    every = jax.nn.log_softmax(jnp.asarray(3.0 * rng.standard_normal((n, v)), jnp.float32))
    token_ids = jnp.argsort(-every, axis=1)[:, :k]
    return token_ids, jnp.take_along_axis(every, token_ids, axis=1).at[4, 3].set(-jnp.inf)


def topk_cases(rng, tail, hard_weight, reduction, mode):
    student, _ = heads(rng)
    token_ids, log_probs = stored(rng)
    labels, where, counts = scored(rng)

    def op(hidden, weight, bias):
        return fused_linear_topk_distillation(
            hidden, weight.T, token_ids, log_probs, tail=tail, temperature=TEMPERATURE, labels=labels, where=where,
            hard_weight=hard_weight, bias=bias, weight_layout="dv", logit_softcap=5.0, logit_scale=1.3,
            reduction=reduction, mode=mode, chunk_size=10,
        )  # fmt: skip

    def oracle(hidden, weight, bias):
        raw = functools.partial(reference.logits, hidden, weight, bias, scale=1.3, softcap=5.0)
        theirs = token_ids, jnp.asarray(log_probs).astype(hidden.dtype)
        losses = (1 - hard_weight) * reference.topk_divergence(raw(temperature=TEMPERATURE), *theirs, tail=tail)
        losses += hard_weight * reference.cross_entropy(raw(), jnp.maximum(labels, 0))
        return reduced(losses, counts, reduction)

    return op, oracle, student


FULL = [(0.3, "fast", "mean"), (0.0, "lean", "none"), (0.0, "lean", "mean")]
WAYS = [(0.0, "fast", "mean"), (0.3, "lean", "none"), *(pytest.param(*way, marks=pytest.mark.full) for way in FULL)]


@pytest.mark.parametrize("hard_weight, mode, reduction", WAYS)
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_every_divergence_and_its_gradients_equal_the_oracle(kind, hard_weight, mode, reduction, rng):
    check_float32(*distillation_cases(rng, kind, hard_weight, reduction, mode), rng)


@pytest.mark.parametrize("hard_weight, mode, reduction", WAYS)
@pytest.mark.parametrize("tail", ["ignore", "bucket"])
def test_stored_teachers_and_their_gradients_equal_the_oracle(tail, hard_weight, mode, reduction, rng):
    check_float32(*topk_cases(rng, tail, hard_weight, reduction, mode), rng)


@pytest.mark.parametrize("mode", LEAN_IN_FULL)
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_half_precision_is_no_worse_than_plain_jax(kind, mode, rng):
    op, oracle, student = distillation_cases(rng, kind, 0.3, "mean", mode, dtype=jnp.bfloat16)

    def plain(hidden, weight, bias):  # all in bfloat16 but the loss
        with jax.numpy_rank_promotion("allow"):
            return oracle(hidden, weight, bias).astype(jnp.float32)

    check_half(op, plain, oracle, student, rng)


@pytest.mark.parametrize("op", ["distillation", "topk"])
def test_a_loss_scale_keeps_float16_gradients(op, rng):
    """A micro-batch's share of a large batch is below float16's smallest number, unless it is scaled first."""
    student, teacher = heads(rng, size=0.5)
    token_ids, log_probs = stored(rng)

    def gradients(dtype, scale):
        def loss(hidden, weight, bias):
            if op == "topk":
                options = dict(bias=bias, denominator=2**20)
                return scale * fused_linear_topk_distillation(hidden, weight, token_ids, log_probs, **options)
            options = dict(student_bias=bias, teacher_bias=teacher[2], denominator=2**20)
            return scale * fused_linear_distillation(hidden, weight, teacher[0], teacher[1], **options)

        return jax.jit(jax.grad(loss, (0, 1, 2)))(*(x.astype(dtype) for x in student))

    for grad, truth in zip(gradients(jnp.float16, 2.0**18), gradients(jnp.float32, 1.0), strict=True):
        assert grad.dtype == jnp.float16
        assert largest_error(grad.astype(jnp.float32) / 2.0**18, truth) < 1e-2


@pytest.mark.parametrize("kind", first(1, ["jsd", "forward_kl", "cosine", "topk"]))
@pytest.mark.parametrize("mode", MODES)
def test_hopper_s_products_give_the_same(hopper, kind, mode, rng):
    """On a Hopper GPU compiled, on a CPU simulated: bfloat16, two chunks that overlap, a bias and a softcap."""
    n, d, e, v = 200, 64, 128, 320
    hidden, weight, bias, teacher, teacher_weight = normal(
        rng, (n, d), (v, d), (v,), (n, e), (v, e), dtype=jnp.bfloat16
    )
    weight, teacher_weight = weight / 8, teacher_weight / 8
    token_ids, log_probs = stored(rng, n, v)
    options = dict(mode=mode, chunk_size=128, temperature=1.0 if kind == "cosine" else 1.5)

    def loss(hidden, weight, bias, implementation):
        own = dict(options, implementation=implementation)
        if kind == "topk":
            return fused_linear_topk_distillation(
                hidden, weight, token_ids, log_probs, bias=bias, logit_softcap=5.0, **own
            )
        return fused_linear_distillation(
            hidden,
            weight,
            teacher,
            teacher_weight,
            divergence=kind,
            student_bias=bias,
            student_logit_softcap=5.0,
            **own,
        )

    run = lambda implementation: jax.value_and_grad(functools.partial(loss, implementation=implementation), (0, 1, 2))
    value, grads = run(hopper)(hidden, weight, bias)
    expected, expected_grads = run("xla")(hidden, weight, bias)
    assert largest_error(value, expected) < 1e-3
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert largest_error(grad.astype(jnp.float32), expected_grad.astype(jnp.float32)) < 2e-2  # of bfloat16


def test_hopper_s_sum_of_dw_over_chunks_is_rounded_once(hopper, rng):
    """A first chunk, one between and a last one give the bits of one product, but for a few ties."""
    n, d, v = 384, 64, 128
    hidden, weight, teacher, teacher_weight = normal(rng, (n, d), (v, d), (n, d), (v, d), dtype=jnp.bfloat16)

    def weight_gradient(chunk_size):
        options = dict(divergence="jsd", mode="fast", chunk_size=chunk_size, implementation=hopper)
        loss = functools.partial(fused_linear_distillation, **options)
        return jax.jit(jax.grad(loss, argnums=1))(hidden, weight / 8, teacher, teacher_weight / 8)

    assert np.mean(weight_gradient(128) != weight_gradient(n)) < 0.05


# --- extremes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", LEAN_IN_FULL)
@pytest.mark.parametrize("kind", OF_DISTRIBUTIONS)
def test_where_both_agree_to_the_last_bit_loss_and_gradient_are_zero(kind, mode, rng):
    (hidden, weight, _), _ = heads(rng)
    loss = lambda h, w: fused_linear_distillation(h, w, hidden, weight, divergence=kind, temperature=2.0, mode=mode)
    value, grads = jax.value_and_grad(loss, (0, 1))(hidden, weight)
    assert abs(float(value)) < 1e-6
    assert not np.any(grads[0]) and not np.any(grads[1])


@pytest.mark.parametrize("kind", OF_DISTRIBUTIONS)
def test_opposite_certainties_are_finite(kind, rng):
    """Logits of ±80: the probabilities of one are e^−160 where those of the other are 1."""
    signs = rng.choice([-80.0, 80.0], (V, 1))
    one, weight = jnp.ones((5, 1)), jnp.asarray(signs, jnp.float32)
    loss = lambda h: fused_linear_distillation(h, weight, -one, weight, divergence=kind, reduction="sum")
    value, grad = jax.jit(jax.value_and_grad(loss))(one)
    with jax.enable_x64(True):
        wide = jnp.asarray(signs)
        logits = lambda h: h @ wide.T
        one = jnp.ones((5, 1), jnp.float64)
        oracle = lambda h: jnp.sum(reference.divergence(logits(h), logits(-one), kind=kind, beta=0.5))
        expected, expected_grad = jax.jit(jax.value_and_grad(oracle))(one)
    assert largest_error(value, expected) < 1e-5
    # The gradient cancels: it is a sum of terms of 80 times up to 320.
    assert np.max(np.abs(np.asarray(grad) - np.asarray(expected_grad))) < TOLERANCE * 80 * 320


@pytest.mark.parametrize("kind", [*DIVERGENCES, "bucket", "ignore"])
def test_nan_in_either_model_is_a_loss_of_nan(kind, rng):
    hidden, teacher = (jnp.asarray(rng.standard_normal((3, D)), jnp.float32) for _ in range(2))
    weight = jnp.asarray(rng.standard_normal((V, D)), jnp.float32)

    @jax.jit
    def loss(hidden, teacher):
        if kind not in ("bucket", "ignore"):
            heads = hidden, weight, teacher, 1.1 * weight
            return fused_linear_distillation(*heads, divergence=kind, reduction="none")
        log_probs, ids = jax.lax.top_k(jax.nn.log_softmax(1.1 * teacher @ weight.T), K)
        return fused_linear_topk_distillation(hidden, weight, ids, log_probs, tail=kind, reduction="none")

    for arrays in ((hidden.at[1, 0].set(jnp.nan), teacher), (hidden, teacher.at[1, 0].set(jnp.nan))):
        assert np.isnan(loss(*arrays)).tolist() == [False, True, False]


@pytest.mark.parametrize("kind", OF_DISTRIBUTIONS)
def test_a_probability_of_zero_is_no_nan(kind):
    """Minus infinity as a bias forbids a token to the teacher, or to both."""
    hidden, weight = jnp.ones((2, 1)), jnp.zeros((4, 1))
    forbids = jnp.array([0.0, -jnp.inf, 0.0, 0.0])
    allowed = forbids if kind == "reverse_kl" else jnp.zeros(4)  # KL(p ‖ q) is infinite if only q is 0
    loss = lambda w: fused_linear_distillation(
        hidden, w, hidden, weight, divergence=kind, student_bias=allowed, teacher_bias=forbids
    )
    value, grad = jax.jit(jax.value_and_grad(loss))(weight)
    assert np.isfinite(value) and np.all(np.isfinite(grad))


def test_total_variation_between_distributions_of_one_token_pulls_nowhere(rng):
    """p and q are 1, and the sign of their difference is a rounding's."""
    arrays = [3 * x for x in normal(rng, (501, 7), (1, 7), (501, 5), (1, 5))]
    loss = lambda *arrays: fused_linear_distillation(
        *arrays, divergence="tvd", teacher_logit_scale=0.7, teacher_logit_softcap=2.0, reduction="sum"
    )
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(*arrays)
    assert max(float(jnp.max(jnp.abs(g))) for g in gradients) < 1e-2


@pytest.mark.parametrize("mode", LEAN_IN_FULL)
def test_the_cosine_of_zeros_and_of_far_logits_is_known(mode):
    """Rows: zeros, and 5e30 and 5e-30 at an angle of cosine 0.6 to the teacher's; both models forbid an entry."""
    hidden = jnp.asarray([[0.0, 0.0], [3e30, 4e30], [3e-30, 4e-30]])
    weight, forbids = jnp.eye(3, 2), jnp.array([0.0, 0.0, -jnp.inf])
    teacher = jnp.broadcast_to(jnp.array([1e25, 0.0]), (3, 2))

    def loss(hidden, teacher_bias, **options):
        biases = dict(student_bias=forbids, teacher_bias=teacher_bias)
        return fused_linear_distillation(hidden, weight, teacher, weight, divergence="cosine", **biases, **options)

    value, gradient = jax.jit(jax.value_and_grad(lambda *x: loss(*x, reduction="sum", mode=mode)))(hidden, forbids)
    np.testing.assert_allclose(value, 1.0 + 0.4 + 0.4, rtol=1e-6)
    along = np.array([0.6 * 0.6 - 1.0, 0.6 * 0.8])  # (cos · ŝ − t̂)
    np.testing.assert_allclose(gradient, np.stack([0 * along, along / 5e30, along / 5e-30]), rtol=1e-5)
    assert np.all(np.isnan(loss(hidden, jnp.zeros(3), reduction="none")))


@pytest.mark.parametrize("mode", MODES)
def test_tokens_that_do_not_count_have_no_part(mode, rng):
    (hidden, weight, _), (teacher, teacher_weight, _) = heads(rng)
    labels, where, counts = scored(rng)
    bad = jnp.where(counts[:, None], jnp.float32(0.0), jnp.nan)
    loss = functools.partial(fused_linear_distillation, divergence="jsd", hard_weight=0.5, mode=mode)

    def total(hidden, weight):
        return loss(hidden, weight, teacher + bad[:, :1], teacher_weight, labels=labels, where=where)

    value, grads = jax.jit(jax.value_and_grad(total, (0, 1)))(hidden + bad, weight)
    only = lambda h, w: loss(h, w, teacher[counts], teacher_weight, labels=labels[counts])
    expected, expected_grads = jax.jit(jax.value_and_grad(only, (0, 1)))(hidden[counts], weight)
    assert largest_error(value, expected) < 1e-6
    assert not np.any(grads[0][~counts])
    assert largest_error(grads[0][counts], expected_grads[0]) < 1e-5
    assert largest_error(grads[1], expected_grads[1]) < 1e-5


def test_no_token_that_counts_is_a_loss_of_zero(rng):
    (hidden, weight, _), (teacher, teacher_weight, _) = heads(rng)
    loss = lambda h: fused_linear_distillation(h, weight, teacher, teacher_weight, where=np.zeros(N, bool))
    value, grad = jax.jit(jax.value_and_grad(loss))(hidden)
    assert value == 0 and not np.any(grad)


@pytest.mark.parametrize("mode", MODES)
def test_a_denominator_of_zero_is_nan_only_where_a_token_counts(mode, rng):
    (hidden, weight, _), (teacher, teacher_weight, _) = heads(rng)

    def run(where):
        loss = lambda h: fused_linear_distillation(
            h, weight, teacher, teacher_weight, where=where, denominator=0, mode=mode
        )
        return jax.jit(jax.value_and_grad(loss))(hidden)

    value, grad = run(jnp.zeros(N, bool))
    assert value == 0 and not np.any(grad)
    value, grad = run(jnp.arange(N) == 2)
    assert np.isnan(value) and np.all(np.isnan(grad[2])) and not np.any(np.delete(grad, 2, axis=0))


@pytest.mark.parametrize("op, mode", [("distillation", "fast"), ("topk", "lean")])
def test_no_tokens_are_a_loss_of_zero(op, mode, rng):
    (hidden, weight, _), (teacher, teacher_weight, _) = heads(rng, n=0)
    if op == "topk":
        stored_ones = jnp.zeros((0, K), jnp.int32), jnp.zeros((0, K))
        loss = lambda h, w: fused_linear_topk_distillation(h, w, *stored_ones, mode=mode)
    else:
        loss = lambda h, w: fused_linear_distillation(h, w, teacher, teacher_weight, mode=mode)
    value, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(hidden, weight)
    assert value == 0 and grads[0].shape == (0, D) and not np.any(grads[1])


def test_a_label_outside_the_vocabulary_is_nan_under_jit(rng):
    (hidden, weight, _), (teacher, teacher_weight, _) = heads(rng)
    losses = jax.jit(
        lambda labels: fused_linear_distillation(
            hidden, weight, teacher, teacher_weight, labels=labels, hard_weight=0.5, reduction="none"
        )
    )(jnp.zeros(N, jnp.int32).at[3].set(V))
    assert np.array_equal(np.isnan(losses), np.arange(N) == 3)


@pytest.mark.parametrize("wrong", [V, -1, "twice", "probabilities"])
def test_stored_tokens_that_cannot_be_are_nan(wrong, rng):
    (hidden, weight, _), _ = heads(rng)
    token_ids, log_probs = stored(rng)
    if wrong == "probabilities":
        log_probs = log_probs.at[6].set(jnp.exp(log_probs[6]))
    else:
        token_ids = token_ids.at[6, 0].set(token_ids[6, 1] if wrong == "twice" else wrong)
    losses = fused_linear_topk_distillation(hidden, weight, token_ids, log_probs, reduction="none")
    assert np.array_equal(np.isnan(losses), np.arange(N) == 6)


def test_a_bucket_that_holds_next_to_nothing_is_exact(rng):
    """Student and teacher give e^−30 to the tokens that are not stored; 1 − Σ p would be 0 in float32."""
    z = jnp.full((1, V), -30.0).at[0, :K].set(jnp.asarray(rng.standard_normal(K), jnp.float32))
    log_probs = jax.nn.log_softmax(z[0, :K])[None]
    loss = lambda h: fused_linear_topk_distillation(
        h, jnp.eye(V), jnp.arange(K)[None], log_probs, tail="bucket", reduction="sum"
    )
    value, grad = jax.jit(jax.value_and_grad(loss))(z)
    assert abs(float(value)) < 1e-5 and np.all(np.isfinite(grad)) and np.max(np.abs(grad)) < 1e-5


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_smaller_head_has_the_float32_one_s_gradient_rounded(dtype, rng):
    """cuBLAS has no product of float32 operands that writes 16 bits."""
    (hidden, weight, _), (teacher_hidden, teacher_weight, _) = heads(rng)
    small = weight.astype(dtype)
    loss = lambda weight: fused_linear_distillation(hidden, weight, teacher_hidden, teacher_weight, reduction="sum")
    found, truth = jax.jit(jax.grad(loss))(small), jax.jit(jax.grad(loss))(small.astype(jnp.float32))
    assert found.dtype == dtype and largest_error(found, truth) < jnp.finfo(dtype).eps


def test_a_student_gives_the_bucket_less_than_float32_holds(rng):
    """p_r is about e^−200 and q_r 0.3, so the gradient by the logits of the others is −q_r p_v / p_r."""
    z = jnp.asarray(rng.standard_normal((1, V)), jnp.float32).at[0, :K].add(200.0)
    log_probs = jnp.log(0.7) + jax.nn.log_softmax(normal(rng, (1, K))[0])
    loss = lambda h: fused_linear_topk_distillation(
        h, jnp.eye(V), jnp.arange(K)[None], log_probs, tail="bucket", reduction="sum"
    )
    of_stored = jax.nn.softmax(z[0, :K]) - jnp.exp(log_probs[0])
    truth = jnp.concatenate([of_stored, -0.3 * jax.nn.softmax(z[0, K:])])
    assert largest_error(jax.jit(jax.grad(loss))(z)[0], truth) < 2e-5


@pytest.mark.parametrize("padding", [0, 4])
def test_a_bucket_is_empty_where_no_token_is_left_for_it(padding, rng):
    """All tokens are stored, but for a padding that a bias forbids. Their sum rounds to 1 − 6e-8 in some rows."""
    hidden, weight = normal(rng, (50, 4), (4 + padding, 4))
    bias = jnp.where(jnp.arange(4 + padding) < 4, 0.0, -jnp.inf)
    token_ids = jnp.broadcast_to(jnp.arange(4), (50, 4))
    log_probs = jax.nn.log_softmax(normal(rng, (50, 4))[0])

    def run(tail, log_probs=log_probs):
        loss = lambda h: jnp.sum(fused_linear_topk_distillation(h, weight, token_ids, log_probs, tail=tail, bias=bias))
        return jax.jit(jax.value_and_grad(loss))(hidden)

    (value, grad), (expected, expected_grad) = run("bucket"), run("ignore")
    assert largest_error(value, expected) < 1e-6 and largest_error(grad, expected_grad) < 1e-6
    if padding:  # a student that forbids what the teacher does not is infinitely far from it
        assert np.isinf(run("bucket", log_probs - 1e-3)[0])


# --- work and memory --------------------------------------------------------------------------------------------------


def products(f, *arrays):
    """How many matrix products a program holds, a loop's body counted once."""
    return jax.jit(f).lower(*arrays).as_text().count("stablehlo.dot_general")


@pytest.mark.parametrize("mode, of_logits", [("fast", 2), ("lean", 4)])
def test_gradients_cost_the_products_that_the_docstring_says(mode, of_logits, rng):
    (hidden, weight, _), (teacher, teacher_weight, _) = heads(rng)
    loss = lambda h, w: fused_linear_distillation(
        h, w, teacher, teacher_weight, mode=mode, chunk_size=N, divergence="jsd"
    )
    count = lambda argnums: products(jax.grad(loss, argnums), hidden, weight)
    assert products(loss, hidden, weight) == 2
    assert count(0) == 3  # a frozen head has no backward of its own
    assert count(1) == of_logits + 1
    assert count((0, 1)) == of_logits + 2
    token_ids, log_probs = stored(rng)
    topk = lambda h, w: fused_linear_topk_distillation(h, w, token_ids, log_probs, mode=mode, chunk_size=N)
    assert products(jax.grad(topk, (0, 1)), hidden, weight) == of_logits // 2 + 2


@pytest.mark.parametrize("trained", [(0, 1), (0, 1, 2)], ids=["without a bias", "with a bias"])
@pytest.mark.parametrize("op", ["distillation", "topk"])
def test_one_chunk_of_all_tokens_equals_many(op, trained, rng):
    """It makes the logits of 1,024 tokens at a time, and these chunks overlap.

    Where the bias is trained, stored tokens' entries are put in their places before its sum; otherwise at the end.
    """
    n = 1100
    (hidden, weight, bias), (teacher, teacher_weight, _) = heads(rng, n=n)
    token_ids, log_probs = stored(rng, n=n)

    def loss(hidden, weight, bias, chunk_size):
        own = dict(mode="fast", chunk_size=chunk_size)
        if op == "topk":
            return fused_linear_topk_distillation(hidden, weight, token_ids, log_probs, bias=bias, **own)
        return fused_linear_distillation(
            hidden, weight, teacher, teacher_weight, divergence="jsd", student_bias=bias, **own
        )

    run = lambda size: jax.jit(jax.value_and_grad(functools.partial(loss, chunk_size=size), trained))
    found, expected = (jax.tree.leaves(run(size)(hidden, weight, bias)) for size in (n, 256))
    for own, other in zip(found, expected, strict=True):
        assert largest_error(own, other) < TOLERANCE


@pytest.mark.parametrize("mode", MODES)
def test_no_buffer_of_all_logits_exists(mode):
    n, v = 2048, 8192
    types = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((n, D), (v, D), (n, E), (v, E))]
    loss = lambda h, w, t, u: fused_linear_distillation(h, w, t, u, divergence="jsd", mode=mode, chunk_size=64)
    compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*types).compile()
    assert f"{n},{v}]" not in str(compiled.as_text())
    assert temporary_bytes(compiled) < (2 + 2) * n * v / 3  # of both models' logits in bfloat16


def test_micro_batches_add_up_to_the_whole(rng):
    (hidden, weight, _), (teacher, teacher_weight, _) = heads(rng, n=36)
    labels, where, counts = scored(rng, n=36)
    options = dict(divergence="jsd", hard_weight=0.4)

    def part(weight, rows, **more):
        return fused_linear_distillation(
            hidden[rows],
            weight,
            teacher[rows],
            teacher_weight,
            labels=labels[rows],
            where=where[rows],
            **options,
            **more,
        )

    whole, grad = jax.value_and_grad(part)(weight, slice(None))
    parts = [jax.value_and_grad(part)(weight, slice(i, i + 12), denominator=int(np.sum(counts))) for i in (0, 12, 24)]
    assert largest_error(sum(value for value, _ in parts), whole) < 1e-6
    assert largest_error(sum(grad for _, grad in parts), grad) < 1e-5


def test_the_teacher_has_no_gradient(rng):
    (hidden, weight, _), (teacher, teacher_weight, _) = heads(rng)
    grads = jax.jit(jax.grad(lambda t, w: fused_linear_distillation(hidden, weight, t, w), (0, 1)))(
        teacher, teacher_weight
    )
    assert not np.any(grads[0]) and not np.any(grads[1])


# --- meshes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", first(2, ["jsd", "cosine", "forward_kl", "topk"]))
def test_a_split_vocabulary_equals_the_whole_one(kind, check_vma, devices, rng):
    n, v = 24, 64
    student, teacher = heads(rng, n, v)
    labels, where, _ = scored(rng, n, v)
    token_ids, log_probs = stored(rng, n, v)
    mesh = jax.sharding.Mesh(devices, ("shard",))
    split, same = jax.P("shard"), jax.P()

    def loss(student, teacher_weight, **options):
        temperature = 1.0 if kind == "cosine" else 1.3
        options |= dict(labels=labels, where=where, hard_weight=0.3, temperature=temperature, mode="lean")
        hidden, weight, bias = student
        if kind == "topk":
            return fused_linear_topk_distillation(
                hidden, weight, token_ids, log_probs, tail="bucket", bias=bias, **options
            )
        return fused_linear_distillation(
            hidden, weight, teacher[0], teacher_weight, divergence=kind, student_bias=bias, **options
        )

    sharded = jax.shard_map(
        lambda *arrays: loss(*arrays, vocab_axis="shard"),
        mesh=mesh,
        in_specs=([same, split, split], split),
        out_specs=same,
        check_vma=check_vma,
    )
    expected, expected_grads = jax.jit(jax.value_and_grad(loss))(student, teacher[1])
    value, grads = jax.jit(jax.value_and_grad(sharded))(student, teacher[1])
    assert largest_error(value, expected) < 1e-5
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert largest_error(grad, expected_grad) < 2e-5


@pytest.mark.parametrize("op", ["distillation", "topk"])
def test_vmap_is_each_element_by_itself(op, rng):
    student, teacher = heads(rng, n=12)
    token_ids, log_probs = stored(rng, n=12)

    def loss(hidden):
        if op == "topk":
            return fused_linear_topk_distillation(hidden, student[1], token_ids, log_probs, mode="lean")
        return fused_linear_distillation(hidden, student[1], teacher[0], teacher[1], divergence="jsd")

    batch = jnp.stack([student[0], -student[0]])
    found = jax.jit(jax.vmap(jax.value_and_grad(loss)))(batch)
    expected = [jax.jit(jax.value_and_grad(loss))(hidden) for hidden in batch]
    for i, (value, grad) in enumerate(expected):
        assert largest_error(found[0][i], value) < 1e-5
        # Near-equal distributions cancel: on an H100 either side is 2e-5 from float64. Another element's is off by 1.
        assert largest_error(found[1][i], grad) < 2e-4


@pytest.mark.parametrize("mode", ["fast", "lean"])
@pytest.mark.parametrize("divergence", ["tvd", *first(0, ["jsd", "reverse_kl", "forward_kl"])])
def test_likely_tokens_are_compared_by_probabilities_of_at_most_one(divergence, mode, platform, rng):
    """Logits of 9 to 15 are rounded by up to 0.03 in bfloat16. p and q, both within 0.01 of 1, must not be.

    One of the two is the surer by 2 at least, because the sign of p − q is the total variation's gradient.
    """
    n, d = 128, 64
    labels = rng.integers(0, d, n)
    size = rng.permuted(rng.uniform((9, 13), (11, 15), (n, 2)), axis=1).T[:, :, None]
    noise = lambda *shape: 0.02 * rng.standard_normal(shape)
    student, teacher = ((s * np.eye(d)[labels] + noise(n, d), np.eye(d) + noise(d, d)) for s in size)
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in (*student, *teacher)]

    def loss(hidden, weight, teacher_hidden, teacher_weight, **options):
        return fused_linear_distillation(
            hidden, weight, teacher_hidden, teacher_weight, divergence=divergence, reduction="sum", mode=mode, **options
        )

    kernels = ["xla"]
    if platform == "cpu" and jax.__version_info__ >= (0, 12):
        kernels.append("mosaic_gpu:interpret")
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [np.asarray(x, np.float64) for x in arrays]
        true = lambda h, w: jnp.sum(reference.divergence(h @ w.T, wide[2] @ wide[3].T, kind=divergence))
        truth = [np.asarray(x) for x in jax.jit(jax.grad(true, (0, 1)))(*wide[:2])]
    for kernel in kernels:
        found = jax.jit(jax.grad(functools.partial(loss, implementation=kernel), (0, 1)))(*arrays)
        for x, t in zip(found, truth, strict=True):
            assert rms_error(np.asarray(x, np.float64), t) < 0.1 * np.sqrt(np.mean(t**2))


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, text",
    [
        (dict(divergence="kl"), "divergence='kl' is unknown"),
        (
            dict(divergence="jsd", beta=0.0),
            "beta=0.0 must be in (0, 1); the limits 0 and 1 are divergence='forward_kl'",
        ),
        (dict(divergence="cosine", temperature=2.0), "temperature=2.0 changes no angle between logits"),
        (dict(temperature=0.0), "temperature=0.0 must be finite and > 0"),
        (dict(beta=0.3), "beta=0.3 is read by divergence='jsd' alone, not by 'forward_kl'; leave it out"),
        (dict(hard_weight=0.5), "weighs the cross-entropy of labels, and none are given"),
        (dict(hard_weight=1.5, labels=np.zeros(N, int)), "hard_weight=1.5 must be in [0, 1]"),
        (dict(mode="fast", reduction="none"), "makes gradients in the forward, and here the cotangent of each token"),
        (dict(denominator=3.0, reduction="sum"), "denominator is given with reduction='sum'"),
        (dict(memory_budget_bytes=10), "memory_budget_bytes=10 is too small: mode='lean' needs"),
        (dict(chunk_size=0), "chunk_size=0 must be a Python int of at least 1"),
        (dict(student_logit_softcap=-1.0), "student_logit_softcap=-1.0 must be finite and > 0"),
        (dict(teacher_weight_layout="dv"), "teacher_weight has shape (101, 40), but with teacher_weight_layout='dv'"),
        (dict(labels=np.full(N, V), hard_weight=0.5), "labels hold 101, but must be in [0, 101)"),
    ],
)
def test_bad_options_are_refused_by_name(options, text, rng):
    (hidden, weight, _), (teacher, teacher_weight, _) = heads(rng)
    with pytest.raises(ValueError, match=re.escape(text)):
        fused_linear_distillation(hidden, weight, teacher, teacher_weight, **options)


def test_vocabularies_of_different_sizes_are_refused(rng):
    (hidden, weight, _), (teacher, teacher_weight, _) = heads(rng)
    with pytest.raises(ValueError, match="the student's vocabulary has 100 entries and the teacher's 101"):
        fused_linear_distillation(hidden, weight[:-1], teacher, teacher_weight)
