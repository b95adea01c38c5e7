"""MaxText's training loss on MaxText's own model, with this library's loss in the place of its vocabulary tiling.

    python -m examples.integrations_maxtext

It needs Python 3.12 and `pip install maxtext[tpu]`. Its trainer's `loss_fn` calls `vocab_tiling_nnx_loss` wherever
`num_vocab_tiling` is above 1, so that a program of one's own sets both, and then runs MaxText's trainer:

    train.vocab_tiling_nnx_loss = vocabulary_loss
"""

import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

if not __package__:  # started by its path, from any folder: Python must find the packages of the checkout
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from liger_jax.integrations.maxtext import vocabulary_loss

VOCAB, LENGTH, BATCH = 512, 16, 4


def make_config(**options):
    """MaxText's config of a small model.

    Args:
        **options: fields of the config, which go before those here.

    Returns:
        The config.
    """
    from maxtext import configs  # pyright: ignore[reportMissingImports]
    from maxtext.configs import pyconfig  # pyright: ignore[reportMissingImports]

    fields = dict(
        run_name="test", enable_checkpointing=False, base_emb_dim=32, base_num_query_heads=2, base_num_kv_heads=2,
        base_mlp_dim=48, base_num_decoder_layers=1, head_dim=16, vocab_size=VOCAB, max_target_length=LENGTH,
        per_device_batch_size=BATCH, num_vocab_tiling=4, dtype="float32", weight_dtype="float32",
        attention="dot_product", skip_jax_distributed_system=True, hardware="cpu", dataset_type="synthetic",
        log_config=False, matmul_precision="highest", z_loss_multiplier=1e-3,
    ) | options  # fmt: skip
    base = Path(configs.__path__[0]) / "base.yml"
    return pyconfig.initialize(["", str(base), *(f"{name}={x}" for name, x in fields.items())])


def make_mesh(config):
    """The mesh of MaxText's axes on one device."""
    return jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape([1] * len(config.mesh_axes)), config.mesh_axes)


def make_batch(key):
    """A batch as MaxText's loader makes it: tokens that count upwards, in one segment a row."""
    tokens = (jax.random.randint(key, (BATCH, 1), 0, VOCAB) + jnp.arange(LENGTH + 1)) % VOCAB
    ones, positions = jnp.ones((BATCH, LENGTH), int), jnp.broadcast_to(jnp.arange(LENGTH), (BATCH, LENGTH))
    inputs = dict(inputs=tokens[:, :-1], inputs_position=positions, inputs_segmentation=ones)
    return inputs | dict(targets=tokens[:, 1:], targets_position=positions, targets_segmentation=ones)


def train(loss=None, steps=12):
    """Trains MaxText's model by the `loss_fn` of its trainer.

    Args:
        loss: what takes the place of `vocab_tiling_nnx_loss`; None for MaxText's own.
        steps: how many batches.

    Returns:
        Each step's loss.
    """
    import flax.linen as nn
    from maxtext.models.models import Transformer  # pyright: ignore[reportMissingImports]
    from maxtext.trainers.pre_train import train as trainer  # pyright: ignore[reportMissingImports]

    config, optimizer, losses = make_config(), optax.adam(1e-2), []
    mesh = make_mesh(config)

    @jax.jit
    def step(params, opt_state, batch):
        def loss_of(params):
            model = nnx.merge(graph, params, rest, copy=True)
            return trainer.loss_fn(model, config, dict(batch), None, None)[0]

        value, grads = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, value

    # The patch ends with this function, so that MaxText's loss and ours can be compared in one program.
    replaced = mock.patch.object(trainer, "vocab_tiling_nnx_loss", loss or trainer.vocab_tiling_nnx_loss)
    with replaced, mesh, nn.logical_axis_rules(config.logical_axis_rules):
        graph, params, rest = nnx.split(Transformer(config, mesh, None, rngs=nnx.Rngs(0)), nnx.Param, ...)
        opt_state = optimizer.init(params)
        for key in jax.random.split(jax.random.key(0), steps):
            params, opt_state, value = step(params, opt_state, make_batch(key))
            losses.append(float(value))
    return losses


def main(steps=12):
    """Trains with both losses.

    Args:
        steps: training steps of each.

    Returns:
        The losses of both.
    """
    found = {"MaxText's tiling": train(steps=steps), "ours": train(vocabulary_loss, steps)}
    for name, losses in found.items():
        print(f"{name}: loss {losses[0]:.4f} → {losses[-1]:.4f}")
    return found


if __name__ == "__main__":
    main()
