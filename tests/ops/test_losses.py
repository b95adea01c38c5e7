"""What cross_entropy and fused_linear_cross_entropy promise alike: values, gradients, and what each option means."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax.pallas_kernels.cross_entropy import formulas
from liger_jax.pallas_kernels.cross_entropy.config import LogitOptions
from tests._devices import several
from tests.ops._losses import (
    CROSS_ENTROPY,
    FUSED,
    IGNORE,
    arrays,
    make_case,
    relative_error,
    rms_error,
    value_and_grad,
)
from tests.ops._oracle import first

INF, NAN = float("inf"), float("nan")
TOLERANCE = 2e-5  # share of the largest reference value, in float32 at the highest precision
ALL_OPTIONS = dict(label_smoothing=0.1, z_loss=1e-2, logit_scale=0.7, logit_softcap=5.0)
EACH_OPTION = [dict([item]) for item in ALL_OPTIONS.items()]
# (tokens, width, vocabulary): several blocks, the least of everything, and one token, class or block.
SHAPES = [(150, 130, 300), (1, 1, 1), (1, 33, 2), (5, 8, 1), (37, 19, 53)]

both_ops = pytest.mark.parametrize("op", [CROSS_ENTROPY, FUSED], ids=lambda op: op.name)
reductions = pytest.mark.parametrize("reduction", first(2, ["mean", "none", "sum"]))


def check_against_float64(op, case, rng, implementation, reduction, class_weights=True, floor=0.0, **options):
    # All of one sign: a sum that cancels would have no relative error to speak of.
    cotangents = rng.uniform(0.5, 2.0, len(case.labels)) if reduction == "none" else None
    truth, truth_grads = op.oracle(case, cotangents, class_weights=class_weights, reduction=reduction, **options)
    classes = jnp.asarray(case.class_weights, jnp.float32) if class_weights else None

    def value(inputs, token_weights):
        loss = op(
            inputs,
            jnp.asarray(case.labels),
            token_weights=token_weights,
            class_weights=classes,
            reduction=reduction,
            implementation=implementation,
            **options,
        )
        return loss if cotangents is None else jnp.sum(loss * jnp.asarray(cotangents, jnp.float32))

    token_weights = jnp.asarray(case.token_weights, jnp.float32)
    value, (grads, weight_grads) = value_and_grad(value, (0, 1))(arrays(op.inputs(case)), token_weights)
    assert relative_error(value, truth, floor) < TOLERANCE
    for grad, truth_grad in zip([*grads, weight_grads], truth_grads, strict=True):
        assert grad.dtype == jnp.float32
        assert relative_error(grad, truth_grad, floor) < TOLERANCE


@both_ops
@reductions
def test_every_option_together_matches_float64(op, reduction, implementation, rng):
    check_against_float64(op, make_case(rng), rng, implementation, reduction, **ALL_OPTIONS)


@both_ops
@pytest.mark.parametrize("reduction", first(1, ["mean", "none", "sum"]))
def test_plain_loss_matches_float64(op, reduction, implementation, rng):
    check_against_float64(op, make_case(rng), rng, implementation, reduction, class_weights=False)


@both_ops
@pytest.mark.parametrize("reduction", first(1, ["mean", "none", "sum"]))
def test_token_scaling_of_every_other_option_matches_float64(op, reduction, implementation, rng):
    check_against_float64(op, make_case(rng), rng, implementation, reduction, token_scaling=True, **ALL_OPTIONS)


@both_ops
def test_token_scaling_is_the_label_s_probability_and_has_no_gradient(op, rng):
    """In NumPy: Σ w·p_y·(−log p_y) / Σ w, and w·p_y·(p − 1[y]) / Σ w.

    In the first row p_y is e^−200, in the second 0, and the third does not count.
    """
    n, v = 9, 7
    z, labels, weights = rng.standard_normal((n, v)), rng.integers(0, v, n), rng.uniform(0.5, 2.0, n)
    z[0, labels[0]], z[1, labels[1]], counts = -200.0, -1e30, np.arange(n) != 2
    log_p = z - np.log(np.exp(z).sum(1, keepdims=True))
    log_p_y, w = log_p[np.arange(n), labels], np.where(counts, weights, 0.0)
    p_y, losses = np.exp(log_p_y), -np.exp(log_p_y) * log_p_y
    expected = np.sum(w * losses) / np.sum(w)
    gradient = (w * p_y / np.sum(w))[:, None] * (np.exp(log_p) - np.eye(v)[labels])
    of_weights = np.where(counts, (losses - expected) / np.sum(w), 0.0)

    def loss(z, weights):
        z = jnp.where(counts[:, None], z, jnp.inf)
        inputs = [z] if op is CROSS_ENTROPY else [z, jnp.eye(v), jnp.zeros(v)]
        return op(inputs, jnp.where(counts, labels, IGNORE), token_weights=weights, token_scaling=True)

    value, grads = value_and_grad(loss, (0, 1))(*arrays([z, weights]))
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for found, truth in zip(grads, (gradient, of_weights), strict=True):
        np.testing.assert_allclose(found, truth, rtol=2e-5, atol=1e-7)


@both_ops
def test_token_scaling_of_a_forbidden_label_is_no_loss(op):
    """Its p_y is 0, and its −log p_y infinite."""
    forbids = jnp.array([0.0, -jnp.inf])
    inputs = [forbids[None]] if op is CROSS_ENTROPY else [jnp.zeros((1, 2)), jnp.eye(2), forbids]
    loss = lambda inputs, weights: op(inputs, jnp.array([1]), token_weights=weights, token_scaling=True)
    value, grads = value_and_grad(loss, (0, 1))(inputs, jnp.ones(1))
    assert value == 0 and not any(np.any(grad) for grad in jax.tree.leaves(grads))


@pytest.mark.full
@both_ops
@reductions
@pytest.mark.parametrize("options", EACH_OPTION, ids=lambda o: next(iter(o)))
@pytest.mark.parametrize("class_weights", [True, False])
def test_each_option_alone_matches_float64(op, reduction, options, class_weights, implementation, rng):
    check_against_float64(op, make_case(rng), rng, implementation, reduction, class_weights, **options)


@both_ops
@pytest.mark.parametrize("shape", first(2, SHAPES), ids=str)
def test_every_shape_matches_float64(op, shape, implementation, rng):
    # Logits of order 1, and for few tokens errors beside 1: one gradient alone may happen to be near 0.
    case = make_case(rng, *shape, scale=shape[1] ** -0.5, ignored=0.1)
    check_against_float64(op, case, rng, implementation, "mean", label_smoothing=0.1, floor=float(shape[0] < 10))


@both_ops
def test_small_logits_do_not_see_padding(op, implementation, rng):
    """With logits near 0, a padded column taken for a logit of 0 would add as much as a real one."""
    check_against_float64(op, make_case(rng, v=257, scale=1e-3), rng, implementation, "mean")


@both_ops
def test_no_tokens_give_loss_zero(op, implementation, rng):
    case = make_case(rng, n=0)
    value = lambda inputs: op(inputs, jnp.asarray(case.labels), implementation=implementation)
    loss, grads = value_and_grad(value)(arrays(op.inputs(case)))
    assert loss == 0
    assert all(np.all(np.asarray(grad) == 0) for grad in grads)


@both_ops
@pytest.mark.parametrize(
    "how, reduction",
    [
        ("ignore_index", "mean"),
        ("where", "none"),
        ("token_weights", "mean"),
        *(
            pytest.param(how, reduction, marks=pytest.mark.full)
            for how, reduction in [("ignore_index", "sum"), ("ignore_index", "none"), ("where", "mean")]
        ),
    ],
)
def test_rows_that_do_not_count_may_hold_nan(op, how, reduction, implementation, rng):
    case = make_case(rng, ignored=0.3)
    labels, options = np.where(case.counts, case.labels, 7), {}
    weights = jnp.asarray(case.token_weights, jnp.float32)
    if how == "ignore_index":
        labels = case.labels
    elif how == "where":
        options["where"] = jnp.asarray(case.counts)
    else:
        weights = weights * jnp.asarray(case.counts, jnp.float32)
    inputs = arrays(op.inputs(case))
    clean = inputs[0]
    dirty = jnp.where(case.counts[:, None], clean, jnp.where(jnp.arange(clean.shape[1]) % 2 == 0, jnp.nan, jnp.inf))

    def value(first, others):
        *others, token_weights = others
        loss = op(
            [first, *others],
            jnp.asarray(labels),
            token_weights=token_weights,
            reduction=reduction,
            implementation=implementation,
            **ALL_OPTIONS,
            **options,
        )
        return jnp.sum(loss), loss

    run = value_and_grad(value, (0, 1), has_aux=True)
    (_, loss), (dirty_grad, others) = run(dirty, [*inputs[1:], weights])
    (_, clean_loss), (clean_grad, clean_others) = run(clean, [*inputs[1:], weights])
    np.testing.assert_array_equal(loss, clean_loss)
    np.testing.assert_array_equal(dirty_grad, clean_grad)
    assert np.all(np.asarray(dirty_grad)[~case.counts] == 0)
    for a, b in zip(others, clean_others, strict=True):
        np.testing.assert_array_equal(a, b)
    if reduction == "none":
        assert np.all(np.asarray(loss)[~case.counts] == 0)


@both_ops
@pytest.mark.parametrize("reduction", first(1, ["mean", "sum", "none"]))
def test_nothing_counts_gives_zero(op, reduction, implementation, rng):
    case = make_case(rng, ignored=1.0)
    value = lambda inputs: jnp.sum(
        op(inputs, jnp.asarray(case.labels), reduction=reduction, implementation=implementation, **ALL_OPTIONS)
    )
    loss, grads = value_and_grad(value)(arrays(op.inputs(case)))
    assert loss == 0
    assert all(np.all(np.asarray(grad) == 0) for grad in grads)


@both_ops
def test_mean_over_weights_that_cancel_is_nan(op, implementation, rng):
    case = make_case(rng, n=4, ignored=0)
    weights = jnp.array([1.0, -1.0, 2.0, -2.0])
    loss = op(arrays(op.inputs(case)), jnp.asarray(case.labels), token_weights=weights, implementation=implementation)
    assert np.isnan(loss)


@both_ops
@pytest.mark.parametrize("wrong", first(1, [-1, 53, 2**31 - 1, IGNORE - 1]))
def test_impossible_label_is_nan_in_its_row_under_jit(op, wrong, implementation, rng):
    case = make_case(rng)
    row = int(np.flatnonzero(case.counts)[0])
    labels = case.labels.copy()
    labels[row] = wrong

    def value(inputs, labels):
        loss = op(inputs, labels, reduction="none", implementation=implementation)
        return jnp.sum(loss), loss

    (_, loss), (grad, *_) = value_and_grad(value, has_aux=True)(arrays(op.inputs(case)), jnp.asarray(labels))
    assert np.isnan(loss[row]) and np.all(np.isnan(grad[row]))
    others = np.arange(len(labels)) != row
    assert np.all(np.isfinite(np.asarray(loss)[others])) and np.all(np.isfinite(np.asarray(grad)[others]))

    mean = jax.jit(lambda inputs, y: op(inputs, y, implementation=implementation))
    assert np.isnan(mean(arrays(op.inputs(case)), jnp.asarray(labels)))


@both_ops
@pytest.mark.parametrize("dtype", first(2, [np.uint8, np.int16, np.int8, np.uint16]))
def test_labels_may_be_narrower_than_the_vocabulary(op, dtype, rng):
    """V is beyond their range, and a label may have the bits of -100."""
    bits = np.iinfo(dtype).bits
    case = make_case(rng, n=5, d=4, v=2**bits, ignored=0)
    labels = np.minimum([0, 1, 2**bits - 101, 2**bits - 100, 2**bits - 1], np.iinfo(dtype).max)
    loss = jax.jit(lambda y: op(arrays(op.inputs(case)), y, reduction="none"))
    found, expected = loss(jnp.asarray(labels.astype(dtype))), loss(jnp.asarray(labels, jnp.int32))
    np.testing.assert_array_equal(found, expected)
    assert np.all(np.asarray(found) > 0)


@both_ops
def test_tokens_may_be_told_in_numpy(op, rng, unchecked_types):
    case = make_case(rng)
    inputs, where = arrays(op.inputs(case)), rng.random(len(case.labels)) < 0.7
    weights = case.token_weights.astype(np.float32)
    loss = op(inputs, case.labels, where=where, token_weights=weights)
    assert loss == op(inputs, jnp.asarray(case.labels), where=jnp.asarray(where), token_weights=jnp.asarray(weights))
    assert loss == op(inputs, case.labels.astype(np.uint64), where=where, token_weights=weights)  # -100, unsigned
    with pytest.raises(ValueError, match=f"hold {2**32 + 5}, of which JAX would keep 32 bits"):
        op(inputs, np.where(np.arange(len(case.labels)) == 2, 2**32 + 5, case.labels))
    with pytest.raises(ValueError, match=r"labels hold 53, but must be in \[0, 53\)"):
        op(inputs, np.full(len(where), 53))


@both_ops
def test_impossible_concrete_label_is_refused(op, rng):
    case = make_case(rng)
    labels = case.labels.copy()
    labels[0] = 53
    with pytest.raises(ValueError, match=r"labels hold 53, but must be in \[0, 53\)"):
        op(arrays(op.inputs(case)), jnp.asarray(labels))
    masked = jnp.arange(len(labels)) > 0
    assert np.isfinite(op(arrays(op.inputs(case)), jnp.asarray(labels), where=masked))


@both_ops
def test_ignore_index_may_be_a_class(op, implementation, rng):
    case = make_case(rng, ignored=0)
    inputs = arrays(op.inputs(case))
    ignoring = op(inputs, jnp.asarray(case.labels), ignore_index=int(case.labels[3]), implementation=implementation)
    masked = op(
        inputs,
        jnp.asarray(case.labels),
        where=jnp.asarray(case.labels != case.labels[3]),
        implementation=implementation,
    )
    np.testing.assert_array_equal(ignoring, masked)


@pytest.mark.parametrize(
    "options",
    [LogitOptions(0.7, 5.0), LogitOptions(0.7), LogitOptions(0.0, 5.0), LogitOptions(1e-30, 1e-20)],
    ids=str,
)
def test_the_slope_of_a_logit_is_the_same_from_either_side_of_the_softcap(options):
    """The kernels that store z have no u left."""
    u = jnp.linspace(-9.0, 9.0, 19)
    np.testing.assert_allclose(
        formulas.slope_of_logit(formulas.transform(u, options), options), formulas.slope(u, options), 1e-4, 1e-6
    )


@both_ops
def test_class_weights_have_no_gradient(op, rng):
    case = make_case(rng)
    value = lambda c: op(arrays(op.inputs(case)), jnp.asarray(case.labels), class_weights=c)
    with pytest.raises(TypeError, match="class_weights is a constant and has no gradient"):
        jax.grad(value)(jnp.asarray(case.class_weights, jnp.float32))


@both_ops
@pytest.mark.parametrize("mode", ["auto", pytest.param("lean", marks=pytest.mark.full)])
def test_metrics_match_the_logits(op, mode, implementation, rng):
    case = make_case(rng)
    logits = case.hidden @ case.weight.T + case.bias
    z = 0.7 * 5.0 * np.tanh(logits / 5.0)
    lse = np.log(np.sum(np.exp(z), axis=1))
    options = dict(logit_scale=0.7, logit_softcap=5.0, z_loss=1e-2, implementation=implementation)
    if op is FUSED:
        options["mode"] = mode

    def value(inputs, weights):
        return op(inputs, jnp.asarray(case.labels), token_weights=weights, return_metrics=True, **options)

    weights = jnp.asarray(case.token_weights, jnp.float32)
    inputs = arrays(op.inputs(case))
    (loss, metrics), grads = jax.value_and_grad(value, has_aux=True)(inputs, weights)
    assert loss == op(inputs, jnp.asarray(case.labels), token_weights=weights, **options)
    counts, best = case.counts, np.argmax(z, axis=1)
    np.testing.assert_array_equal(metrics.predicted_tokens, np.where(counts, best, -1))
    assert metrics.predicted_tokens.dtype == jnp.int32
    assert metrics.accuracy == pytest.approx(np.mean(best[counts] == case.labels[counts]))
    assert relative_error(metrics.max_logit, np.where(counts, z.max(axis=1), 0)) < TOLERANCE
    assert relative_error(metrics.log_normalizer, np.where(counts, lse, 0)) < TOLERANCE
    t = np.where(counts, case.token_weights, 0)
    assert relative_error(metrics.num_tokens, t.sum()) < TOLERANCE
    assert relative_error(metrics.z_loss, 1e-2 * np.sum(t * lse**2) / t.sum()) < TOLERANCE
    plain = lambda inputs: op(inputs, jnp.asarray(case.labels), token_weights=weights, **options)
    plain_grads = jax.grad(plain)(inputs)
    for a, b in zip(grads, plain_grads, strict=True):
        assert relative_error(a, b) < 1e-6


@both_ops
def test_predicted_token_is_the_first_of_equal_maxima(op, implementation):
    weight = np.zeros((300, 4))
    weight[[5, 170, 290], 0] = 1.0  # equal logits, in different tiles
    weight[[0], 1] = 1.0
    hidden = np.array([[1.0, 0, 0, 0], [0, -1.0, 0, 0], [0, 0, 0, 0]])
    inputs = arrays([hidden @ weight.T] if op is CROSS_ENTROPY else [hidden, weight, np.zeros(300)])
    run = lambda inputs: op(inputs, jnp.array([5, 5, 5]), return_metrics=True, implementation=implementation)
    _, metrics = jax.jit(run)(inputs)
    assert metrics.predicted_tokens.tolist() == [5, 1, 0]
    assert metrics.accuracy == pytest.approx(1 / 3)


@both_ops
def test_metrics_of_nothing_are_finite(op, implementation, rng):
    case = make_case(rng, ignored=1.0)
    _, metrics = op(
        arrays(op.inputs(case)), jnp.asarray(case.labels), return_metrics=True, implementation=implementation
    )
    assert metrics.accuracy == 0 and metrics.num_tokens == 0 and metrics.z_loss == 0


@both_ops
@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.full)])
def test_half_precision_is_no_worse_than_the_plain_expression(op, dtype, implementation, rng):
    if dtype == jnp.float16 and implementation.startswith("mosaic_tpu"):
        with pytest.raises(ValueError, match="supports float32 and bfloat16"):
            op([jnp.zeros((4, 4), dtype)] * (1 if op is CROSS_ENTROPY else 2) + [None] * (op is FUSED),
               jnp.zeros(4, jnp.int32), implementation=implementation)  # fmt: skip
        return
    case = make_case(rng, n=192, d=64, v=320, scale=0.3)
    inputs = arrays(op.inputs(case), dtype)
    exact = [np.asarray(x, np.float64) for x in inputs]
    if op is CROSS_ENTROPY:
        case.hidden, case.weight, case.bias = exact[0], np.eye(exact[0].shape[1]), np.zeros(exact[0].shape[1])
    else:
        case.hidden, case.weight, case.bias = exact
    truth, truth_grads = op.oracle(case, token_weights=False, reduction="sum")
    labels = jnp.asarray(case.labels)

    def plain(inputs):
        x = inputs[0]
        if op is FUSED:
            x = jnp.dot(x, inputs[1].T, preferred_element_type=jnp.float32) + inputs[2][None, :].astype(jnp.float32)
        logp = jax.nn.log_softmax(x.astype(jnp.float32))
        picked = jnp.take_along_axis(logp, jnp.where(case.counts, labels, 0)[:, None], axis=1)[:, 0]
        return -jnp.sum(jnp.where(case.counts, picked, 0.0))

    with jax.default_matmul_precision("default"):
        value = lambda inputs: op(inputs, labels, reduction="sum", implementation=implementation)
        loss, grads = value_and_grad(value)(inputs)
        plain_loss, plain_grads = value_and_grad(plain)(inputs)
    assert loss.dtype == jnp.float32
    assert abs(loss - truth) <= 1.5 * abs(plain_loss - truth) + 1e-6 * abs(truth)
    for grad, plain_grad, truth_grad in zip(grads, plain_grads, truth_grads[:-1], strict=True):
        assert grad.dtype == dtype
        assert rms_error(grad, truth_grad) <= 1.5 * rms_error(plain_grad, truth_grad)


@both_ops
def test_confident_predictions_keep_the_target_gradient(op, implementation, rng):
    """p_y − 1 cancels where the target's logit leads by 10: the gradient must not drown in it."""
    case = make_case(rng, n=24, d=64, v=512, ignored=0)
    z = rng.standard_normal((24, 512))
    z[np.arange(24), case.labels] = z.max(axis=1) + 10
    if op is CROSS_ENTROPY:
        case.hidden, case.weight, case.bias = z, np.eye(512), np.zeros(512)
    else:
        case.hidden, case.weight = np.linalg.qr(rng.standard_normal((64, 24)))[0].T, case.weight
        case.weight, case.bias = (np.linalg.pinv(case.hidden) @ z).T, np.zeros(512)
    truth, truth_grads = op.oracle(case, token_weights=False, reduction="sum")
    value = lambda inputs: op(inputs, jnp.asarray(case.labels), reduction="sum", implementation=implementation)
    loss, grads = value_and_grad(value)(arrays(op.inputs(case)))
    assert 0 < loss and relative_error(loss, truth) < 1e-2
    if op is CROSS_ENTROPY:
        at = (np.arange(24), case.labels)
        assert relative_error(np.asarray(grads[0])[at], truth_grads[0][at]) < 1e-2


def test_minus_infinity_is_a_logit_like_any_other(implementation, rng):
    """Masked classes, as constrained decoding makes them: no NaN, also where a whole tile is masked."""
    case = make_case(rng, n=6, v=9000, d=2, ignored=0)
    z = np.full((6, 9000), -np.inf)
    z[:, 8500:8510] = rng.standard_normal((6, 10))
    case.labels = rng.integers(8500, 8510, 6)
    value = lambda z: CROSS_ENTROPY([z], jnp.asarray(case.labels), reduction="sum", implementation=implementation)
    loss, grad = value_and_grad(value)(jnp.asarray(z, jnp.float32))
    picked = z[:, 8500:8510]
    expected = np.log(np.exp(picked).sum(1)) - z[np.arange(6), case.labels]
    assert relative_error(loss, expected.sum()) < TOLERANCE
    assert np.all(np.isfinite(grad)) and np.all(np.asarray(grad)[:, :8500] == 0)


# --- transformations --------------------------------------------------------------------------------------------------


def plain_and_transformed(op, case, implementation, transform):
    """Gradients of the summed rows, directly and through `transform(f)`, f(inputs, labels) → rows."""
    rows = lambda inputs, labels: op(inputs, labels, reduction="none", implementation=implementation)
    labels = jnp.asarray(case.labels)
    expected = value_and_grad(lambda inputs: jnp.sum(rows(inputs, labels)))(arrays(op.inputs(case)))
    found = value_and_grad(lambda inputs: jnp.sum(transform(rows)(inputs, labels)))(arrays(op.inputs(case)))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert relative_error(a, b) < 1e-5


def by_parts(inputs, labels, parts):
    return [inputs[0].reshape(parts, -1, inputs[0].shape[-1]), *inputs[1:]], labels.reshape(parts, -1)


@both_ops
def test_vmap_over_tokens_and_checkpoint_change_nothing(op, implementation, rng):
    def transform(rows):
        def through(inputs, labels):
            inputs, labels = by_parts(inputs, labels, 4)
            mapped = jax.vmap(rows, in_axes=([0] + [None] * (len(inputs) - 1), 0))
            # JAX has no checkpoint around the TPU interpreter: its kernels are host callbacks.
            remat = (lambda f: f) if implementation == "mosaic_tpu:interpret" else jax.checkpoint
            return remat(mapped)(inputs, labels)

        return through

    plain_and_transformed(op, make_case(rng, n=36), implementation, transform)


@both_ops
def test_scan_over_tokens_changes_nothing(op, implementation, rng):
    def transform(rows):
        def through(inputs, labels):
            inputs, labels = by_parts(inputs, labels, 3)
            step = lambda total, xy: (total + jnp.sum(rows([xy[0], *inputs[1:]], xy[1])), None)
            return jax.lax.scan(step, jnp.float32(0), (inputs[0], labels))[0]

        return through

    plain_and_transformed(op, make_case(rng, n=36), implementation, transform)


@both_ops
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("mode", ["fast", "lean"])
def test_shard_map_over_tokens_changes_nothing(op, check_vma, mode, implementation, rng):
    """The replicated head's gradient is the sum over the devices."""
    if mode == "fast" and (op is CROSS_ENTROPY or implementation != "xla"):
        pytest.skip("only the fused loss in XLA has a fast mode here")
    if check_vma and implementation == "triton:interpret":
        pytest.skip("JAX's HLO interpreter of Pallas cannot run under check_vma; compiled ahead of time in tests/aot")
    tokens, everywhere = jax.P("data"), jax.P()
    case = make_case(rng, n=36)
    options = dict(reduction="sum", implementation=implementation) | ({"mode": mode} if op is FUSED else {})

    def total(inputs, labels, mesh):
        specs = ([tokens] + [everywhere] * (len(inputs) - 1), tokens)
        local = lambda inputs, labels: jax.lax.psum(op(inputs, labels, **options), "data")
        sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=everywhere, check_vma=check_vma)
        return sharded(inputs, labels)

    with several(implementation) as devices:
        inputs, labels = arrays(op.inputs(case)), jnp.asarray(case.labels)
        expected = value_and_grad(lambda inputs: op(inputs, labels, **options))(inputs)
        mesh = jax.sharding.Mesh(devices, ("data",))
        found = value_and_grad(functools.partial(total, mesh=mesh))(inputs, labels)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert relative_error(a, b) < 1e-5


# --- refusals ---------------------------------------------------------------------------------------------------------


@both_ops
@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(reduction="avg"), ValueError, "reduction='avg' is unknown"),
        (dict(label_smoothing=1.5), ValueError, r"label_smoothing=1.5 must be in \[0, 1\]"),
        (dict(logit_softcap=0.0), ValueError, "logit_softcap=0.0 must be finite and > 0"),
        (dict(logit_softcap=INF), ValueError, "logit_softcap=inf must be finite and > 0; pass None to cap nothing"),
        (dict(logit_softcap=NAN), ValueError, "logit_softcap=nan must be finite and > 0"),
        (dict(logit_scale=NAN), ValueError, "logit_scale=nan must be finite; 1.0 leaves the logits as they are"),
        (dict(logit_scale=-INF), ValueError, "logit_scale=-inf must be finite"),
        (dict(label_smoothing=NAN), ValueError, r"label_smoothing=nan must be in \[0, 1\]"),
        (dict(z_loss=NAN), ValueError, "z_loss=nan must be finite and ≥ 0; 0.0 switches it off"),
        (dict(z_loss=INF), ValueError, "z_loss=inf must be finite and ≥ 0"),
        (dict(z_loss=-1e-4), ValueError, "z_loss=-0.0001 must be finite and ≥ 0"),
        (dict(z_loss="big"), TypeError, "z_loss is a str, but must be a Python number"),
        (dict(ignore_index=1.5), TypeError, "ignore_index=1.5 must be a Python int"),
        (dict(implementation="cuda"), ValueError, "implementation='cuda' is unknown"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else None,
)
def test_wrong_options_are_refused(op, options, error, message, rng, unchecked_types):
    case = make_case(rng)
    with pytest.raises(error, match=message):
        op(arrays(op.inputs(case)), jnp.asarray(case.labels), **options)


@both_ops
def test_traced_option_is_refused(op, rng, unchecked_types):
    case = make_case(rng)
    traced = jax.jit(lambda cap: op(arrays(op.inputs(case)), jnp.asarray(case.labels), logit_softcap=cap))
    with pytest.raises(TypeError, match="logit_softcap is a .*must be a Python number"):
        traced(30.0)


@both_ops
def test_wrong_shapes_and_dtypes_are_refused(op, rng, unchecked_types):
    case = make_case(rng)
    inputs, labels = arrays(op.inputs(case)), jnp.asarray(case.labels)
    with pytest.raises(ValueError, match=r"labels has shape \(36,\), but must have shape \(37,\)"):
        op(inputs, labels[1:])
    with pytest.raises(ValueError, match=r"where has shape \(3,\)"):
        op(inputs, labels, where=jnp.ones(3, bool))
    with pytest.raises(ValueError, match=r"class_weights has shape \(52,\), but must have shape \(53,\)"):
        op(inputs, labels, class_weights=jnp.ones(52))
    with pytest.raises(TypeError, match="labels have dtype float32, but must be integers"):
        op(inputs, labels.astype(jnp.float32))
    with pytest.raises(TypeError, match="where has dtype int32, but must be bool"):
        op(inputs, labels, where=labels)
    with pytest.raises(TypeError, match="must be floating point"):
        op([x.astype(jnp.int32) for x in inputs], labels)
