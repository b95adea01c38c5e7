"""Optax's optimizers on this library's models: micro-steps, Muon, and parts that are trained apart or not at all.

    python -m examples.integrations_optax

`make_step` takes any optax transformation, and 8-bit AdamW is one like others. A layer's weights are stacked over the
layers, so that Muon has to be given which two axes are a matrix. `optax.partition` gives each part of a model its own
optimizer, and the state of a part that is frozen is empty.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx

if not __package__:  # started by its path, from any folder: Python must find the packages of the checkout
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from liger_jax.models import LlamaConfig, LlamaForCausalLM
from liger_jax.training import adamw_8bit, make_step

CONFIG = LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
    tie_word_embeddings=True,
)  # fmt: skip


def names(path):
    return [str(getattr(key, "key", getattr(key, "name", key))) for key in path]


def is_matrix(path, _):
    """Whether a parameter is a projection's kernel, whose first axis counts the layers."""
    return "kernel" in names(path)


def muon_axes(params):
    """The axes that Muon takes as rows and columns; None leaves a parameter to Adam."""
    axes = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    return jax.tree.map_with_path(lambda *leaf: axes if is_matrix(*leaf) else None, params)


def parts(params):
    """Names of parts for `optax.partition`: the embedding, which is the head as well, is frozen."""
    return jax.tree.map_with_path(lambda path, _: "frozen" if "embed_tokens" in names(path) else "trained", params)


OPTIMIZERS = {
    "8-bit AdamW": lambda: adamw_8bit(1e-2),
    "8-bit AdamW every second step": lambda: optax.MultiSteps(
        adamw_8bit(1e-2), every_k_schedule=2
    ).gradient_transformation(),
    "Muon": lambda: optax.contrib.muon(1e-2, muon_weight_dimension_numbers=muon_axes),
    "Muon, and 8-bit AdamW for the rest": lambda: optax.partition(
        {
            "muon": optax.chain(
                optax.contrib.scale_by_muon(weight_dimension_numbers=muon_axes), optax.scale_by_learning_rate(1e-2)
            ),
            "adam": adamw_8bit(1e-2),
        },
        lambda params: jax.tree.map_with_path(lambda *leaf: "muon" if is_matrix(*leaf) else "adam", params),
    ),
    "8-bit AdamW, the embedding frozen": lambda: optax.partition(
        {"trained": adamw_8bit(1e-2), "frozen": optax.set_to_zero()}, parts
    ),
}


def train(optimizer, steps=20):
    """Trains on tokens that count upwards.

    Args:
        optimizer: any optax transformation.
        steps: how many batches.

    Returns:
        The parameters before and after, the optimizer's state, and each step's loss.
    """
    tokens = (jax.random.randint(jax.random.key(0), (steps, 4, 1), 0, 128) + jnp.arange(16)) % 128
    graph, params = nnx.split(LlamaForCausalLM(CONFIG, rngs=nnx.Rngs(0)))
    step, state, losses = jax.jit(make_step(graph, optimizer)), (params, optimizer.init(params)), []
    for batch in tokens:
        state, loss = step(state, batch)
        losses.append(float(loss))
    return params, *state, losses


def main(steps=20):
    """Trains a model with each optimizer.

    Args:
        steps: training steps of each.

    Returns:
        What `train` returns, by the optimizer's name.
    """
    found = {name: train(make(), steps) for name, make in OPTIMIZERS.items()}
    for name, (_, _, state, losses) in found.items():
        size = sum(x.nbytes for x in jax.tree.leaves(state))
        print(f"{name}: loss {losses[0]:.3f} → {losses[-1]:.3f}, {size:,} bytes of state")
    return found


if __name__ == "__main__":
    main()
