"""Fine-tuning on real text: adapters beside quantised weights end where those beside bfloat16 weights end."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from examples._lib import text
from liger_jax.models import LlamaConfig
from liger_jax.models.lora import add_lora, trainable
from liger_jax.models.quantized import quantize
from liger_jax.ops.block_quantized import KINDS
from liger_jax.training import make_step
from tests.models._llama import make_model

CONFIG = LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2
)  # fmt: skip
BATCH, LENGTH, SEEDS = 16, 64, (0, 1, 2)
BEFORE, AFTER = 400, 60  # steps on Python's sources, and then on its documentation


def windows(tokens, rng):
    starts = rng.integers(0, len(tokens) - LENGTH, BATCH)
    return jnp.asarray(tokens[starts[:, None] + np.arange(LENGTH)])


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A bfloat16 model that has learnt from sources, and documentation to train on and to hold out."""
    corpus = text.load(None, CONFIG.vocab_size, tmp_path_factory.mktemp("text"))
    sources, rng = corpus.train[len(corpus.train) // 2 :], np.random.default_rng(0)
    documentation = corpus.train[:180_000]  # the first file's, of the language reference
    graph, params = nnx.split(make_model(CONFIG))
    optimizer = optax.adamw(3e-3)
    step, state = jax.jit(make_step(graph, optimizer)), (params, optimizer.init(params))
    for _ in range(BEFORE):
        state, _ = step(state, windows(sources, rng))
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state[0])
    held_out = jnp.asarray(documentation[-128 * LENGTH :].reshape(128, LENGTH))
    return graph, params, documentation[: -128 * LENGTH], held_out


def losses_after(pretrained, kind):
    """The held-out loss before, and after fine-tuning with each seed's adapters and batches."""
    graph, params, documentation, held_out = pretrained
    model = nnx.merge(graph, params, copy=True)
    model = add_lora(model if kind is None else quantize(model, kind), 4, alpha=8, rngs=nnx.Rngs(0))
    graph, adapters, base = trainable(model)
    optimizer = optax.adamw(1e-3)
    step = jax.jit(make_step(graph, optimizer))
    score = jax.jit(lambda adapters: nnx.merge(graph, adapters, base)(held_out, labels=held_out).loss)
    losses = []
    for seed in SEEDS:
        noise = lambda x, seed=seed: jax.random.permutation(jax.random.key(seed), x, axis=-2)  # rows of A; B is zero
        start, rng = jax.tree.map(noise, adapters), np.random.default_rng(seed)
        state = (start, optimizer.init(start))
        for _ in range(AFTER):
            state, _ = step(state, windows(documentation, rng), base)
        losses.append(float(score(state[0])))
    return float(score(adapters)), losses


@pytest.mark.full
def test_a_fine_tune_beside_quantised_weights_ends_within_1_5_percent_of_bfloat16_s(pretrained):
    before, expected = losses_after(pretrained, None)
    assert max(expected) < 0.95 * before < 0.8 * np.log(CONFIG.vocab_size)  # both trainings taught something
    for kind in KINDS:
        _, found = losses_after(pretrained, kind)
        np.testing.assert_allclose(found, expected, rtol=0.015, err_msg=kind)
