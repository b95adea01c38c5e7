"""A model's log-probabilities, entropies and hidden states, and the factor of its logits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from liger_jax.losses import policy_token_loss
from liger_jax.models import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    KernelOptions,
    LlamaConfig,
    LlamaForCausalLM,
)
from liger_jax.models.hugging_face import config_json
from tests.models._llama import CONFIG, make_model, random_tokens
from tests.ops._oracle import first

close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6)


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture
def tokens(rng):
    return random_tokens(rng)


@nnx.jit(static_argnames=("temperature", "logits_to_keep"))
def found(model, tokens, temperature=1.0, logits_to_keep=0, **arrays):
    arrays = {"labels": tokens, **arrays}
    return model.log_probs(tokens, entropy=True, temperature=temperature, logits_to_keep=logits_to_keep, **arrays)


@nnx.jit
def from_logits(model, tokens, temperature, arrays):
    """log p of all tokens, from the call's logits."""
    return jax.nn.log_softmax(model(tokens, **arrays).logits / temperature)


def test_position_t_has_the_log_prob_of_label_t_plus_1(model, tokens):
    of_tokens = found(model, tokens, temperature=0.7)
    log_p = from_logits(model, tokens, 0.7, {})
    close(of_tokens.log_probs[:, :-1], jnp.take_along_axis(log_p[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0])
    close(of_tokens.entropy[:, :-1], -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)[:, :-1])
    for field in jax.tree.leaves(of_tokens):
        assert field.shape == tokens.shape
    assert not np.any(of_tokens.log_probs[:, -1]) and not np.any(of_tokens.entropy[:, -1])
    kept = found(model, tokens, temperature=0.7, logits_to_keep=3)
    jax.tree.map(lambda some, every: close(some, every[:, -3:]), kept, of_tokens)


def test_segments_masks_and_ignored_labels_are_those_of_the_loss(model, tokens):
    segments = jnp.asarray([[1] * 5 + [2] * 7, [1] * 12])
    arrays = dict(segment_ids=segments, attention_mask=jnp.ones_like(tokens).at[1, 9:].set(0))
    labels = tokens.at[0, 3].set(-100)
    log_probs = found(model, tokens, labels=labels, **arrays).log_probs
    loss = nnx.jit(lambda model: model(tokens, labels=labels, loss_normalizer=1.0, **arrays).loss)(model)
    close(-jnp.sum(log_probs), loss)
    assert [tuple(place) for place in np.argwhere(log_probs == 0)] == [(0, 2), (0, 4), (0, 11), (1, 11)]
    shifted = jnp.full_like(labels, -100).at[:, :-1].set(labels[:, 1:])
    shifted = jnp.where(log_probs == 0, -100, shifted)
    close(found(model, tokens, labels=None, shift_labels=shifted, **arrays).log_probs, log_probs)


def test_gradients_are_those_of_the_loss(model, tokens):
    by_loss = nnx.jit(nnx.grad(lambda model: model(tokens, labels=tokens, loss_normalizer=1.0).loss))(model)
    by_log_probs = nnx.jit(nnx.grad(lambda model: -jnp.sum(model.log_probs(tokens, labels=tokens).log_probs)))(model)
    jax.tree.map(lambda x, y: close(x, y, atol=1e-4 * np.max(np.abs(x))), by_loss, by_log_probs)


def test_selected_tokens_need_no_labels_and_are_scored_at_the_last_position_too(model, tokens):
    """As a grader asks: what is the probability of "yes" and of "no" after each row?"""

    @nnx.jit
    def ask(model, ids):
        return model.log_probs(tokens, selected_token_ids=ids, logits_to_keep=2, temperature=0.7)

    asked = ask(model, jnp.array([7, 3]))
    log_p = from_logits(model, tokens, 0.7, {})
    close(asked.selected_log_probs, log_p[:, -2:, jnp.array([7, 3])])
    close(asked.log_probs, asked.selected_log_probs[..., 0])
    of_none = ask(model, jnp.array([7, CONFIG.vocab_size])).selected_log_probs
    assert np.all(np.isfinite(of_none[..., 0])) and np.all(np.isnan(of_none[..., 1]))
    with pytest.raises(ValueError, match=rf"^log_probs: selected_token_ids hold {CONFIG.vocab_size}, but must be in"):
        model.log_probs(tokens, selected_token_ids=[3, CONFIG.vocab_size])


def test_hidden_states_and_head_make_the_logits(model, tokens):
    hidden = nnx.jit(lambda model: model.hidden_states(tokens))(model)
    close(hidden @ model.head.T, nnx.jit(lambda model: model(tokens).logits)(model))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_batch_that_is_sharded_stays_so(axis_type, devices, tokens):
    mesh = jax.sharding.Mesh(devices[:2], ("data",), axis_types=(axis_type,))
    expected = found(make_model(), tokens)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(tokens, NamedSharding(mesh, P("data", None)))
        result = found(make_model(kernels=KernelOptions(batch_axes=("data",))), sharded)
    jax.tree.map(lambda x, y: close(x, y, atol=2e-5), result, expected)
    assert result.log_probs.sharding.is_equivalent_to(sharded.sharding, 2)


def test_log_probs_without_labels_are_refused(model, tokens):
    with pytest.raises(ValueError, match="log_probs needs the labels whose log-probabilities to return. Pass labels="):
        model.log_probs(tokens)


# --- the factor of the logits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
def test_logit_scale_reaches_logits_losses_and_log_probs(fused, tokens):
    sizes = {name: getattr(CONFIG, name) for name in vars(CONFIG) if name not in ("layer_types", "rope_scaling")}
    config = Gemma2Config(**sizes | dict(final_logit_softcapping=3.0))
    options = dict(kernels=KernelOptions(fused_linear_cross_entropy=fused), rngs=nnx.Rngs(0))
    plain = Gemma2ForCausalLM(config, **options)
    scaled = Gemma2ForCausalLM(dataclasses.replace(config, logit_scale=0.25), **options | dict(rngs=nnx.Rngs(0)))
    run = nnx.jit(lambda model: (model(tokens).logits, model(tokens, labels=tokens).loss))
    logits, loss = run(scaled)
    close(logits, 0.25 * run(plain)[0])
    log_p = jax.nn.log_softmax(logits[:, :-1])
    log_probs = jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1)[..., 0]
    close(loss, -jnp.mean(log_probs))
    close(found(scaled, tokens).log_probs[:, :-1], log_probs)


def test_config_json_has_it_under_cohere_s_name_and_granite_s():
    read = functools.partial(config_json.read, config_type=LlamaConfig, fixed=LlamaForCausalLM.config_fixed)
    assert read({"logit_scale": 0.0625}).logit_scale == 0.0625
    assert read({"logits_scaling": 8}).logit_scale == 0.125
    write = lambda config: config_json.write(config, LlamaForCausalLM.config_fixed, "LlamaForCausalLM", "float32")
    assert "logit_scale" not in write(LlamaConfig())
    assert read(write(LlamaConfig(logit_scale=0.5))).logit_scale == 0.5
    with pytest.raises(ValueError, match="logits_scaling=0 must be a finite float32 above 0"):
        read({"logits_scaling": 0})
    of_granite = functools.partial(config_json.read, config_type=GraniteConfig, fixed={})
    for divisor in (8.0, 49.0, 0.3):  # 1/(1/49) is not 49 in float64
        config = of_granite({"logits_scaling": divisor})
        values = config_json.write(config, {}, "", "float32")
        assert values["logits_scaling"] == divisor and "logit_scale" not in values and of_granite(values) == config
    assert not config_json.not_in_transformers(config, "granite")


# --- losses by token --------------------------------------------------------------------------------------------------


def policy(model, tokens, advantages, denominator, c):
    """The loss of a step of DAPO with an entropy bonus. The loss closes over c, the weight of the bonus."""
    old = jnp.full(tokens.shape, -4.0)
    loss_fn = lambda log_prob, entropy, old, advantage: (
        policy_token_loss(log_prob, old, advantage, epsilon_low=0.5) - c * entropy
    )
    per_token = old, advantages[:, None]
    return model.token_loss(
        loss_fn, tokens, labels=tokens, per_token=per_token, denominator=denominator, entropy=True, temperature=0.7
    )


def test_token_loss_is_that_of_the_log_probs(model, tokens):
    advantages = jnp.array([1.0, -0.5])

    def from_log_probs(model, c):
        found = model.log_probs(tokens, labels=tokens, temperature=0.7, entropy=True)
        every = jnp.broadcast_to(advantages[:, None], tokens.shape)
        losses = policy_token_loss(found.log_probs, jnp.full(tokens.shape, -4.0), every, epsilon_low=0.5)
        return jnp.sum(losses - c * found.entropy, where=found.log_probs != 0) / 5

    by_both = lambda f: nnx.jit(nnx.value_and_grad(f, argnums=(0, 1)))(model, jnp.float32(0.1))
    found = by_both(lambda model, c: policy(model, tokens, advantages, 5, c)[0])
    expected = by_both(from_log_probs)
    jax.tree.map(lambda x, y: close(x, y, atol=1e-4 * np.max(np.abs(x))), found, expected)


@pytest.mark.parametrize("axis_type", first(1, [AxisType.Explicit, AxisType.Auto]), ids=str)
def test_token_loss_of_a_sharded_batch_is_the_whole_batch_s(axis_type, devices, tokens):
    run = nnx.jit(nnx.value_and_grad(policy, argnums=(0, 2, 4), has_aux=True))
    (expected, _), gradients = run(make_model(), tokens, jnp.array([1.0, -0.5]), 5, jnp.float32(0.1))
    mesh = jax.sharding.Mesh(devices[:2], ("data",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        sharded = jax.device_put(tokens, NamedSharding(mesh, P("data", None)))
        advantages = jax.device_put(jnp.array([1.0, -0.5]), NamedSharding(mesh, P("data")))
        model = make_model(kernels=KernelOptions(batch_axes=("data",)))
        (loss, parts), found = run(model, sharded, advantages, 5, jnp.float32(0.1))
    close(loss, expected)
    jax.tree.map(lambda x, y: close(x, y, atol=1e-4 * np.max(np.abs(y))), found, gradients)
    assert parts.losses.sharding.is_equivalent_to(sharded.sharding, 2)


@pytest.mark.parametrize("kind", first(1, ["token_loss", "logits and loss"]))
def test_a_shard_map_around_the_model_gives_the_whole_batch_s_gradients(kind, devices, model, tokens):
    """With check_vma, where JAX follows what varies: parameters do not, and their gradients must not."""
    mesh = jax.sharding.Mesh(devices[:2], ("data",))
    graph, state = nnx.split(model)

    def total(state, tokens, advantages, c):
        model = nnx.merge(graph, state)
        if kind == "token_loss":
            return policy(model, tokens, advantages, 5, c)[0]
        output = model(tokens, labels=tokens, return_logits=True, loss_normalizer=5.0)
        return output.loss + c * jnp.sum(output.logits**2)

    def on_shards(*arguments):
        local = lambda *arguments: jax.lax.psum(total(*arguments), "data")
        return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data"), P("data"), P()), out_specs=P())(*arguments)

    arguments = state, tokens, jnp.array([1.0, -0.5]), jnp.float32(0.1)
    found, expected = (jax.jit(jax.value_and_grad(f, (0, 2, 3)))(*arguments) for f in (on_shards, total))
    jax.tree.map(lambda x, y: close(x, y, atol=1e-4 * np.max(np.abs(y))), found, expected)
