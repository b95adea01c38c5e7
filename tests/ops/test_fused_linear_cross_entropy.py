"""What only fused_linear_cross_entropy promises: no logits in memory, no needless work, modes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax import fused_linear_cross_entropy
from tests.ops._losses import FUSED, IGNORE, arrays, make_case, relative_error, rms_error, value_and_grad

# Each mode that a kernel has.
MODES = {"xla": ("fast", "lean"), "triton": ("lean",), "mosaic_tpu": ("fast", "lean")}


def pytest_generate_tests(metafunc):
    if "kernel_mode" in metafunc.fixturenames:
        from tests.conftest import IMPLEMENTATIONS

        names = IMPLEMENTATIONS[metafunc.config.getoption("--platform")]
        pairs = [(name, mode) for name in names for mode in MODES[name.partition(":")[0]]]
        metafunc.parametrize("kernel_mode", pairs, ids=lambda pair: "-".join(pair))


def products(f, *args):
    """How many matrix products a program holds, a loop's body counted once."""
    return jax.jit(f).lower(*args).as_text().count("stablehlo.dot_general")


def loss_of(labels, **options):
    return lambda hidden, weight: fused_linear_cross_entropy(hidden, weight, labels, **options)


@pytest.mark.parametrize("chunk_size", [7, *(pytest.param(c, marks=pytest.mark.full) for c in (1, 16, 53, 1000))])
def test_chunk_size_does_not_change_the_result(chunk_size, kernel_mode, rng):
    implementation, mode = kernel_mode
    if chunk_size == 1 and implementation != "xla":
        chunk_size = 5  # 53 launches in an interpreter show no more than 11
    case = make_case(rng)
    truth, truth_grads = FUSED.oracle(case, token_weights=False, label_smoothing=0.1)
    value = lambda inputs: FUSED(
        inputs,
        jnp.asarray(case.labels),
        label_smoothing=0.1,
        mode=mode,
        chunk_size=chunk_size,
        implementation=implementation,
    )
    loss, grads = value_and_grad(value)(arrays(FUSED.inputs(case)))
    assert relative_error(loss, truth) < 2e-5
    for grad, truth_grad in zip(grads, truth_grads[:3], strict=True):
        assert relative_error(grad, truth_grad) < 2e-5


def test_width_that_takes_several_steps(kernel_mode, rng):
    """A tile's product in parts: D = 1,280 float32 is more than any kernel multiplies at a time."""
    implementation, mode = kernel_mode
    case = make_case(rng, n=20, d=1280, v=300)
    case.weight *= 1280**-0.5
    truth, truth_grads = FUSED.oracle(case, token_weights=False, label_smoothing=0.1)
    value = lambda inputs: FUSED(
        inputs, jnp.asarray(case.labels), label_smoothing=0.1, mode=mode, implementation=implementation
    )
    loss, grads = value_and_grad(value)(arrays(FUSED.inputs(case)))
    assert relative_error(loss, truth) < 2e-5
    for grad, truth_grad in zip(grads, truth_grads[:3], strict=True):
        assert relative_error(grad, truth_grad) < 2e-5


def test_weight_layouts_agree(kernel_mode, rng):
    implementation, mode = kernel_mode
    case = make_case(rng, n=33, d=130, v=257)
    hidden, weight = arrays([case.hidden, case.weight])
    options = dict(mode=mode, implementation=implementation)
    labels = jnp.asarray(case.labels)
    vd = value_and_grad(loss_of(labels, **options), (0, 1))(hidden, weight)
    dv = value_and_grad(loss_of(labels, weight_layout="dv", **options), (0, 1))(hidden, weight.T)
    assert relative_error(dv[0], vd[0]) < 1e-6
    assert relative_error(dv[1][0], vd[1][0]) < 1e-5
    assert relative_error(dv[1][1].T, vd[1][1]) < 1e-5


def test_leading_axes_are_tokens(rng):
    case = make_case(rng, n=36)
    hidden, weight = arrays([case.hidden, case.weight])
    labels = jnp.asarray(case.labels)
    flat = fused_linear_cross_entropy(hidden, weight, labels, reduction="none")
    shaped = fused_linear_cross_entropy(hidden.reshape(3, 4, 3, -1), weight, labels.reshape(3, 4, 3), reduction="none")
    np.testing.assert_array_equal(shaped.reshape(-1), flat)


# --- work -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode, reduction", [("fast", "mean"), ("lean", "mean"), ("lean", "none")])
def test_only_what_is_differentiated_is_computed(mode, reduction, rng):
    """Logits once in the fast mode and twice in the lean one, and one product for each gradient asked for."""
    case = make_case(rng, n=64, v=64)  # one chunk, one slice: no loop body is counted apart from a remainder
    hidden, weight = arrays([case.hidden, case.weight])
    loss = lambda h, w: jnp.sum(loss_of(jnp.asarray(case.labels), mode=mode, reduction=reduction)(h, w))
    count = lambda f: products(f, hidden, weight)
    logits = 1 if mode == "fast" else 2
    assert count(loss) == 1
    assert count(jax.grad(loss, (0, 1))) == logits + 2
    assert count(jax.grad(loss, 0)) == logits + 1
    assert count(jax.grad(loss, 1)) == logits + 1


def test_token_weights_alone_need_no_gradient_products(rng):
    case = make_case(rng, n=64, v=64)
    hidden, weight = arrays([case.hidden, case.weight])
    loss = lambda t: fused_linear_cross_entropy(hidden, weight, jnp.asarray(case.labels), token_weights=t, mode="fast")
    assert products(jax.grad(loss), jnp.ones(64)) == 1


def test_metrics_cost_no_product(rng):
    case = make_case(rng, n=64, v=64)
    hidden, weight = arrays([case.hidden, case.weight])
    loss = loss_of(jnp.asarray(case.labels), return_metrics=True)
    assert products(jax.grad(loss, (0, 1), has_aux=True), hidden, weight) == 3


def test_an_infinite_token_that_counts_is_loud_and_one_that_does_not_is_not(implementation, rng):
    case = make_case(rng, ignored=0)
    hidden, weight = arrays([case.hidden, case.weight])
    hidden = hidden.at[jnp.array([3, 5])].set(jnp.inf)
    where = jnp.arange(len(case.labels)) != 5
    loss = loss_of(jnp.asarray(case.labels), where=where, mode="lean", implementation=implementation)
    dx, dw = jax.jit(jax.grad(loss, (0, 1)))(hidden, weight)
    assert jnp.isnan(dx[3]).all() and jnp.isnan(dw).all()
    assert jnp.isfinite(jnp.delete(dx, 3, axis=0)).all() and not dx[5].any()


def test_a_large_bias_overflows_in_no_token_that_does_not_count(implementation, rng):
    """Such a token's hidden state is masked to zeros, so that its logits are scale · bias: exp(100) is infinite."""
    case = make_case(rng, ignored=0)
    case.labels[5] = IGNORE
    case.bias = rng.uniform(0.9, 1.1, case.bias.shape)
    truth, truth_grads = FUSED.oracle(case, token_weights=False, logit_scale=100.0)
    value = lambda inputs: FUSED(
        inputs, jnp.asarray(case.labels), logit_scale=100.0, mode="lean", implementation=implementation
    )
    loss, grads = value_and_grad(value)(arrays(FUSED.inputs(case)))
    assert relative_error(loss, truth) < 2e-5
    for grad, truth_grad in zip(grads, truth_grads[:3], strict=True):
        assert relative_error(grad, truth_grad) < 1e-3  # logits of ±1,000 in float32
    assert not np.any(grads[0][5])


def test_a_loss_of_the_sum_of_logits_alone_has_its_gradient(implementation, rng):
    """With smoothing 1 and class weights that cancel, neither lse nor the target's logit has a cotangent."""
    case = make_case(rng)
    case.class_weights = np.resize([1.0, -1.0], len(case.bias) - 1)
    case.weight, case.bias = case.weight[1:], case.bias[1:]
    case.labels = np.where(case.counts, np.minimum(case.labels, len(case.bias) - 1), IGNORE)
    options = dict(label_smoothing=1.0, reduction="sum")
    truth, truth_grads = FUSED.oracle(case, token_weights=False, class_weights=True, **options)
    (classes,) = arrays([case.class_weights])
    value = lambda inputs: FUSED(
        inputs,
        jnp.asarray(case.labels),
        class_weights=classes,
        mode="lean",
        implementation=implementation,
        **options,
    )
    loss, grads = value_and_grad(value)(arrays(FUSED.inputs(case)))
    assert relative_error(loss, truth) < 2e-5
    for grad, truth_grad in zip(grads, truth_grads[:3], strict=True):
        assert relative_error(grad, truth_grad) < 2e-5


def test_frozen_head_gets_the_same_trunk_gradient(kernel_mode, rng):
    implementation, mode = kernel_mode
    case = make_case(rng)
    hidden, weight = arrays([case.hidden, case.weight])
    loss = loss_of(jnp.asarray(case.labels), mode=mode, implementation=implementation)
    gradients = lambda wrt: value_and_grad(loss, wrt)(hidden, weight)[1]
    both = gradients((0, 1))
    np.testing.assert_allclose(gradients(0), both[0], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(gradients(1), both[1], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("mode", ["fast", "lean"])
def test_one_jitted_loss_may_be_differentiated_by_this_and_then_by_that(mode, rng):
    """A trace made for one set of frozen inputs must not be used for another set."""
    case = make_case(rng)
    inputs = arrays([case.hidden, case.weight, case.bias])
    labels = jnp.asarray(case.labels)
    jitted = jax.jit(lambda *inputs: FUSED(inputs, labels, mode=mode))
    expected = jax.grad(lambda *inputs: FUSED(inputs, labels, mode=mode), (0, 1, 2))(*inputs)
    for argnums in [(0, 1, 2), (1,), (0, 1), (0,), (2,), (1, 2), (0, 2), (0, 1, 2)]:
        grads = jax.grad(lambda *inputs: jitted(*inputs), argnums)(*inputs)
        for argnum, grad in zip(argnums, grads, strict=True):
            np.testing.assert_allclose(grad, expected[argnum], rtol=1e-5, atol=1e-7)


# --- memory -----------------------------------------------------------------------------------------------------------


def buffers(compiled):
    """The element counts of all floating-point arrays in the compiled program."""
    shapes = re.findall(r"\b(?:f|bf)\d+\[([\d,]+)\]", compiled.as_text())
    return [np.prod([int(size) for size in shape.split(",")]) for shape in shapes]


@pytest.mark.parametrize("mode", ["fast", "lean"])
@pytest.mark.parametrize("differentiated", [False, True])
def test_no_array_of_tokens_by_vocabulary_is_compiled(mode, differentiated, platform):
    n, d, v = 8192, 64, 8192
    loss = loss_of(jnp.zeros(n, jnp.int32), mode=mode)
    f = jax.value_and_grad(loss, (0, 1)) if differentiated else loss
    compiled = jax.jit(f).lower(jnp.zeros((n, d)), jnp.zeros((v, d))).compile()
    assert max(buffers(compiled)) <= n * v // 4
    plain = lambda h, w: jnp.mean(jax.nn.logsumexp(h @ w.T, axis=1))
    assert max(buffers(jax.jit(jax.grad(plain)).lower(jnp.zeros((n, d)), jnp.zeros((v, d))).compile())) >= n * v


def test_memory_stays_flat_as_tokens_grow():
    d, v = 64, 4096

    def extra(n):
        loss = loss_of(jnp.zeros(n, jnp.int32))
        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(jnp.zeros((n, d)), jnp.zeros((v, d))).compile()
        return compiled.memory_analysis().temp_size_in_bytes - n * d * 4  # less the masked copy of hidden

    assert extra(32768) <= 1.2 * extra(4096)


@pytest.mark.parametrize("mode, mib, v", [("fast", 10, 8192), ("lean", 48, 32768)])
def test_budget_bounds_the_memory(mode, mib, v):
    n, d = 4096, 1024

    def extra(budget):
        loss = loss_of(jnp.zeros(n, jnp.int32), mode=mode, memory_budget_bytes=budget)
        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(jnp.zeros((n, d)), jnp.zeros((v, d))).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    tight = mib * 2**20
    # The budget counts logits and accumulators; the CPU compiler adds a temporary of the weight's size.
    assert extra(tight) < extra(None)
    assert extra(tight) <= tight + n * d * 4 + v * d * 4


def test_impossible_budget_is_refused():
    with pytest.raises(ValueError, match=r"memory_budget_bytes=1000 is too small: mode='fast' needs \d+ bytes"):
        loss_of(jnp.zeros(4096, jnp.int32), memory_budget_bytes=1000)(jnp.zeros((4096, 64)), jnp.zeros((512, 64)))


# --- precision --------------------------------------------------------------------------------------------------------


def test_a_loss_scale_keeps_float16_gradients(rng):
    """A token's share of the mean's gradient is a probability over N, below float16's smallest number."""
    n, d, v = 4096, 16, 8192
    case = make_case(rng, n=n, d=d, v=v, scale=0.1, ignored=0)
    labels, inputs = jnp.asarray(case.labels), arrays([case.hidden, 0.1 * case.weight], jnp.float16)
    scale = 2.0**15
    scaled = jax.jit(jax.grad(lambda h, w: scale * loss_of(labels)(h, w), (0, 1)))
    grads, truth = scaled(*inputs), scaled(*(x.astype(jnp.float32) for x in inputs))
    for grad, exact in zip(grads, truth, strict=True):
        assert grad.dtype == jnp.float16
        assert rms_error(grad, exact) < 2e-3 * rms_error(exact, 0.0)


def test_a_float16_bias_is_made_in_mode_lean_for_a_loss_scale(rng):
    case = make_case(rng)
    hidden, weight, bias = arrays(FUSED.inputs(case))
    scale, shares = 2.0**30, jnp.full(len(case.labels), 2.0**-30, jnp.float32)

    def loss(bias, **options):
        of_tokens = dict(token_weights=shares, reduction="sum")
        return scale * FUSED([hidden, weight, bias], jnp.asarray(case.labels), **of_tokens, **options)

    half = bias.astype(jnp.float16)
    grad, exact = jax.jit(jax.grad(loss))(half), jax.jit(jax.grad(loss))(half.astype(jnp.float32))
    assert rms_error(grad, exact) < 2e-3 * rms_error(exact, 0.0)
    with pytest.raises(ValueError, match="mode='fast' .* float16"):
        loss(half, mode="fast")


@pytest.mark.parametrize("mode", ["fast", "lean"])
def test_weight_gradient_is_as_exact_at_64_chunks_as_unfused(mode, rng):
    """Summed in bfloat16 over 64 chunks it would be several times worse."""
    n, d, v = 1024, 64, 256
    case = make_case(rng, n=n, d=d, v=v, scale=0.3, ignored=0)
    hidden, weight = arrays([case.hidden, case.weight], jnp.bfloat16)
    case.hidden, case.weight, case.bias = (np.asarray(x, np.float64) for x in (hidden, weight, np.zeros(v)))
    _, truth = FUSED.oracle(case, token_weights=False)
    labels = jnp.asarray(case.labels)

    def plain(w):
        logits = (hidden @ w.T).astype(jnp.float32)
        return jnp.mean(jax.nn.logsumexp(logits, axis=1) - logits[jnp.arange(n), labels])

    chunk_size = n // 64 if mode == "fast" else v // 64
    with jax.default_matmul_precision("default"):
        grad = jax.jit(jax.grad(loss_of(labels, mode=mode, chunk_size=chunk_size), 1))(hidden, weight)
        plain_grad = jax.jit(jax.grad(plain))(weight)
    assert rms_error(grad, truth[1]) <= 1.1 * rms_error(plain_grad, truth[1])


def test_mixed_precision_keeps_the_weight_gradient_in_float32(kernel_mode, rng):
    """Products in hidden's dtype; dW must not pass through bfloat16 on its way to a float32 weight."""
    implementation, mode = kernel_mode
    case = make_case(rng, n=256, d=32, v=96, ignored=0)
    hidden = jnp.asarray(case.hidden, jnp.bfloat16)
    weight = jnp.asarray(np.asarray(jnp.asarray(case.weight, jnp.bfloat16), np.float32))
    case.hidden, case.weight, case.bias = np.asarray(hidden, np.float64), np.asarray(weight, np.float64), np.zeros(96)
    _, truth = FUSED.oracle(case, token_weights=False)
    loss = loss_of(jnp.asarray(case.labels), mode=mode, implementation=implementation)
    _, (dhidden, dweight) = value_and_grad(loss, (0, 1))(hidden, weight)
    assert dhidden.dtype == jnp.bfloat16 and dweight.dtype == jnp.float32
    assert rms_error(dweight, truth[1]) < rms_error(jnp.asarray(truth[1], jnp.bfloat16), truth[1])
    assert np.any(np.asarray(dweight) != np.asarray(dweight.astype(jnp.bfloat16).astype(jnp.float32)))


def test_precision_holds_for_the_backward_too(rng):
    """The context manager is left before a backward is traced."""
    hidden, weight = jnp.ones((8, 4)), jnp.ones((16, 4))
    with jax.default_matmul_precision("bfloat16"):
        _, backward = jax.vjp(loss_of(jnp.zeros(8, jnp.int32), mode="lean"), hidden, weight)
    text = str(jax.make_jaxpr(lambda g: backward(g))(jnp.float32(1)))
    assert "HIGHEST" not in text and text.count("dot_general") == 3


# --- modes and refusals -----------------------------------------------------------------------------------------------


def test_fast_mode_refuses_what_it_cannot_do(rng):
    case = make_case(rng)
    hidden, weight = arrays([case.hidden, case.weight])
    labels = jnp.asarray(case.labels)
    with pytest.raises(ValueError, match="mode='fast' .* the cotangent of each token's loss is unknown"):
        loss_of(labels, mode="fast", reduction="none")(hidden, weight)
    with pytest.raises(ValueError, match="mode='fast' .* float16 rounds gradients to 0 before a loss scale can reach"):
        loss_of(labels, mode="fast")(hidden.astype(jnp.float16), weight)
    with pytest.raises(ValueError, match="it has no mode 'fast'"):
        loss_of(labels, mode="fast", implementation="triton:interpret")(hidden, weight)


def test_precision_that_a_kernel_lacks_is_refused(rng):
    case = make_case(rng)
    hidden, weight = arrays([case.hidden, case.weight])
    for name in ("triton:interpret", "mosaic_tpu:interpret"):
        with pytest.raises(ValueError, match="products do not support precision="):
            loss_of(jnp.asarray(case.labels), precision=jax.lax.Precision.HIGH, implementation=name)(hidden, weight)


def test_wrong_arguments_are_refused(unchecked_types):
    hidden, weight, labels = jnp.zeros((4, 8)), jnp.zeros((16, 8)), jnp.zeros(4, jnp.int32)
    with pytest.raises(ValueError, match=r"weight has shape \(8, 16\).*must be \(V, D\)"):
        fused_linear_cross_entropy(hidden, weight.T, labels)
    with pytest.raises(ValueError, match="weight_layout='vv' is unknown"):
        fused_linear_cross_entropy(hidden, weight, labels, weight_layout="vv")
    with pytest.raises(ValueError, match="mode='slow' is unknown"):
        fused_linear_cross_entropy(hidden, weight, labels, mode="slow")
    for size in (0, True):
        with pytest.raises(ValueError, match=f"chunk_size={size} must be a Python int of at least 1"):
            fused_linear_cross_entropy(hidden, weight, labels, chunk_size=size)
    with pytest.raises(ValueError, match=r"hidden has shape \(4, 0\), whose last axis, D, must be at least 1"):
        fused_linear_cross_entropy(hidden[:, :0], weight[:, :0], labels)
    with pytest.raises(ValueError, match=r"bias has shape \(8,\), but must have shape \(16,\)"):
        fused_linear_cross_entropy(hidden, weight, labels, bias=jnp.zeros(8))


# --- meshes -----------------------------------------------------------------------------------------------------------


def test_tokens_on_an_auto_mesh_are_never_gathered_silently(devices):
    mesh = jax.sharding.Mesh(devices, ("data",))
    tokens = jax.NamedSharding(mesh, jax.P("data"))
    hidden = jax.device_put(jnp.zeros((16, 8)), tokens)
    labels = jax.device_put(jnp.zeros(16, jnp.int32), tokens)
    weight = jax.device_put(jnp.zeros((32, 8)), jax.NamedSharding(mesh, jax.P()))
    loss = lambda h, w, y: fused_linear_cross_entropy(h, w, y)
    for f in (loss, jax.grad(loss)):
        with pytest.raises(Exception, match="jax.shard_map"):
            jax.jit(f)(hidden, weight, labels)
