"""One training step with optax, written both ways: `nnx.jit` on modules, and plain `jax.jit` on split state.

    python -m examples.train_step

Both donate what they update, so that parameters and optimizer state are overwritten in place. Both give the same
numbers. The training examples use the second, `liger_jax.training.make_step`, whose state is one pytree to compile for,
to save and to shard.
"""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx

if not __package__:  # started by its path, from any folder: Python must find the packages of the checkout
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from liger_jax.models import LlamaConfig, LlamaForCausalLM
from liger_jax.training import language_model_loss, make_step

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1,
)  # fmt: skip


@functools.partial(nnx.jit, donate_argnums=(0, 1))
def nnx_train_step(model: nnx.Module, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    """Updates model and optimizer in place, and returns the loss before the update. `tokens` (B, T) are token ids."""
    loss, grads = nnx.value_and_grad(language_model_loss)(model, tokens)
    optimizer.update(model, grads)
    return loss


def train_modules(batches: jax.Array) -> list[float]:
    """Trains a model as modules hold their state; returns the loss of each step. `batches` are (steps, B, T)."""
    model = LlamaForCausalLM(CONFIG, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    return [float(nnx_train_step(model, optimizer, tokens)) for tokens in batches]


def train_split_state(batches: jax.Array) -> list[float]:
    """Trains the same model as a pytree beside its graph; returns the loss of each step."""
    graph, params = nnx.split(LlamaForCausalLM(CONFIG, rngs=nnx.Rngs(0)))
    optimizer, losses = optax.adamw(1e-2), []
    state = (params, optimizer.init(params))
    step = jax.jit(make_step(graph, optimizer), donate_argnums=0)
    for tokens in batches:
        state, loss = step(state, tokens)
        losses.append(float(loss))
    return losses


def main(steps: int = 20) -> dict[str, list[float]]:
    """Trains both ways on tokens that count upwards; returns the losses of both."""
    starts = jax.random.randint(jax.random.key(0), (steps, 4, 1), 0, CONFIG.vocab_size)
    batches = (starts + jnp.arange(32)) % CONFIG.vocab_size
    losses = {"nnx.jit on modules": train_modules(batches), "jax.jit on split state": train_split_state(batches)}
    for name, values in losses.items():
        print(f"{name}: loss {values[0]:.3f} → {values[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
