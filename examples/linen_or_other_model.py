"""The fused loss on models that are not this library's: Flax Linen and NNX, by their hidden states and head.

    python -m examples.linen_or_other_model

`causal_lm_loss` needs what goes into the head, and the head's matrix. So a model gets a method that stops before its
head; the head stays where it is, since the model uses it to generate.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx

if not __package__:  # started by its path, from any folder: Python must find the packages of the checkout
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from liger_jax.losses import causal_lm_loss

VOCAB, WIDTH = 1024, 32


class LinenModel(linen.Module):
    def setup(self):
        self.embed = linen.Embed(VOCAB, WIDTH)
        self.mix = linen.Dense(WIDTH)
        self.lm_head = linen.Dense(VOCAB)

    def hidden(self, tokens):
        x = self.embed(tokens)
        return linen.gelu(self.mix(jnp.cumsum(x, axis=1) + x))

    def __call__(self, tokens):
        return self.lm_head(self.hidden(tokens))


def linen_loss(params, tokens):
    """The loss of a Linen model: `apply` the method, and look the head up among the parameters."""
    hidden = LinenModel().apply({"params": params}, tokens, method="hidden")
    head = params["lm_head"]
    return causal_lm_loss(hidden, head["kernel"], tokens, weight_layout="dv", bias=head["bias"])


class NNXModel(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.mix = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def hidden(self, tokens):
        x = self.embed(tokens)
        return nnx.gelu(self.mix(jnp.cumsum(x, axis=1) + x))

    def __call__(self, tokens):
        return self.embed.attend(self.hidden(tokens))


def nnx_loss(model, tokens):
    """The loss of an NNX model that uses its embedding (V, D) as the head. Both gradients go to that one array."""
    return causal_lm_loss(model.hidden(tokens), model.embed.embedding[...], tokens)


def main(steps=20):
    """Trains both on tokens that count upwards.

    Args:
        steps: training steps of each model.

    Returns:
        The losses of both.
    """
    tokens = (jax.random.randint(jax.random.key(0), (steps, 4, 1), 0, VOCAB) + jnp.arange(32)) % VOCAB
    optimizer, losses = optax.adam(1e-2), {"linen": [], "nnx": []}

    params = LinenModel().init(jax.random.key(1), tokens[0])["params"]
    opt_state, loss_and_grads = optimizer.init(params), jax.jit(jax.value_and_grad(linen_loss))
    for batch in tokens:
        loss, grads = loss_and_grads(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        losses["linen"].append(float(loss))

    model = NNXModel(nnx.Rngs(1))
    state, loss_and_grads = nnx.Optimizer(model, optimizer, wrt=nnx.Param), nnx.jit(nnx.value_and_grad(nnx_loss))
    for batch in tokens:
        loss, grads = loss_and_grads(model, batch)
        state.update(model, grads)
        losses["nnx"].append(float(loss))

    for name, values in losses.items():
        print(f"{name}: loss {values[0]:.3f} → {values[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
