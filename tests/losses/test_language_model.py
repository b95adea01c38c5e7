"""`causal_lm_loss` serves models of any library by hidden states and head."""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from liger_jax import cross_entropy, fused_linear_cross_entropy, fused_linear_log_probs
from liger_jax.losses import causal_lm_loss
from liger_jax.models.causal_lm import CausalLMOutput

close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
V, D = 53, 16


class Linen(linen.Module):
    def setup(self):
        self.embed, self.lm_head = linen.Embed(V, D), linen.Dense(V, bias_init=linen.initializers.normal(0.5))

    def hidden(self, tokens):
        return jnp.tanh(jnp.cumsum(self.embed(tokens), axis=1))

    def __call__(self, tokens):
        return self.lm_head(self.hidden(tokens))


class Tied(nnx.Module):
    def __init__(self):
        self.embed = nnx.Embed(V, D, rngs=nnx.Rngs(0))

    def hidden(self, tokens):
        return jnp.tanh(jnp.cumsum(self.embed(tokens), axis=1))


def on_logits(logits, labels, scored):
    """The mean over positions (B, T − 1) that are scored, by optax."""
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits[:, :-1], jnp.maximum(labels[:, 1:], 0))
    return jnp.sum(losses * scored) / jnp.sum(scored)


@pytest.fixture
def tokens(rng):
    return jnp.asarray(rng.integers(0, V, (2, 11)))


def assert_same(ours, other, params):
    (value, grads), (expected, true_grads) = (jax.jit(jax.value_and_grad(f))(params) for f in (ours, other))
    close(value, expected)
    jax.tree.map(close, grads, true_grads)


def test_a_linen_model_with_a_dense_head_gets_the_loss_and_gradients_of_its_logits(tokens):
    params = Linen().init(jax.random.key(0), tokens)["params"]
    labels = tokens.at[0, 3].set(-100)

    def ours(params):
        hidden, head = Linen().apply({"params": params}, tokens, method="hidden"), params["lm_head"]
        return causal_lm_loss(hidden, head["kernel"], labels, weight_layout="dv", bias=head["bias"])

    assert_same(ours, lambda p: on_logits(Linen().apply({"params": p}, tokens), labels, labels[:, 1:] >= 0), params)


def test_both_gradients_of_a_tied_nnx_embedding_add_up_and_segments_end(tokens):
    graph, params = nnx.split(Tied())
    segments = jnp.asarray([[1] * 4 + [2] * 7, [1] * 11])

    def ours(params):
        model = nnx.merge(graph, params)
        return causal_lm_loss(model.hidden(tokens), model.embed.embedding[...], tokens, segment_ids=segments)

    def other(params):
        model = nnx.merge(graph, params)
        return on_logits(model.embed.attend(model.hidden(tokens)), tokens, segments[:, 1:] == segments[:, :-1])

    assert_same(ours, other, params)


def test_options_of_the_fused_loss_pass_through(tokens):
    hidden, head = jnp.ones((2, 11, D)), jnp.ones((V, D))
    loss, metrics = causal_lm_loss(hidden, head, tokens, return_metrics=True, reduction="sum")
    close(loss, 20 * np.log(V))
    assert metrics.num_tokens == 20


@pytest.mark.parametrize("name", ["labels", "segment_ids"])
def test_a_shape_that_is_not_the_positions_is_refused(name, tokens, unchecked_types):
    wrong = {"labels": tokens, **{name: tokens[:, 1:]}}
    with pytest.raises(ValueError, match=rf"{name} has shape \(2, 10\); it must be \(2, 11\), one for each position"):
        causal_lm_loss(jnp.ones((2, 11, D)), jnp.ones((V, D)), **wrong)


@pytest.fixture
def arrays(rng):
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    return draw(3, 11, D), draw(V, D), jnp.asarray(rng.integers(0, V, (3, 11))).at[1, 4].set(-100)


def test_one_sequence_needs_no_batch_axis(arrays):
    hidden, head, labels = arrays
    segments, loss_of = jnp.asarray([0] * 4 + [1] * 7), cast(Any, jax.jit(causal_lm_loss, static_argnames="reduction"))
    one = loss_of(hidden[0], head, labels[0], segment_ids=segments)
    close(one, loss_of(hidden[:1], head, labels[:1], segment_ids=segments[None]))
    assert loss_of(hidden[0], head, labels[0], reduction="none").shape == (11,)
    close(loss_of(hidden[None], head, labels[None]), loss_of(hidden, head, labels))


def test_vmap_over_sequences_gives_each_its_own_loss_and_gradients(arrays):
    hidden, head, labels = arrays
    loss = jax.jit(jax.value_and_grad(causal_lm_loss, argnums=(0, 1)))
    found = jax.vmap(loss, in_axes=(0, None, 0))(hidden, head, labels)
    each = [loss(hidden[i : i + 1], head, labels[i : i + 1]) for i in range(3)]
    close(found[0], [value for value, _ in each])
    close(found[1][0], jnp.concatenate([grads[0] for _, grads in each]))
    close(found[1][1], jnp.stack([grads[1] for _, grads in each]))


def test_labels_whose_rows_a_mesh_splits_are_refused(devices):
    mesh = jax.make_mesh((2,), ("sequence",), axis_types=(AxisType.Explicit,), devices=devices[:2])
    labels = jax.device_put(jnp.zeros((2, 4), jnp.int32), NamedSharding(mesh, P(None, "sequence")))
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"^causal_lm_loss: labels are .*positions over \('sequence'"),
    ):
        causal_lm_loss(jnp.zeros((2, 4, 8)), jnp.zeros((5, 8)), labels)


def test_hidden_states_of_one_position_are_refused(arrays, unchecked_types):
    hidden, head, _ = arrays
    with pytest.raises(ValueError, match=r"hidden has shape \(16,\); it must be \(..., T, D\)"):
        causal_lm_loss(hidden[0, 0], head, jnp.int32(1))


@pytest.mark.parametrize(
    "options, error, sentence",
    [
        (dict(softcap=30.0), TypeError, "softcap is not an option.*did you mean logit_softcap"),
        (dict(colour=1), TypeError, "colour is not an option.*'bias', 'weight_layout'"),
        (dict(ignore_index=0), TypeError, "ignore_index is -100"),
        (dict(reduction="avg"), ValueError, "reduction='avg'"),
        (dict(chunk_size=0), ValueError, "chunk_size=0"),
        (dict(bias=jnp.zeros(3)), ValueError, "bias has shape"),
        (dict(memory_budget_bytes=1), ValueError, "memory_budget_bytes=1 is too small"),
        (dict(token_weights=jnp.ones((1, 3), int)), TypeError, r"token_weights.*token_weights.astype\(jnp.float32\)"),
        (dict(vocab_axis="tp"), ValueError, "vocab_axis='tp'.*call causal_lm_loss inside jax.shard_map"),
    ],
    ids=str,
)
def test_sentences_begin_with_the_name_that_was_called(options, error, sentence):
    with pytest.raises(error, match=f"^causal_lm_loss: {sentence}"):
        causal_lm_loss(jnp.ones((1, 3, 4)), jnp.ones((8, 4)), jnp.zeros((1, 3), jnp.int32), **options)


def test_what_is_no_array_is_named_with_what_is_wanted(unchecked_types):
    hidden, head, labels = jnp.ones((1, 3, 4)), jnp.ones((8, 4)), jnp.zeros((1, 3), jnp.int32)
    output = CausalLMOutput(loss=None, logits=hidden @ head.T, metrics=None, cache=None)
    for loss in (causal_lm_loss, fused_linear_cross_entropy, fused_linear_log_probs):
        with pytest.raises(TypeError, match="(head|weight) is None, but must be the head's matrix.* is the embedding"):
            loss(hidden, None, labels)
        for wrong in (output, (hidden, None)):
            with pytest.raises(TypeError, match=r"hidden is a \w+, but must be the hidden states after the last norm"):
                loss(wrong, head, labels)


def test_what_is_taken_for_something_else_is_named(unchecked_types):
    hidden, head, labels = jnp.ones((5, 4)), jnp.ones((8, 4)), jnp.zeros(5, jnp.int32)
    with pytest.raises(ValueError, match=r"hidden is V, these are logits: take cross_entropy"):
        fused_linear_cross_entropy(hidden @ head.T, head, labels)
    for loss in (lambda y: fused_linear_cross_entropy(hidden, head, y), lambda y: cross_entropy(hidden @ head.T, y)):
        with pytest.raises(ValueError, match=r"a number for each class.*pass labels.argmax\(-1\) if they are one-hot"):
            loss(jax.nn.one_hot(labels, 8))
