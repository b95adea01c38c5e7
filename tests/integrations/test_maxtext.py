"""MaxText's vocabulary tiling beside ours on MaxText's own model. `make integrations` installs MaxText."""

import importlib
import re
from importlib.util import find_spec
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from examples import integrations_maxtext
from examples.integrations_maxtext import make_config, make_mesh
from liger_jax.integrations.maxtext import hidden_and_head, vocabulary_loss
from liger_jax.integrations.tunix import with_fused_log_probs, with_reference

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.skipif(find_spec("maxtext") is None, reason="maxtext is not installed"),
    pytest.mark.filterwarnings("ignore"),
]


def of(module):
    return importlib.import_module(f"maxtext.{module}")


def test_dropout_is_refused():
    with pytest.raises(ValueError, match="config.dropout_rate must be 0"):
        config = SimpleNamespace(enable_dropout=True, dropout_rate=0.1)
        vocabulary_loss(None, jnp.zeros((1, 1, 1)), {}, config, True)


@pytest.mark.parametrize("name", ["mtp_num_layers", "mhc_expansion_rate"])
def test_more_than_a_product_is_refused(name):
    config = SimpleNamespace(**dict(enable_dropout=False, mtp_num_layers=0, mhc_expansion_rate=1) | {name: 2})
    with pytest.raises(ValueError, match=f"config.{name}=2 must be"):
        hidden_and_head(SimpleNamespace(base=SimpleNamespace(config=config)), jnp.ones((1, 2)), jnp.ones((1, 2)))


PLAIN = {...: jnp.ones((4, 8))}  # what a variable's [...] gives


@pytest.mark.parametrize("fields", [dict(kernel=PLAIN, kernel_lora_a=PLAIN), dict(kernel={...: "codes"})])
def test_a_head_that_is_no_plain_array_is_refused(fields):
    head = SimpleNamespace(**fields)
    config = SimpleNamespace(logits_via_embedding=False, enable_dropout=False, dropout_rate=0.0, z_loss_multiplier=0.0)
    model = SimpleNamespace(config=config, decoder=SimpleNamespace(decoder_norm=lambda x: x, logits_dense=head))
    data = dict(targets=jnp.zeros((1, 2), int), targets_segmentation=jnp.ones((1, 2), int))
    with pytest.raises(ValueError, match="has LoRA or is quantised"):
        vocabulary_loss(model, jnp.ones((1, 2, 4)), data, config, True)


HEADS = {"its own head": {}, "a tied head": dict(logits_via_embedding=True, final_logits_soft_cap=3.0)}
heads = pytest.mark.parametrize("head", HEADS)


def assert_same(ours, theirs, head):
    """Within 1e-5 of the largest; a tied table's gradient, which MaxText sums in bfloat16, within 2⁻⁷ of it."""
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        share = 2**-7 if head == "a tied head" and np.shape(x) == (512, 32) else 1e-5
        np.testing.assert_allclose(x, y, rtol=0, atol=share * max(0.1, float(np.max(np.abs(y)))))


@heads
def test_loss_and_gradients_are_those_of_the_tiling(head, rng):
    import flax.linen as nn

    config = make_config(**HEADS[head])
    mesh = make_mesh(config)
    data = dict(targets=jnp.asarray(rng.integers(0, 512, (4, 16))))
    data["targets_segmentation"] = jnp.asarray(rng.integers(0, 2, (4, 16)))
    hidden = jnp.asarray(rng.normal(size=(4, 16, 32)), jnp.float32)
    with mesh, nn.logical_axis_rules(config.logical_axis_rules):
        graph, params, rest = nnx.split(
            of("models.models").Transformer(config, mesh, None, rngs=nnx.Rngs(0)), nnx.Param, ...
        )

        def run(loss_fn):
            loss = lambda params, hidden: loss_fn(nnx.merge(graph, params, rest, copy=True), hidden, data, config, True)
            return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, hidden)

        theirs, ours = run(of("utils.vocabulary_tiling").vocab_tiling_nnx_loss), run(vocabulary_loss)
    assert_same(ours, theirs, head)


@pytest.mark.skipif(find_spec("tunix") is None, reason="tunix is not installed")
@pytest.mark.parametrize("algorithm", ["dpo", "orpo"])
@heads
def test_losses_and_gradients_of_its_dpo_are_those_with_logits(head, algorithm, rng):
    import flax.linen as nn

    dpo_trainer = importlib.import_module("tunix.sft.dpo.dpo_trainer")
    config = make_config(num_vocab_tiling=1, model_name="llama3.1-8b", override_model_config=True, **HEADS[head])
    mesh = make_mesh(config)
    with mesh, nn.logical_axis_rules(config.logical_axis_rules):
        models = [of("models.models").Transformer(config, mesh, None, rngs=nnx.Rngs(seed)) for seed in (0, 1)]
        adapter, reference = (of("integration.tunix.tunix_adapter").TunixMaxTextAdapter(m, pad_id=0) for m in models)
        tokens = [jnp.asarray(rng.integers(1, 512, (4, 8))) for _ in range(3)]
        masks = [jnp.ones((4, 8), int).at[1, :3].set(0), *[jnp.ones((4, 8), int).at[2, 5:].set(0)] * 2]
        settings = dpo_trainer.DPOTrainingConfig(eval_every_n_steps=9, max_steps=1, algorithm=algorithm)
        trainer = dpo_trainer.DPOTrainer(adapter, None, optax.sgd(1.0), settings)
        pairs = dpo_trainer.TrainingInput(*(x for pair in zip(tokens, masks, strict=True) for x in pair))
        example = trainer._prepare_inputs(pairs)
        if algorithm == "dpo":
            example = with_reference(example, reference)
        graph, params, rest = nnx.split(adapter, nnx.Param, ...)

        def run(loss_fn):
            def loss(params):
                model = nnx.merge(graph, params, rest, copy=True)
                return loss_fn(model, example, algorithm=algorithm, label_smoothing=0.1)

            compiled = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(params).compile()
            return compiled(params), str(compiled.as_text())

        (theirs, with_logits), (ours, without) = map(run, [f := dpo_trainer.dpo_loss_fn, with_fused_log_probs(f)])
    assert_same(ours, theirs, head)
    logits = re.compile(r"f32\[8,(15|16|8),512\]")
    assert logits.search(with_logits) and not logits.search(without)


def test_its_trainer_trains_alike_with_the_tiling_and_without_logits():
    tiling, ours = integrations_maxtext.main(steps=8).values()
    np.testing.assert_allclose(ours, tiling, rtol=1e-5)
    assert ours[-1] < ours[0] - 0.3
