"""A step in micro-batches, in mixed precision, and with the optimizer's state on the host."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from liger_jax.losses import policy_token_loss
from liger_jax.models import KernelOptions, LlamaConfig, LlamaForCausalLM
from liger_jax.training import make_step, scored_tokens

CONFIG = LlamaConfig(
    vocab_size=96, hidden_size=32, intermediate_size=80, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
SGD = optax.sgd(1.0)
# Its state is the last gradient, and parameters stay as they are.
RECORD = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda grads, state, params: (jax.tree.map(jnp.zeros_like, params), grads),
)


@pytest.fixture
def batch(rng):
    """Packed sequences with unequal numbers of scored tokens, and weights."""
    tokens = rng.integers(0, CONFIG.vocab_size, (8, 21))
    labels = np.where(rng.random(tokens.shape) < np.linspace(0, 0.8, 8)[:, None], -100, tokens)
    segments = 1 + np.cumsum(rng.random(tokens.shape) < 0.1, axis=1)
    arrays = dict(input_ids=tokens, labels=labels, segment_ids=segments)
    weights = jnp.asarray(rng.random(tokens.shape), jnp.float32)
    return {name: jnp.asarray(x, jnp.int32) for name, x in arrays.items()} | {"loss_weights": weights}


def test_a_model_that_is_called_otherwise_needs_a_loss_function():
    class Own(nnx.Module):
        def __call__(self, tokens):
            return tokens

    step = make_step(nnx.split(Own())[0], SGD)
    told = (
        "without loss_fn, the model is called with input_ids, labels, loss_normalizer, as .* Own does not: .*'tokens'"
    )
    with pytest.raises(TypeError, match=told):
        step((nnx.State({}), SGD.init({})), jnp.ones((1, 4), jnp.int32))


@functools.cache
def split(**options):
    return nnx.split(LlamaForCausalLM(CONFIG, rngs=nnx.Rngs(0), **options))


def stepped(batch, *, optimizer=SGD, model=None, **options):
    """Loss and state after a step."""
    params, step = program(optimizer, tuple(options.items()), tuple((model or {}).items()))
    state, loss = step((params, optimizer.init(params)), batch)
    return loss, state


@functools.cache
def program(optimizer, options, model):
    """The parameters and the step, which several tests run on batches of their own."""
    graph, params = split(**dict(model))
    return params, jax.jit(make_step(graph, optimizer, **dict(options)))


OTHERS = [pytest.param(*case, marks=pytest.mark.full) for case in ((2, "fused"), (8, "fused"), (4, "logits"))]


@pytest.mark.parametrize("micro_batches, loss", [(4, "fused"), *OTHERS])
def test_gradients_of_micro_batches_add_up_to_those_of_the_batch(micro_batches, loss, batch):
    model = {} if loss == "fused" else dict(kernels=KernelOptions(fused_linear_cross_entropy=False))
    whole, (_, expected) = stepped(batch, optimizer=RECORD, model=model)
    value, (_, gradients) = stepped(batch, optimizer=RECORD, model=model, micro_batches=micro_batches)
    np.testing.assert_allclose(value, whole, rtol=1e-6)
    for found, truth in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        assert np.abs(found - truth).max() < 2e-5 * np.abs(truth).max()


def test_micro_batches_share_what_all_sequences_share(batch):
    positions = 3 * jnp.arange(batch["input_ids"].shape[1])[None]
    shared = batch | dict(positions=positions, loss_weights=None)
    whole, (_, expected) = stepped(shared, optimizer=RECORD)
    value, (_, gradients) = stepped(shared, optimizer=RECORD, micro_batches=4)
    np.testing.assert_allclose(value, whole, rtol=1e-6)
    for found, truth in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        assert np.abs(found - truth).max() < 2e-5 * np.abs(truth).max()


@pytest.mark.usefixtures("unchecked_types")
def test_labels_of_one_sequence_are_not_those_of_all(batch):
    with pytest.raises(
        ValueError, match=r"labels has shape \(1, 21\), but must begin with 8, .* Only scalars, and positions"
    ):
        stepped(batch | dict(labels=batch["labels"][:1], loss_weights=None), micro_batches=4)


def test_one_sequence_is_not_repeated_for_every_micro_batch(batch):
    one = {name: x[:1] for name, x in batch.items()}
    for sequence in (one, one["input_ids"], one | dict(positions=jnp.arange(21)[None])):
        with pytest.raises(ValueError, match="micro_batches=2 does not divide a batch of 1 sequences"):
            stepped(sequence, micro_batches=2)


def test_bfloat16_gradients_are_accumulated_in_float32(batch):
    """Each part's gradient is below half a unit in the last place of the earlier parts' sum."""
    graph, params = split(param_dtype=jnp.bfloat16)

    def loss_fn(model, batch, normalizer):
        x = model.head.astype(jnp.float32)
        return jnp.sum(x) * jnp.where(jnp.any(batch == 0), 1.0, 2.0**-9)

    step = jax.jit(make_step(graph, optax.sgd(1.0), loss_fn, normalizer=lambda _: None, micro_batches=9))
    (found, _), _ = step((jax.tree.map(jnp.zeros_like, params), SGD.init(params)), jnp.arange(9)[:, None])
    head = found["lm_head"][...]
    assert head.dtype == jnp.bfloat16
    np.testing.assert_array_equal(head.astype(jnp.float32), -(1 + 8 * 2.0**-9))


def test_a_scalar_belongs_to_every_micro_batch():
    """Also one that comes before the sequences, and a key, whose dtype is no number's."""
    pairs = dict(beta=jnp.float32(0.5), chosen=jnp.arange(8.0)[:, None], key=jax.random.key(3), scale=jnp.int32(2))

    def loss_fn(model, batch, normalizer):
        noise = jax.random.uniform(batch["key"])
        return batch["beta"] * batch["scale"] * jnp.sum(batch["chosen"]) / normalizer + 0 * jnp.sum(model.head), noise

    graph, params = split()
    options = dict(normalizer=lambda batch: len(batch["chosen"]), has_aux=True)
    values = {}
    for parts in (1, 4):
        step = jax.jit(make_step(graph, SGD, loss_fn, micro_batches=parts, **options))
        _, values[parts] = step((params, SGD.init(params)), pairs)
    (loss, noise), (sum_of_losses, sum_of_noises) = values[1], values[4]
    np.testing.assert_allclose(sum_of_losses, loss, rtol=1e-6)
    np.testing.assert_allclose(sum_of_noises, 4 * noise, rtol=1e-6)
    with pytest.raises(ValueError, match="the batch has only scalars, which micro_batches cannot divide"):
        step((params, SGD.init(params)), dict(beta=pairs["beta"]))


def test_what_a_loss_function_returns_beside_the_loss_adds_up_and_one_trace_serves_all(batch):
    traces = []

    def loss_fn(model, batch, normalizer):
        traces.append(batch)
        return jnp.sum(model.head), jnp.sum(batch["input_ids"])

    (_, total), _ = stepped(batch, loss_fn=loss_fn, normalizer=lambda _: None, has_aux=True, micro_batches=4)
    assert total == jnp.sum(batch["input_ids"])
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("options", "rounding"), [(dict(), 1e-5), (dict(micro_batches=4, model=dict(param_dtype=jnp.bfloat16)), 2.0**-8)]
)
def test_the_norm_is_that_of_the_gradients_which_the_optimizer_gets(options, rounding, batch):
    (loss, others), (_, grads) = stepped(batch, optimizer=RECORD, grad_norm=True, **options)
    squares = (np.sum(np.square(np.asarray(grad, np.float64))) for grad in jax.tree.leaves(grads))
    np.testing.assert_allclose(others["grad_norm"], np.sqrt(sum(squares)), rtol=rounding)  # XLA may skip it
    assert others["grad_norm"].dtype == jnp.float32 and others.keys() == {"grad_norm"}
    np.testing.assert_array_equal(loss, stepped(batch, **options)[0])


def test_the_norm_stands_beside_what_a_loss_function_returns(batch):
    loss_fn = lambda model, batch, normalizer: (jnp.sum(model.head), {"accuracy": 0.5})
    options = dict(loss_fn=loss_fn, normalizer=lambda _: None, has_aux=True, grad_norm=True)
    (_, others), _ = stepped(batch, **options)
    assert others["accuracy"] == 0.5
    each_is_1 = np.sqrt(CONFIG.vocab_size * CONFIG.hidden_size)
    np.testing.assert_allclose(others["grad_norm"], each_is_1, rtol=1e-5)


@pytest.mark.full
def test_a_batch_in_which_nothing_is_scored_has_loss_0(batch):
    nothing = batch | {"labels": jnp.full_like(batch["labels"], -100)}
    assert scored_tokens(nothing) == 1
    loss, (params, _) = stepped(nothing, micro_batches=2)
    assert loss == 0
    jax.tree.map(np.testing.assert_array_equal, params, split()[1])


def test_micro_batches_must_divide_the_batch(batch):
    with pytest.raises(ValueError, match="micro_batches=3 does not divide a batch of 8 sequences"):
        stepped(batch, micro_batches=3)
    with pytest.raises(ValueError, match="micro_batches=0 must be at least 1; 1 does not divide the batch"):
        make_step(split()[0], SGD, micro_batches=0)


# --- mixed precision --------------------------------------------------------------------------------------------------


def test_gradients_of_a_computation_in_bfloat16_reach_float32_masters(batch):
    mixed = dict(dtype=jnp.bfloat16, param_dtype=jnp.float32)
    _, (_, found) = stepped(batch, optimizer=RECORD, model=mixed)
    _, (_, exact) = stepped(batch, optimizer=RECORD)
    for ours, truth in zip(*(map(np.asarray, jax.tree.leaves(x)) for x in (found, exact)), strict=True):
        assert ours.dtype == np.float32
        assert np.sqrt(np.mean((ours - truth) ** 2)) < 0.1 * np.sqrt(np.mean(truth**2))
    # This step is so small that bfloat16 weights would round it away.
    start = split(**mixed)[1]
    updates = jax.tree.map(lambda gradient: -1e-4 * np.asarray(gradient), found)
    after = jax.jit(optax.apply_updates)(start, updates)
    unseen = lambda a, b: np.sum((a != b) & (a.astype(jnp.bfloat16) == b.astype(jnp.bfloat16)))
    assert (
        sum(unseen(*map(np.asarray, pair)) for pair in zip(*map(jax.tree.leaves, (start, after)), strict=True)) > 1000
    )


# --- memory of the host -----------------------------------------------------------------------------------------------


def test_state_on_the_host_stays_there_and_updates_alike(batch, platform):
    optimizer = optax.adamw(1e-2)
    graph, params = split()
    params = jax.tree.map(jnp.copy, params)  # which are given away
    expected = stepped(batch, optimizer=optimizer)
    on_host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    state = (params, jax.tree.map(lambda x: jax.device_put(x, on_host) if x.ndim else x, optimizer.init(params)))
    step = jax.jit(make_step(graph, optimizer, state_on_host=True), donate_argnums=0)
    for _ in range(2):
        state, loss = step(state, batch)
        moments = [x for x in jax.tree.leaves(state[1]) if x.ndim]
        assert moments and {x.sharding.memory_kind for x in moments} == {"pinned_host"}
        if expected is not None:
            np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state[0], expected[1][0])
        expected = None


# --- other losses -----------------------------------------------------------------------------------------------------


def test_micro_batches_of_a_policy_loss_add_up_to_the_batch(rng):
    tokens = jnp.asarray(rng.integers(0, CONFIG.vocab_size, (8, 11)))
    labels = jnp.where(jnp.arange(11)[None, :] < jnp.arange(8)[:, None], -100, tokens)  # prompts of unequal lengths
    batch = dict(tokens=tokens, labels=labels, old=jnp.full((8, 11), -4.5), advantages=jnp.linspace(-1, 1, 8)[:, None])

    def loss_fn(model, batch, denominator):
        per_token = batch["old"], batch["advantages"]
        loss = lambda *numbers: policy_token_loss(*numbers, epsilon_high=0.28)
        labels = batch["labels"]
        return model.token_loss(loss, batch["tokens"], labels=labels, per_token=per_token, denominator=denominator)[0]

    scored = lambda batch: jnp.sum(batch["labels"][:, 1:] != -100)
    options = dict(optimizer=RECORD, loss_fn=loss_fn, normalizer=scored)
    whole, (_, expected) = stepped(batch, **options)
    value, (_, gradients) = stepped(batch, **options, micro_batches=4)
    np.testing.assert_allclose(value, whole, rtol=1e-5)
    for found, truth in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True):
        assert np.abs(found - truth).max() < 2e-5 * np.abs(truth).max()


def test_a_mean_that_does_not_read_the_denominator_has_no_micro_batches(batch):
    """Such means would add up to a loss that is as many times too large as there are micro-batches."""
    mean = lambda model, batch, normalizer: model(**batch).loss
    inner = jax.jit(lambda head, normalizer: jnp.mean(head))
    for loss_fn in (mean, lambda model, batch, normalizer: inner(model.head, normalizer)):
        with pytest.raises(ValueError, match="micro_batches=2 adds up .*does not read its third argument.*Divide"):
            stepped(batch, loss_fn=loss_fn, micro_batches=2)
        stepped(batch, loss_fn=loss_fn, micro_batches=1)
    logged = lambda model, batch, normalizer: (mean(model, batch, normalizer), dict(tokens=normalizer))
    with pytest.raises(ValueError, match="does not read its third argument"):
        stepped(batch, loss_fn=logged, has_aux=True, micro_batches=2)
    with pytest.raises(ValueError, match="the batch has x, and no labels to count; .*normalizer"):
        scored_tokens(dict(x=jnp.ones(3)))


def test_a_loss_that_needs_the_whole_batch_has_no_micro_batches():
    def loss_fn(model, batch, normalizer):
        raise AssertionError

    vars(loss_fn)["needs_whole_batch"] = True
    make_step(split()[0], SGD, loss_fn)
    with pytest.raises(ValueError, match="micro_batches=2, but loss_fn.needs_whole_batch is set: .* not a sum over"):
        make_step(split()[0], SGD, loss_fn, micro_batches=2)
