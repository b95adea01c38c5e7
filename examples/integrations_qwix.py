"""Training with qwix's quantised projections (QAT) on a model of this library, with its fused loss.

    python -m examples.integrations_qwix

It needs `pip install qwix`. Qwix rounds what goes into the products of attention and feed-forward, forwards and
backwards. The fused loss is left as it is, and so is the head that it reads.
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
from liger_jax.training import make_step

VOCAB = 128


def make_model():
    """A small LLaMA."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    return LlamaForCausalLM(config, rngs=nnx.Rngs(0))


def quantized(model, tokens, modules=".*self_attn.*|.*mlp.*"):
    """A copy of a model that qwix trains with int8 products.

    Args:
        model: any model of this library, with adapters of this library or without.
        tokens: ids (B, T), for one call by which qwix gets to know the model.
        modules: a regular expression for paths of modules.

    Returns:
        The copy; its parameters stay as they were.
    """
    import qwix  # pyright: ignore[reportMissingImports]

    rule = qwix.QtRule(module_path=modules, weight_qtype=jnp.int8, act_qtype=jnp.int8)
    return qwix.quantize_model(model, qwix.QtProvider([rule]), tokens)


def train(model, batches):
    """Trains on batches of tokens.

    Args:
        model: a model of this library.
        batches: ids (steps, B, T).

    Returns:
        Each step's loss.
    """
    graph, params = nnx.split(model)
    optimizer = optax.adam(1e-2)
    step, state, losses = jax.jit(make_step(graph, optimizer)), (params, optimizer.init(params)), []
    for tokens in batches:
        state, loss = step(state, tokens)
        losses.append(float(loss))
    return losses


def main(steps=12):
    """Trains in float32 and with int8 products.

    Args:
        steps: training steps of each.

    Returns:
        The losses of both.
    """
    batches = (jax.random.randint(jax.random.key(0), (steps, 4, 1), 0, VOCAB) + jnp.arange(16)) % VOCAB
    losses = {
        "float32": train(make_model(), batches),
        "int8": train(quantized(make_model(), batches[0]), batches),
    }
    for name, values in losses.items():
        print(f"{name}: loss {values[0]:.3f} → {values[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
