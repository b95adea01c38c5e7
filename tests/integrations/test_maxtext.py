"""MaxText's vocabulary tiling beside ours on MaxText's own model. `make integrations` installs MaxText."""

import importlib
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from liger_jax.integrations.maxtext import vocabulary_loss

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.skipif(find_spec("maxtext") is None, reason="maxtext is not installed"),
    pytest.mark.filterwarnings("ignore"),
]


def of(module):
    return importlib.import_module(f"maxtext.{module}")


def config_of(**options):
    base = Path(str(of("configs").__path__[0])) / "base.yml"
    options = dict(
        run_name="test", enable_checkpointing=False, base_emb_dim=32, base_num_query_heads=2, base_num_kv_heads=2,
        base_mlp_dim=48, base_num_decoder_layers=1, head_dim=16, vocab_size=512, max_target_length=16,
        per_device_batch_size=4, num_vocab_tiling=4, dtype="float32", weight_dtype="float32", attention="dot_product",
        skip_jax_distributed_system=True, hardware="cpu", dataset_type="synthetic", log_config=False,
        matmul_precision="highest", z_loss_multiplier=1e-3,
    ) | options  # fmt: skip
    return of("configs.pyconfig").initialize(["", str(base), *(f"{name}={x}" for name, x in options.items())])


@pytest.mark.parametrize(("name", "value"), [("dropout_rate", 0.1), ("logits_via_embedding", True)])
def test_what_it_does_not_do_is_refused(name, value):
    config = SimpleNamespace(**dict(enable_dropout=True, dropout_rate=0.0, logits_via_embedding=False) | {name: value})
    with pytest.raises(ValueError, match=f"config.{name} must be"):
        vocabulary_loss(None, jnp.zeros((1, 1, 1)), {}, config, True)


def test_loss_and_gradients_are_those_of_the_tiling(rng):
    import flax.linen as nn

    config = config_of()
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape([1] * len(config.mesh_axes)), config.mesh_axes)
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
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * max(1e-3, float(np.max(np.abs(y)))))
