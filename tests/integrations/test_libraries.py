"""Equinox, grain and qwix with our losses, our step and our models. `make integrations` installs the three."""

import importlib
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from examples import integrations_equinox, integrations_grain, integrations_qwix
from liger_jax.models.lora import add_lora


def needs(package):
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


# Warnings are theirs, of JAX's and Flax's older names.
pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]
# Qwix puts attributes of its own onto our modules, which the annotations of their containers do not allow.
unchecked = pytest.mark.usefixtures("unchecked_types")


@needs("equinox")
def test_an_equinox_model_trains_alike_without_logits():
    logits, fused = integrations_equinox.main(steps=8).values()
    np.testing.assert_allclose(fused, logits, rtol=1e-5)
    assert fused[-1] < fused[0] - 0.2


@needs("grain")
def test_grain_feeds_the_step_with_packed_rows_of_one_shape():
    documents = integrations_grain.documents()
    loader = integrations_grain.batches(documents)
    batch = next(loader)
    assert {x.shape for x in batch.values()} == {(4, 32)}
    assert set(batch) == {"input_ids", "labels", "segment_ids", "positions"}
    for ids, segments, positions in zip(*(batch[x] for x in ("input_ids", "segment_ids", "positions")), strict=True):
        for segment in range(1, segments.max() + 1):
            tokens = ids[segments == segment]
            assert any(np.array_equal(tokens, document) for document in documents)
            np.testing.assert_array_equal(positions[segments == segment], np.arange(len(tokens)))
    losses = integrations_grain.train(loader, steps=8)
    assert losses[-1] < losses[0] - 1


@needs("grain")
@needs("tokenizers")
def test_the_page_s_grain_loader_feeds_each_row_in_each_epoch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names, seen = importlib.import_module("tests.data._page_loops").run("grain")
    rows = [tuple(row) for row in names["rows"]["input_ids"]]
    assert sorted(tuple(row) for batch in seen for row in np.asarray(batch["input_ids"])) == sorted(3 * rows)


@needs("equinox")
@needs("tokenizers")
@needs("tqdm")
def test_the_page_s_equinox_module_trains_on_rows(tmp_path, monkeypatch):
    import equinox as eqx  # pyright: ignore[reportMissingImports]

    class Model(eqx.Module):
        embed: eqx.nn.Embedding
        mix: eqx.nn.Linear

        def __init__(self, key):
            self.embed, self.mix = eqx.nn.Embedding(320, 16, key=key), eqx.nn.Linear(16, 16, key=key)

        def hidden(self, input_ids):
            return jax.vmap(self.mix)(jax.vmap(self.embed)(input_ids))

    monkeypatch.chdir(tmp_path)
    loops = importlib.import_module("tests.data._page_loops")
    loops._tiny.checkpoint(tmp_path / "tiny")
    before = Model(jax.random.key(0))
    rows = [{"text": loops._tiny.text(20, i)} for i in range(30)]
    names, _ = loops.run("equinox", model=before, rows=rows)
    batch = {name: column[:4] for name, column in names["batches"].items()}
    (params, _), loss = names["step"]((names["params"], names["optimizer"].init(names["params"])), batch)
    assert loss < 3 and names["model"].embed.weight.shape == (320, 16)


@needs("grain")
def test_grain_goes_on_where_its_state_was_taken():
    loader = integrations_grain.batches(integrations_grain.documents())
    for _ in range(3):
        next(loader)
    state = loader.get_state()
    after = next(loader)
    again = integrations_grain.batches(integrations_grain.documents())
    again.set_state(state)
    for x, y in zip(after.values(), next(again).values(), strict=True):
        np.testing.assert_array_equal(x, y)


@needs("qwix")
@unchecked
def test_qwix_trains_our_models_with_int8_products():
    plain, int8 = integrations_qwix.main(steps=6).values()
    assert 1e-7 < abs(int8[0] - plain[0]) < 1e-2 and int8[-1] < int8[0] - 0.3
    assert int8[-1] == pytest.approx(plain[-1], rel=0.05)


@needs("qwix")
@unchecked
def test_qwix_leaves_the_fused_loss_s_head():
    tokens = jnp.arange(16).reshape(2, 8)
    layers = integrations_qwix.quantized(integrations_qwix.make_model(), tokens)
    everything = integrations_qwix.quantized(integrations_qwix.make_model(), tokens, ".*")
    loss = lambda model: float(model(tokens, labels=tokens).loss)
    assert loss(everything) == loss(layers) != loss(integrations_qwix.make_model())


@needs("qwix")
@unchecked
def test_qwix_rounds_products_below_our_adapters():
    tokens = jnp.arange(16).reshape(2, 8)
    model = add_lora(integrations_qwix.make_model(), 2, alpha=4, rngs=nnx.Rngs(1))
    both = integrations_qwix.quantized(model, tokens)
    step = nnx.value_and_grad(lambda m: m(tokens, labels=tokens).loss, argnums=nnx.DiffState(0, nnx.LoRAParam))
    loss, grads = nnx.jit(step)(both)
    assert loss != model(tokens, labels=tokens).loss
    assert all(jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(grads)) and any(
        jnp.any(x) for x in jax.tree.leaves(grads)
    )


@needs("qwix")
@unchecked
def test_lora_of_qwix_does_not_fit_stacked_layers():
    import qwix  # pyright: ignore[reportMissingImports]

    tokens, rule = jnp.arange(16).reshape(2, 8), qwix.LoraProvider(module_path=".*mlp.*", rank=2, alpha=4.0)
    with pytest.raises(ValueError, match="scan got values with different leading axis sizes"):
        qwix.apply_lora_to_model(integrations_qwix.make_model(), rule, tokens, rngs=nnx.Rngs(1))
