"""An optax training loop before and after: only the loss's two lines change.

    python -m examples.optax_swap

The model is a stand-in: any function that gives hidden states, and a head (V, D). `before` holds logits and their
gradient, B·T·V numbers each; `swapped` changes an import, and reads the logits once on a GPU; `fused` holds none.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

if not __package__:  # started by its path, from any folder: Python must find the packages of the checkout
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from liger_jax import fused_linear_cross_entropy, losses


def trunk(params, tokens):
    """Hidden states (B, T, D)."""
    return jax.nn.gelu(params["embedding"][tokens] @ params["inner"])


def before(params, tokens):
    logits = trunk(params, tokens[:, :-1]) @ params["head"].T
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def swapped(params, tokens):
    logits = trunk(params, tokens[:, :-1]) @ params["head"].T
    return losses.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def fused(params, tokens):
    return fused_linear_cross_entropy(trunk(params, tokens[:, :-1]), params["head"], tokens[:, 1:])


def train(loss, steps=20, batch=4, length=65, width=32, vocab=1024):
    """Trains on tokens that count upwards; returns the loss of each step."""
    keys = jax.random.split(jax.random.key(0), 4)
    normal = lambda key, *shape: 0.1 * jax.random.normal(key, shape)
    params = {
        "embedding": normal(keys[0], vocab, width),
        "inner": normal(keys[1], width, width),
        "head": normal(keys[2], vocab, width),
    }
    tokens = (jax.random.randint(keys[3], (steps, batch, 1), 0, vocab) + jnp.arange(length)) % vocab
    optimizer = optax.adam(1e-2)
    opt_state, values = optimizer.init(params), []

    @jax.jit
    def step(params, opt_state, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, value

    for batch_tokens in tokens:
        params, opt_state, value = step(params, opt_state, batch_tokens)
        values.append(float(value))
    return values


def main():
    """Runs all three."""
    for loss in (before, swapped, fused):
        values = train(loss)
        print(f"{loss.__name__}: loss {values[0]:.4f} → {values[-1]:.4f}")


if __name__ == "__main__":
    main()
