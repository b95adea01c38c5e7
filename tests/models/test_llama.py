"""The model has the values and gradients of a float64 rewriting, scanned or not, rematerialised or not."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from liger_jax.models import KernelOptions, LlamaConfig
from tests._devices import temporary_bytes
from tests.models._llama import CONFIG, loss_and_gradients, make_model, random_tokens
from tests.models._oracle import llama_loss
from tests.ops._oracle import first

KERNELS = ("xla", "triton")
TIED = dataclasses.replace(CONFIG, tie_word_embeddings=True)
close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6)


def named(tree):
    """Leaves by their paths, for messages."""
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}


def assert_equal_trees(ours, others, tolerance=2e-5):
    ours, others = named(ours), named(others)
    assert ours.keys() == others.keys()
    for name, value in others.items():
        np.testing.assert_allclose(ours[name], value, rtol=0, atol=tolerance * np.abs(value).max(), err_msg=name)


def unstacked(state, length):
    """The state of an unrolled model from the scanned one's."""
    pure = nnx.to_pure_dict(state)
    layers = pure["model"]["layers"]
    pure["model"]["layers"] = {i: jax.tree.map(lambda x, i=i: x[i], layers) for i in range(length)}
    return pure


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_loss_and_every_gradient_are_a_float64_rewriting_s(config, rng):
    model, tokens = make_model(config), random_tokens(rng)
    with jax.default_matmul_precision("highest"):
        loss, grads = loss_and_gradients(model, tokens, {})
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), nnx.to_pure_dict(nnx.state(model)))
        true_loss, true_grads = jax.jit(jax.value_and_grad(functools.partial(llama_loss, config)))(params, tokens)
    close(loss, true_loss)
    assert_equal_trees(nnx.to_pure_dict(grads), true_grads, tolerance=5e-5)


@pytest.mark.parametrize("fused", [True, False])
def test_a_tied_bfloat16_table_s_gradient_is_the_float32_one_s_rounded_once(fused, rng):
    """The truth: a float32 model with the same values, which does not round the sum of both gradients."""
    kernels = KernelOptions(fused_linear_cross_entropy=fused)
    narrow = make_model(TIED, kernels=kernels, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    wide = make_model(TIED, kernels=kernels, dtype=jnp.bfloat16, param_dtype=jnp.float32)
    nnx.update(wide, jax.tree.map(lambda x: x.astype(jnp.float32), nnx.state(narrow)))
    tokens = random_tokens(rng)
    rounded, exact = (
        np.asarray(loss_and_gradients(model, tokens, {})[1]["model"]["embed_tokens"][...], np.float64)
        for model in (narrow, wide)
    )
    nonzero = np.where(exact, np.abs(exact), 1.0)
    half_a_step = 2.0 ** (np.floor(np.log2(nonzero)) - 8)
    assert np.all(np.abs(rounded - exact) <= 1.001 * half_a_step)


@pytest.mark.full  # by default the convergence test stands for it
def test_kernels_of_this_platform_give_the_plain_loss_and_gradients(implementation, rng):
    tokens = random_tokens(rng)
    with jax.default_matmul_precision("highest"):
        with_kernels, plain = (
            loss_and_gradients(make_model(kernels=kernels), tokens, {})
            for kernels in (KernelOptions(implementation=implementation), KernelOptions.off())
        )
    assert_equal_trees(with_kernels, plain)


def test_scanned_and_unrolled_layers_are_the_same_model(rng):
    scanned, unrolled = make_model(), make_model(scan_layers=False)
    assert_equal_trees(nnx.to_pure_dict(nnx.state(unrolled)), unstacked(nnx.state(scanned), 2), tolerance=0)
    tokens = random_tokens(rng)
    (loss, grads), (other_loss, other_grads) = (loss_and_gradients(m, tokens, {}) for m in (unrolled, scanned))
    close(loss, other_loss)
    assert_equal_trees(nnx.to_pure_dict(grads), unstacked(other_grads, 2))


@pytest.mark.parametrize("scan_layers", first(1, [True, False]), ids=["scan", "unrolled"])
@pytest.mark.parametrize("remat", first(3, ["full", "offload", "offload_attention", "dots"]))
def test_rematerialisation_changes_no_gradient(remat, scan_layers, rng):
    tokens = random_tokens(rng)
    models = (make_model(remat=r, scan_layers=scan_layers) for r in (remat, "none"))
    assert_equal_trees(*(loss_and_gradients(model, tokens, {}) for model in models))


def test_scan_compiles_the_layer_once_and_full_remat_keeps_only_layer_inputs():
    config = dataclasses.replace(CONFIG, num_hidden_layers=8, intermediate_size=256, max_position_embeddings=512)
    tokens = jax.ShapeDtypeStruct((2, 256), jnp.int32)

    def compiled(**options):
        graph, params = nnx.split(nnx.eval_shape(lambda: make_model(config, **options)))
        loss = lambda params, tokens: nnx.merge(graph, params)(tokens, labels=tokens).loss
        return jax.jit(jax.grad(loss)).lower(params, tokens)

    scanned, unrolled = compiled(remat="full"), compiled(remat="full", scan_layers=False)
    assert unrolled.as_text().count("dot_general") > 4 * scanned.as_text().count("dot_general")
    bytes_of = lambda lowered: temporary_bytes(lowered.compile())
    assert bytes_of(scanned) < 0.6 * bytes_of(compiled())


@pytest.mark.parametrize("glu", [True, False])
def test_a_layer_keeps_gate_and_up_but_not_their_product(glu):
    config = dataclasses.replace(CONFIG, num_hidden_layers=1, intermediate_size=72)
    kernels = KernelOptions(glu=glu)
    model = nnx.eval_shape(lambda: make_model(config, kernels=kernels, scan_layers=False))
    graph, params = nnx.split(model.model)
    x = jax.ShapeDtypeStruct((2, 10, config.hidden_size), jnp.float32)
    table = jnp.ones((1, 10, config.head_dim))
    layer = lambda x, params: nnx.merge(graph, params).run_layers(x, {"full_attention": (table, table, None, None)})
    kept = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(layer, *args)[1], x, params))
    assert sum(array.shape == (2, 10, 72) for array in kept) == 2


def test_what_is_frozen_costs_less():
    """With a frozen head, the product for its gradient is gone; with a frozen trunk, only that product is left."""
    config = dataclasses.replace(CONFIG, num_hidden_layers=1)
    kernels = KernelOptions(implementation="xla")  # the compiler counts XLA's operations, not a kernel's
    graph, params = nnx.split(nnx.eval_shape(lambda: make_model(config, kernels=kernels, scan_layers=False)))
    head, trunk = nnx.split_state(params, lambda path, _: "lm_head" in path, ...)
    tokens = jax.ShapeDtypeStruct((2, 24), jnp.int32)
    loss = lambda head, trunk, tokens: nnx.merge(graph, head, trunk)(tokens, labels=tokens).loss
    flops = lambda f: jax.jit(f).lower(head, trunk, tokens).cost_analysis()["flops"]
    functions = loss, jax.grad(loss, (0, 1)), jax.grad(loss, 1), jax.grad(loss, 0)
    with jax.default_device(jax.devices("cpu")[0]):  # the backend of GPUs counts nothing before it compiles
        forward, both, no_head, no_trunk = map(flops, functions)
    product = 2 * tokens.size * CONFIG.vocab_size * CONFIG.hidden_size
    np.testing.assert_allclose((both - no_head) / product, 1.0, atol=0.1)
    np.testing.assert_allclose((no_trunk - forward) / product, 1.0, atol=0.1)


@pytest.mark.parametrize("scan_layers", first(1, [True, False]), ids=["scan", "unrolled"])
def test_nnx_jit_and_plain_jit_on_split_state_train_alike(scan_layers, rng):
    batches = [random_tokens(rng) for _ in range(3)]
    sgd = optax.sgd(0.1, momentum=0.9)

    model = make_model(scan_layers=scan_layers)
    optimizer = nnx.Optimizer(model, sgd, wrt=nnx.Param)

    @functools.partial(nnx.jit, donate_argnums=(0, 1))
    def nnx_step(model, optimizer, tokens):
        loss, grads = nnx.value_and_grad(lambda model: model(tokens, labels=tokens).loss)(model)
        optimizer.update(model, grads)
        return loss

    graph, params = nnx.split(make_model(scan_layers=scan_layers))

    @functools.partial(jax.jit, donate_argnums=0)
    def jax_step(state, tokens):
        params, opt_state = state
        loss, grads = jax.value_and_grad(lambda p: nnx.merge(graph, p)(tokens, labels=tokens).loss)(params)
        updates, opt_state = sgd.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    state = (params, sgd.init(params))
    for tokens in batches:
        state, loss = jax_step(state, tokens)
        close(nnx_step(model, optimizer, tokens), loss)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))  # donated
    assert_equal_trees(nnx.state(model), state[0])


def test_bfloat16_computes_in_bfloat16_on_float32_parameters(rng):
    tokens = random_tokens(rng)
    loss, grads = loss_and_gradients(make_model(dtype=jnp.bfloat16), tokens, {})
    exact, _ = loss_and_gradients(make_model(), tokens, {})
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    assert loss.dtype == jnp.float32 and loss != exact
    np.testing.assert_allclose(loss, exact, rtol=0.02)


def test_positions_turn_queries_and_keys_by_their_difference_only(rng):
    model, tokens = make_model(), random_tokens(rng)
    logits = nnx.jit(lambda model, positions: model(tokens, positions=positions[None]).logits)
    plain, moved, stretched = (
        np.asarray(logits(model, positions)) for positions in (jnp.arange(12), jnp.arange(12) + 7, 2 * jnp.arange(12))
    )
    close(moved, plain, atol=1e-4)
    assert np.abs(stretched - plain).max() > 1e-2


def test_a_token_outside_the_vocabulary_is_loud():
    logits = nnx.jit(lambda model: model(jnp.full((1, 3), CONFIG.vocab_size)).logits)
    assert jnp.isnan(logits(make_model())).all()


@pytest.mark.parametrize(
    ["fields", "message"],
    [
        (dict(num_attention_heads=6, num_key_value_heads=4), "num_key_value_heads=4 must divide.*=6"),
        (dict(hidden_size=30, num_attention_heads=4), "num_attention_heads=4 must divide.*hidden_size=30.*head_dim"),
        (dict(head_dim=5), "head_dim=5 must be even"),
        (dict(num_hidden_layers=0), "num_hidden_layers=0 must be an int from 1 to 10000"),
        (dict(num_key_value_heads=0), "num_key_value_heads=0 must be an int from 1 to .*, or None"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        LlamaConfig(**fields)


@pytest.mark.usefixtures("unchecked_types")
def test_an_unknown_remat_is_refused():
    with pytest.raises(ValueError, match="remat='half' must be"):
        make_model(remat="half")


def test_attention_is_named_apart_from_other_ops(rng):
    tokens = random_tokens(rng)
    named = make_model(kernels=KernelOptions(attention="splash"))
    with pytest.raises(ValueError, match="causal_attention cannot run here with implementation='splash'"):
        named(tokens)
    others = make_model(kernels=KernelOptions(implementation=("mosaic_tpu", "xla"), attention="xla"))
    with pytest.warns(UserWarning, match="stepping down from 'mosaic_tpu'") as caught:
        others(tokens)
    assert not any("causal_attention" in str(warning.message) for warning in caught)
