"""The fused loss on an Equinox model: its hidden states, and the weight of its head.

    python -m examples.integrations_equinox

It needs `pip install equinox`. The weight of `eqx.nn.Linear` is (V, D), as that of an embedding, which is the layout
that losses take by default.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

if not __package__:  # started by its path, from any folder: Python must find the packages of the checkout
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from liger_jax.losses import causal_lm_loss

VOCAB, WIDTH = 1024, 32


def make_model(key) -> Any:
    """An Equinox model of one sequence, with a method that stops before its head."""
    import equinox as eqx  # pyright: ignore[reportMissingImports]

    class Model(eqx.Module):
        embed: eqx.nn.Embedding
        mix: eqx.nn.Linear
        head: eqx.nn.Linear

        def __init__(self, key):
            of_embed, of_mix, of_head = jax.random.split(key, 3)
            self.embed = eqx.nn.Embedding(VOCAB, WIDTH, key=of_embed)
            self.mix = eqx.nn.Linear(WIDTH, WIDTH, key=of_mix)
            self.head = eqx.nn.Linear(WIDTH, VOCAB, key=of_head)

        def hidden(self, tokens):
            x = jax.vmap(self.embed)(tokens)
            return jax.nn.gelu(jax.vmap(self.mix)(jnp.cumsum(x, axis=0) + x))

        def __call__(self, tokens):
            return jax.vmap(self.head)(self.hidden(tokens))

    return Model(key)


def logits_loss(model, tokens):
    """The loss on logits (B, T, V)."""
    logits = jax.vmap(model)(tokens)[:, :-1]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))


def fused_loss(model, tokens):
    """The same loss without logits."""
    return causal_lm_loss(jax.vmap(model.hidden)(tokens), model.head.weight, tokens, bias=model.head.bias)


def train(loss_fn, steps):
    """Trains on tokens that count upwards.

    Args:
        loss_fn: a function of the model and of tokens (B, T).
        steps: training steps.

    Returns:
        Each step's loss.
    """
    import equinox as eqx  # pyright: ignore[reportMissingImports]

    model, optimizer, losses = make_model(jax.random.key(0)), optax.adam(1e-2), []
    state = optimizer.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def step(model, state, tokens):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, tokens)
        updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, loss

    for tokens in (jax.random.randint(jax.random.key(1), (steps, 4, 1), 0, VOCAB) + jnp.arange(32)) % VOCAB:
        model, state, loss = step(model, state, tokens)
        losses.append(float(loss))
    return losses


def main(steps=20):
    """Trains with both losses.

    Args:
        steps: training steps of each.

    Returns:
        The losses of both.
    """
    losses = {"logits": train(logits_loss, steps), "fused": train(fused_loss, steps)}
    for name, values in losses.items():
        print(f"{name}: loss {values[0]:.3f} → {values[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
