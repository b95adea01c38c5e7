"""Padding is no token to routers: some documents have the same losses of routers and loads, however rows are laid."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from liger_jax.models import MixtralConfig, MixtralForCausalLM, OlmoeConfig, OlmoeForCausalLM
from liger_jax.models.core.experts import EXPERTS
from liger_jax.training import make_step, pack, pad, rows, score_sums
from liger_jax.training.evaluation import mean_scores

CONFIG = MixtralConfig(
    vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True,
    router_aux_loss_coef=0.5, router_z_loss_coef=0.1, initializer_range=0.5,
)  # fmt: skip
LENGTH = 4


@pytest.fixture
def documents(rng):
    return rng.integers(1, 16, (3, LENGTH))


def call(model, batch, normalizer=None):
    out = model(**batch, loss_normalizer=normalizer, return_metrics=True)
    return out.loss, out.experts, out.aux[EXPERTS].count


def assert_alike(found, truth):
    for x, t in zip(*map(jax.tree.leaves, (found, truth)), strict=True):
        np.testing.assert_allclose(x, t, rtol=2e-5)


def padded_on_the_left(documents):
    """As tokenizers pad prompts."""
    wide = lambda fill: np.pad(documents, ((0, 1), (3, 0)), constant_values=fill)
    mask = np.pad(np.ones_like(documents), ((0, 1), (3, 0)))
    labels = np.where(np.roll(mask, 1, axis=1) & mask, wide(0), -100)  # no padding predicts a first token
    return dict(input_ids=wide(0), labels=labels, attention_mask=mask)


LAYOUTS = {
    "padded, with rows that fill up": lambda documents: next(rows.batched(pad(documents, 7, pad_id=3), 4)),
    "packed, with rows that fill up": lambda documents: next(rows.batched(pack(documents, 9, pad_id=3), 4)),
    "padded on the left": padded_on_the_left,
    "rows that tell nothing": lambda documents: next(rows.batched(dict(input_ids=documents, labels=documents), 4)),
}


@pytest.mark.parametrize("layers", [1, pytest.param(2, marks=pytest.mark.full)])
def test_documents_have_one_balancing_loss_in_every_layout(layers, documents):
    config = dataclasses.replace(CONFIG, num_hidden_layers=layers)
    model = MixtralForCausalLM(config, scan_layers=layers > 1, rngs=nnx.Rngs(0))
    truth = nnx.jit(call)(model, dict(input_ids=jnp.asarray(documents), labels=jnp.asarray(documents)))
    assert (truth[2] == documents.size).all() and truth[1].balancing_loss > 1
    for layout in LAYOUTS.values():
        assert_alike(nnx.jit(call)(model, layout(documents)), truth)


@pytest.mark.full
def test_micro_batches_average_their_terms_by_scored_tokens_however_rows_are_laid(documents):
    graph, params = nnx.split(MixtralForCausalLM(CONFIG, rngs=nnx.Rngs(0)))
    documents = np.concatenate([documents, documents[:1]])
    labels = np.where(np.arange(4)[:, None] == 1, -100, documents)  # a micro-batch has a row that is not scored
    sgd, found = optax.sgd(1.0), []
    step = jax.jit(make_step(graph, sgd, micro_batches=2))
    for length in (LENGTH, 7):
        (after, _), loss = step((params, sgd.init(params)), pad(documents, length, labels=labels))
        found.append((loss, jax.tree.map(jnp.subtract, params, after)))
    for x, t in zip(*map(jax.tree.leaves, found[::-1]), strict=True):
        np.testing.assert_allclose(x, t, rtol=1e-4, atol=1e-6)
    model = nnx.merge(graph, params)
    losses = [nnx.jit(call)(model, dict(input_ids=documents[i::2], labels=labels[i::2]))[0] for i in (0, 1)]
    np.testing.assert_allclose(found[0][0], (6 * losses[0] + 3 * losses[1]) / 9, rtol=1e-5)


def test_held_out_rows_are_scored_by_the_cross_entropy_alone(documents):
    model = MixtralForCausalLM(CONFIG, rngs=nnx.Rngs(0))
    graph, params, frozen = nnx.split(model, nnx.Param, ...)
    batch = next(rows.batched(pad(documents, 7), 4))
    found = mean_scores(np.asarray(score_sums(graph)(params, frozen, batch), np.float64).tolist())
    logits = np.asarray(nnx.jit(lambda model, x: model(x).logits)(model, jnp.asarray(documents)), np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.take_along_axis(log_probs[:, :-1], documents[:, 1:, None], -1).mean()
    np.testing.assert_allclose(found["eval_loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(found["eval_perplexity"], np.exp(expected), rtol=1e-5)
    assert model.config.router_aux_loss_coef == 0.5 and model.config.output_router_logits


@pytest.mark.parametrize("name", ["segment_ids", "token_mask"])
def test_a_row_with_padding_before_a_token_is_nan(name, documents):
    config = dataclasses.replace(CONFIG, num_hidden_layers=1)
    model = MixtralForCausalLM(config, rngs=nnx.Rngs(0))
    tokens = jnp.asarray(documents)
    wrong = jnp.ones((3, LENGTH), jnp.int32).at[1, :2].set(0)
    logits = lambda model, mask: model(tokens, **{name: mask}).logits
    found = nnx.jit(logits)(model, wrong)
    assert np.isnan(found[1]).all() and np.isfinite(found[::2]).all()
    with pytest.raises(ValueError, match=f"{name} hold a 0 at position 1 and 1 after it, but 0 is padding"):
        logits(model, wrong)


@pytest.mark.parity
@pytest.mark.parametrize("layout", LAYOUTS)
def test_transformers_has_this_balancing_loss_with_its_attention_mask(layout, documents, tmp_path):
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    options = dataclasses.asdict(CONFIG) | dict(num_experts=4, router_z_loss_coef=0.0)
    names = {field.name for field in dataclasses.fields(OlmoeConfig)}
    config = OlmoeConfig(**{name: x for name, x in options.items() if name in names})
    model = OlmoeForCausalLM(config, rngs=nnx.Rngs(0))
    model.save_pretrained(tmp_path, config_fields={"pad_token_id": None})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", experts_implementation="eager"
    )
    ids = torch.from_numpy(np.pad(documents, ((0, 0), (0, 3))))
    mask = torch.from_numpy(np.pad(np.ones_like(documents), ((0, 0), (0, 3))))
    with torch.no_grad():
        truth = theirs(input_ids=ids, attention_mask=mask, output_router_logits=True).aux_loss
    found = nnx.jit(call)(model, LAYOUTS[layout](documents))[1].balancing_loss
    np.testing.assert_allclose(found, truth, rtol=1e-4)
