"""The fused loss on Hopper's matrix units, in bfloat16, against float64 and the unfused step.

On a Hopper GPU its kernels are compiled; on a CPU JAX simulates them, memory begins as NaN and races are errors.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax import fused_linear_cross_entropy, fused_linear_log_probs
from liger_jax.ops.linear.plan import Problem, make_plan
from liger_jax.pallas_kernels import hopper as hopper_blocks
from liger_jax.pallas_kernels._hopper_tiles import Tiles
from liger_jax.pallas_kernels.fused_linear_cross_entropy import config
from tests.ops._losses import FUSED, arrays, make_case, relative_error, rms_error
from tests.ops._oracle import first, half

BF16 = jnp.bfloat16


@pytest.fixture(params=["fast", "lean"])
def mode(request):
    return request.param


def rounded_case(rng, weight_dtype=BF16, **sizes):
    """A case rounded to bfloat16: the values in float64, and the arrays in bfloat16."""
    case = make_case(rng, **sizes)
    case.weight *= case.weight.shape[1] ** -0.5
    hidden, weight, bias = (jnp.asarray(x, BF16) for x in (case.hidden, case.weight, case.bias))
    case.hidden, case.weight, case.bias = (np.asarray(x, np.float64) for x in (hidden, weight, bias))
    return case, [hidden, weight.astype(weight_dtype), bias.astype(weight_dtype)]


def plain(case, inputs, t, *, softcap=None, smoothing=0.0, z_loss=0.0):
    """The unfused step as a user would write it: logits in bfloat16, the loss in float32."""
    hidden, weight, bias = (x.astype(BF16) for x in inputs)
    logits = (hidden @ weight.T + bias[None, :]).astype(jnp.float32)
    logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    counts = jnp.asarray(case.counts)
    t = jnp.where(counts, t, 0.0)
    lse = jax.nn.logsumexp(logits, axis=1)
    target = jnp.take_along_axis(logits, jnp.where(counts, jnp.asarray(case.labels), 0)[:, None], axis=1)[:, 0]
    ce = (1 - smoothing) * (lse - target) + smoothing * jnp.mean(lse[:, None] - logits, axis=1)
    return (jnp.sum(t * ce) + z_loss * jnp.sum(t * lse**2)) / jnp.sum(t)


def test_tanh_keeps_the_digits_of_small_numbers():
    x = np.concatenate([np.geomspace(1e-30, 30, 20_000), np.linspace(0.6, 0.65, 5_000)]).astype(np.float32)
    x = np.concatenate([x, -x, np.float32([0, np.inf, -np.inf])])
    truth = np.tanh(x.astype(np.float64))
    error = np.abs(np.asarray(hopper_blocks.tanh(jnp.asarray(x)), np.float64) - truth)
    assert np.max(error / np.maximum(np.abs(truth), 1e-37)) < 2.0**-21
    assert np.isnan(hopper_blocks.tanh(jnp.float32(np.nan)))


EVERYTHING = dict(label_smoothing=0.1, z_loss=1e-2, logit_softcap=8.0)


SMALL = (300, 64, 320)
LARGER = [(1, 64, 64), (300, 192, 1088), (129, 1600, 320), (777, 2048, 4160)]


@pytest.mark.parametrize("sizes", first(1, [SMALL, *LARGER]), ids=str)
@pytest.mark.parametrize(
    "mode, weight_dtype, options, chunk_size",
    half(
        {"fast": "fast", "lean": "lean"},
        {"bf16": BF16, "f32": jnp.float32},
        {"everything": EVERYTHING, "plain": {}},
        {"128": 128, "256": 256},
    )
    + [pytest.param(mode, BF16, EVERYTHING, None, marks=pytest.mark.full) for mode in ("fast", "lean")],
)
def test_values_and_gradients(hopper, mode, sizes, weight_dtype, options, chunk_size, rng):
    n, d, v = sizes
    if d > 1000 and hopper != "mosaic_gpu":
        pytest.skip("too much for an interpreter")
    case, inputs = rounded_case(rng, weight_dtype, n=n, d=d, v=v, ignored=0.2 if n > 1 else 0.0)
    truth, truth_grads = FUSED.oracle(case, **options)
    (t,) = arrays([case.token_weights])
    labels = jnp.asarray(case.labels)

    def fused(inputs, t):
        return FUSED(
            inputs, labels, token_weights=t, mode=mode, chunk_size=chunk_size, implementation=hopper, **options
        )

    names = dict(softcap="logit_softcap", smoothing="label_smoothing", z_loss="z_loss")
    unfused = {short: options[name] for short, name in names.items() if name in options}
    loss, grads = jax.jit(jax.value_and_grad(fused, (0, 1)))(inputs, t)
    _, plain_grads = jax.jit(jax.value_and_grad(lambda i, t: plain(case, i, t, **unfused), (0, 1)))(inputs, t)
    assert relative_error(loss, truth) < 2e-5
    for grad, plain_grad, truth_grad in zip(
        (*grads[0], grads[1]), (*plain_grads[0], plain_grads[1]), truth_grads, strict=True
    ):
        assert grad.dtype == plain_grad.dtype
        assert rms_error(grad, truth_grad) <= 1.5 * rms_error(plain_grad, truth_grad) + 1e-6 * (1 + abs(truth))


@pytest.mark.parametrize(
    "mode, of_products",
    half({"fast": "fast", "lean": "lean"}, {name: name for name in ("mosaic_gpu_tiles", "mosaic_gpu_logit_tiles")}),
)
def test_tiles_that_warpgroups_share(hopper, mode, of_products, rng, monkeypatch):
    """The tiles of all products, or of the logits alone, are those of wide hidden states, which would take too long."""
    monkeypatch.setattr(config, of_products, lambda *_: Tiles(columns=256))
    jax.clear_caches()  # a kernel that was traced before keeps its tiles
    test_values_and_gradients(hopper, mode, SMALL, BF16, EVERYTHING, 128, rng)


def test_a_share_of_kept_exponentials(hopper, rng, monkeypatch):
    """With slices of 128 entries: blocks in the gradient's place, entries in arrays of their own, and the others."""
    monkeypatch.setattr(config, "LEAST_KEPT", 128)
    case, inputs = rounded_case(rng, n=200, d=128, v=1352, ignored=0.2)
    truth, truth_grads = FUSED.oracle(case, token_weights=False, **EVERYTHING)
    budget = 400 * 2**10
    kept = make_plan(Problem(200, 128, 1352, 2, 2, "gpu", "mosaic_gpu", "fast", hard_budget_bytes=budget)).kept
    assert kept.blocks > 1 and kept.rest and kept.total < 1352
    labels = jnp.asarray(case.labels)
    loss = lambda i: FUSED(i, labels, mode="fast", memory_budget_bytes=budget, implementation=hopper, **EVERYTHING)
    value, grads = jax.jit(jax.value_and_grad(loss))(inputs)
    assert relative_error(value, truth) < 2e-5
    for grad, truth_grad in zip(grads, truth_grads[:3], strict=True):
        assert relative_error(grad, truth_grad) < 1e-2


def test_weight_layouts_agree(hopper, mode, rng):
    case, (hidden, weight, _) = rounded_case(rng, n=200, d=64, v=448)
    loss = lambda layout: (
        lambda h, w: fused_linear_cross_entropy(
            h, w, jnp.asarray(case.labels), weight_layout=layout, mode=mode, chunk_size=128, implementation=hopper
        )
    )
    vd, (vd_hidden, vd_weight) = jax.value_and_grad(loss("vd"), (0, 1))(hidden, weight)
    dv, (dv_hidden, dv_weight) = jax.value_and_grad(loss("dv"), (0, 1))(hidden, weight.T)
    assert relative_error(dv, vd) < 1e-6
    assert relative_error(dv_hidden, vd_hidden) < 1e-2 and relative_error(dv_weight.T, vd_weight) < 1e-2


def test_lean_mode_takes_vocabularies_that_are_no_multiple_of_64(hopper, rng):
    case, inputs = rounded_case(rng, n=200, d=64, v=456)
    truth, truth_grads = FUSED.oracle(case, token_weights=False)
    loss = lambda i: FUSED(i, jnp.asarray(case.labels), mode="lean", chunk_size=256, implementation=hopper)
    value, grads = jax.value_and_grad(loss)(inputs)
    assert relative_error(value, truth) < 2e-5
    for grad, truth_grad in zip(grads, truth_grads[:3], strict=True):
        assert relative_error(grad, truth_grad) < 1e-2


@pytest.mark.parametrize("layout", ["vd", pytest.param("dv", marks=pytest.mark.full)])
def test_any_vocabulary_and_any_width_are_right(hopper, mode, layout, rng):
    """Drawn at random: vocabularies that end within the second tile or later, and on a GPU within the first as well."""
    for least, most in [(257, 512)] if hopper != "mosaic_gpu" else [(1, 256), (257, 512), (513, 5000)]:
        d, v = int(rng.integers(1, 64)), int(rng.integers(least, most))
        case, (hidden, weight, bias) = rounded_case(rng, n=100, d=d, v=v)
        truth, truth_grads = FUSED.oracle(case, class_weights=True, **EVERYTHING)
        token_weights, class_weights = arrays([case.token_weights, case.class_weights])

        fused = functools.partial(
            fused_linear_cross_entropy, labels=jnp.asarray(case.labels), weight_layout=layout, return_metrics=True,
            class_weights=class_weights, mode=mode, chunk_size=256, implementation=hopper, **EVERYTHING,
        )  # fmt: skip

        def loss(hidden, weight, bias, token_weights, fused=fused):
            return fused(hidden, weight, bias=bias, token_weights=token_weights)

        run = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))
        (value, metrics), grads = run(hidden, weight if layout == "vd" else weight.T, bias, token_weights)
        assert relative_error(value, truth) < 2e-5
        for grad, truth_grad in zip(grads, truth_grads, strict=True):
            grad = grad if grad.shape == truth_grad.shape else grad.T
            assert relative_error(grad, truth_grad) < 1e-2, (d, v)
        logits = (case.hidden @ case.weight.T + case.bias)[case.counts]
        largest = EVERYTHING["logit_softcap"] * np.tanh(np.max(logits, axis=1) / EVERYTHING["logit_softcap"])
        assert relative_error(np.asarray(metrics.max_logit)[case.counts], largest) < 1e-5
        assert np.mean(np.asarray(metrics.predicted_tokens)[case.counts] == np.argmax(logits, axis=1)) > 0.98


def test_tokens_that_do_not_count_may_hold_anything(hopper, mode, rng):
    case, (hidden, weight, _) = rounded_case(rng, n=200, d=64, v=448, ignored=0.5)
    dirty = hidden.at[jnp.asarray(~case.counts)].set(jnp.nan)
    loss = lambda h, w: fused_linear_cross_entropy(
        h, w, jnp.asarray(case.labels), mode=mode, return_metrics=True, implementation=hopper
    )
    run = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (clean_loss, clean_metrics), clean = run(hidden, weight)
    (dirty_loss, dirty_metrics), grads = run(dirty, weight)
    assert clean_loss == dirty_loss
    jax.tree.map(np.testing.assert_array_equal, clean_metrics, dirty_metrics)
    jax.tree.map(np.testing.assert_array_equal, clean, grads)
    assert not np.any(np.asarray(grads[0], np.float32)[~case.counts])
    _, metrics = jax.jit(loss)(dirty, weight)
    jax.tree.map(np.testing.assert_array_equal, clean_metrics.predicted_tokens, metrics.predicted_tokens)


def test_a_large_bias_overflows_in_no_row_that_fills_a_tile(hopper, rng):
    """A row that is added to fill the last tile is zeros, so that its logits are scale · bias: exp(100) is infinite."""
    case, inputs = rounded_case(rng, n=100, d=64, v=320)
    inputs[2] = jnp.ones_like(inputs[2])
    case.bias = np.ones_like(case.bias)
    truth, truth_grads = FUSED.oracle(case, token_weights=False, logit_scale=100.0)
    loss = lambda i: FUSED(i, jnp.asarray(case.labels), logit_scale=100.0, mode="lean", implementation=hopper)
    value, grads = jax.jit(jax.value_and_grad(loss))(inputs)
    assert relative_error(value, truth) < 2e-5
    for grad, truth_grad in zip(grads, truth_grads[:3], strict=True):
        assert relative_error(grad, truth_grad) < 1e-2


def test_metrics_are_those_of_the_float32_logits(hopper, mode, rng):
    case, (hidden, weight, _) = rounded_case(rng, n=200, d=64, v=448)
    hidden, weight = jnp.round(2 * hidden), jnp.round(8 * weight)  # sums of whole numbers are exact in any order
    weight = weight.at[400].set(weight[3])  # equal logits: the first counts
    loss = lambda h: fused_linear_cross_entropy(
        h, weight, jnp.asarray(case.labels), mode=mode, return_metrics=True, implementation=hopper
    )
    logits = jnp.dot(hidden, weight.T, preferred_element_type=jnp.float32)
    for _, metrics in (jax.jit(loss)(hidden), jax.jit(jax.value_and_grad(loss, has_aux=True))(hidden)[0]):
        found = np.asarray(metrics.predicted_tokens)[case.counts]
        assert not np.any(found == 400)
        best = np.asarray(jnp.max(logits, axis=1))[case.counts]
        chosen = np.asarray(logits)[case.counts, found]
        np.testing.assert_allclose(chosen, best, rtol=1e-5)  # sums in another order
        np.testing.assert_allclose(np.asarray(metrics.max_logit)[case.counts], best, rtol=1e-5)
        lse = np.asarray(jax.nn.logsumexp(logits, axis=1))[case.counts]
        np.testing.assert_allclose(np.asarray(metrics.log_normalizer)[case.counts], lse, rtol=1e-5)


def test_every_token_has_its_own_cotangent(hopper, rng):
    case, inputs = rounded_case(rng, n=200, d=64, v=448)
    cotangents = rng.uniform(0.5, 2.0, 200)
    _, truth_grads = FUSED.oracle(case, cotangents, token_weights=False, reduction="none")
    (g,) = arrays([cotangents])
    loss = lambda i: FUSED(i, jnp.asarray(case.labels), reduction="none", implementation=hopper)
    for grad, truth_grad in zip(jax.grad(lambda i: jnp.sum(loss(i) * g))(inputs), truth_grads[:3], strict=True):
        assert relative_error(grad, truth_grad) < 1e-2


def test_a_logit_scale_of_zero_has_no_gradient(hopper, mode, rng):
    case, inputs = rounded_case(rng, n=64, d=64, v=128)
    options = dict(logit_scale=0.0, logit_softcap=5.0, mode=mode, implementation=hopper)
    loss = lambda i: FUSED(i, jnp.asarray(case.labels), **options)
    value, grads = jax.jit(jax.value_and_grad(loss))(inputs)
    assert relative_error(value, np.log(128)) < 1e-6
    assert not any(np.any(np.asarray(g, np.float32)) for g in grads)  # NaN is something, too


def test_large_and_equal_logits_neither_overflow_nor_vanish(hopper, mode):
    hidden = jnp.full((128, 64), 100.0, BF16)
    weight = jnp.zeros((640, 64), BF16).at[5].set(100.0).at[600].set(-100.0)  # logits of 0 and ±640,000
    labels = jnp.where(jnp.arange(128) % 2 == 0, 5, 7)
    loss = lambda h: fused_linear_cross_entropy(h, weight, labels, mode=mode, reduction="sum", implementation=hopper)
    value, grad = jax.value_and_grad(loss)(hidden)
    assert relative_error(value, 64 * 640_000.0) < 1e-6
    assert np.all(np.isfinite(np.asarray(grad, np.float32)))


@pytest.mark.parametrize("loop", ["vmap", "map"])
def test_heads_in_a_loop_equal_each_by_itself(loop, hopper, mode, rng):
    cases = [rounded_case(rng, n=128, d=64, v=320) for _ in range(3)]
    heads = [(hidden, weight, jnp.asarray(case.labels)) for case, (hidden, weight, _) in cases]

    def step(head):
        def loss(hidden, weight):
            return fused_linear_cross_entropy(
                hidden, weight, head[2], mode=mode, chunk_size=64 if mode == "fast" else None, implementation=hopper
            )

        return jax.value_and_grad(loss, (0, 1))(*head[:2])

    over = jax.vmap(step) if loop == "vmap" else functools.partial(jax.lax.map, step)
    found = jax.jit(over)(jax.tree.map(lambda *own: jnp.stack(own), *heads))
    expected = jax.tree.map(lambda *own: jnp.stack(own), *map(step, heads))
    for ours, alone in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert ours.shape == alone.shape
        assert all(relative_error(*pair) < 1e-2 for pair in zip(ours, alone, strict=True))


@pytest.mark.parametrize("check_vma", [True, False])
def test_runs_inside_shard_map(hopper, mode, check_vma, rng):
    case, (hidden, weight, _) = rounded_case(rng, n=256, d=64, v=320)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    local = lambda h, w, y: jax.lax.psum(
        fused_linear_cross_entropy(h, w, y, mode=mode, reduction="sum", implementation=hopper), "data"
    )
    loss = jax.shard_map(
        local, mesh=mesh, in_specs=(jax.P("data"), jax.P(), jax.P("data")), out_specs=jax.P(), check_vma=check_vma
    )
    one = lambda h, w, y: fused_linear_cross_entropy(h, w, y, mode=mode, reduction="sum", implementation=hopper)
    arguments = hidden, weight, jnp.asarray(case.labels)
    (found, grads), (expected, expected_grads) = (
        jax.jit(jax.value_and_grad(f, (0, 1)))(*arguments) for f in (loss, one)
    )
    assert relative_error(found, expected) < 1e-6
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert relative_error(grad, expected_grad) < 1e-2


def test_runs_are_repeatable_to_the_bit(hardware, hopper, mode, rng):
    case, inputs = rounded_case(rng, n=1000, d=1600, v=6400)
    loss = lambda i: FUSED(i, jnp.asarray(case.labels), mode=mode, chunk_size=512, implementation=hopper)
    run = jax.jit(jax.value_and_grad(loss))
    first = run(inputs)
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, run(inputs), first)


@pytest.mark.parametrize("weight_dtype", [BF16, jnp.float32], ids=["bf16", "f32"])
def test_weight_gradient_is_as_exact_in_chunks_as_unfused(hopper, mode, weight_dtype, rng):
    n = v = 8192 if hopper == "mosaic_gpu" else 512  # 64 chunks, or 4 where each takes a second
    case, inputs = rounded_case(rng, weight_dtype, n=n, d=64, v=v, ignored=0.0)
    _, truth = FUSED.oracle(case)
    (t,) = arrays([case.token_weights])
    loss = lambda w: FUSED(
        [inputs[0], w, inputs[2]],
        jnp.asarray(case.labels),
        token_weights=t,
        mode=mode,
        chunk_size=128 if mode == "fast" else 256,
        implementation=hopper,
    )
    grad = jax.jit(jax.grad(loss))(inputs[1])
    unfused = jax.jit(jax.grad(lambda w: plain(case, [inputs[0], w, inputs[2]], t)))(inputs[1])
    assert rms_error(grad, truth[1]) <= 1.1 * rms_error(unfused, truth[1])


@pytest.mark.full
@pytest.mark.parametrize("sizes", [(20_096, 256, 128_256), (256, 4096, 600_064)], ids=["N×V", "V×D"])
def test_more_than_2_to_the_31_elements(hardware, mode, sizes):
    n, d, v = sizes
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (n, d), BF16)
    weight = jax.random.normal(keys[1], (v, d), BF16) * d**-0.5
    labels = jnp.where(jnp.arange(n) % 2 == 0, jax.random.randint(keys[2], (n,), 0, v), v - 1 - jnp.arange(n) % 50)
    options = dict(mode=mode, chunk_size=n if mode == "fast" else None)
    loss = lambda implementation, **options: (
        lambda h, w: fused_linear_cross_entropy(h, w, labels, reduction="sum", implementation=implementation, **options)
    )
    with jax.default_matmul_precision("default"):
        value, grads = jax.jit(jax.value_and_grad(loss("mosaic_gpu", **options), (0, 1)))(hidden, weight)
        expected, expected_grads = jax.jit(jax.value_and_grad(loss("xla", mode="lean"), (0, 1)))(hidden, weight)
    assert relative_error(value, expected) < 1e-5
    for grad, truth in zip(grads, expected_grads, strict=True):
        for part in (slice(0, 200), slice(-200, None)):
            assert relative_error(grad[part], truth[part]) < 2e-2


EVERY_LOGIT_OPTION = dict(logit_softcap=4.0, temperature=1.5, weight_layout="dv")


@pytest.mark.parametrize(
    "metrics, options",
    [(False, {}), *(pytest.param(*case, marks=pytest.mark.full) for case in [(True, {}), (False, EVERY_LOGIT_OPTION)])],
)
def test_log_probs_and_entropies(metrics, options, hopper, rng):
    """The last tile of the vocabulary is forbidden by a bias of −inf, which a softcap makes finite."""
    n, d, v = 200, 64, 320
    labels = jnp.asarray(rng.integers(0, 256, n)).at[3].set(-100)
    bias = jnp.zeros(v).at[256:].set(-jnp.inf)
    arrays = [jnp.asarray(x, BF16) for x in (rng.normal(size=(n, d)), 0.2 * rng.normal(size=(v, d)))]
    factors = jnp.asarray(rng.normal(size=(2, n)), jnp.float32)

    def total(arrays, implementation, **options):
        hidden, weight = arrays
        weight = weight.T if options.get("weight_layout") == "dv" else weight
        found = fused_linear_log_probs(
            hidden, weight, labels, bias=bias, entropy=True, metrics=metrics, implementation=implementation, **options
        )
        return jnp.sum(factors * jnp.stack([found.log_probs, found.entropy])), found

    run = lambda arrays, implementation: jax.value_and_grad(total, has_aux=True)(arrays, implementation, **options)
    (_, found), gradients = run(arrays, hopper)
    # float32 products of the same values are exact; the gradient by the logits is rounded to bfloat16 here alone.
    (_, expected), expected_gradients = run([x.astype(jnp.float32) for x in arrays], "xla")
    errors = jax.tree.map(relative_error, vars(found), vars(expected))
    assert max(jax.tree.leaves(errors)) < 2e-5, errors
    for x, y in zip(gradients, expected_gradients, strict=True):
        assert relative_error(x, y) < 1e-2
